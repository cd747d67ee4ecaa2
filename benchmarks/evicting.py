"""Baselines that evict (`elastic.sim.core.evicting`) in real engines.

The memory that is swapped to is on a CPU as fast as the cache's own: it is better than a GPU would have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from elastic.cluster.fleet import instance
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.engines.continuous import engine as engine_module
from elastic.engines.continuous.reports import EngineReports
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.core.sequence import Sequence as LiveSequence
from elastic.sim.core.evicting import OptimisticBlocks, RecomputingScheduler, SwappingScheduler

WAYS = ("recompute", "swap")


class TensorSwappingScheduler(SwappingScheduler):
    """Copies the blocks of each layer."""

    def to_host(self, sequence: LiveSequence) -> list[torch.Tensor]:
        return [rows[blocks] for rows, blocks in self._rows(sequence)]

    def from_host(self, sequence: LiveSequence, kept: list[torch.Tensor]) -> None:
        for (rows, blocks), values in zip(self._rows(sequence), kept, strict=True):
            rows[blocks] = values

    def _rows(self, sequence: LiveSequence) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Give for each layer all blocks, [blocks, bytes], and which of them hold what is computed of a sequence."""
        memory: Any = self.blocks.memory
        for number, ranges in enumerate(memory.groups):
            nbytes, total = ranges.group.block_bytes, memory.sectors * memory.blocks_per_sector(number)
            blocks = torch.tensor(sequence.table.blocks[number])
            for layer in ranges.group.layers:
                yield ranges.view(layer, torch.uint8)[: total * nbytes].view(total, nbytes), blocks


SCHEDULERS = dict(zip(WAYS, (RecomputingScheduler, TensorSwappingScheduler), strict=True))


def install(way: str, spare: int = 1) -> None:
    """Have engines that are made in this process from now on evict in one of the `WAYS`.

    `spare`: see `OptimisticBlocks`.
    """
    OptimisticBlocks.spare = spare
    engine_module.BlockManager = OptimisticBlocks  # type: ignore[misc]
    engine_module.RestartingScheduler = SCHEDULERS[way]  # type: ignore[misc]
    EngineReports.begin = _tell_without_journal  # type: ignore[method-assign]


def _tell_without_journal(reports: EngineReports) -> None:
    """Tell each step, but not where keys and values are: they come and go."""
    if reports.on_step is not None:
        reports._loop.on_step = partial(reports.on_step, None)


class Installed:
    """As the engine's option `step_budget`: no budget, but a rank that reads it installs one of the `WAYS`."""

    def __init__(self, way: str, spare: int = 1) -> None:
        self.way, self.spare = way, spare

    def __reduce__(self) -> tuple[Any, ...]:
        return install, (self.way, self.spare)


@contextmanager
def given_by_present_need() -> Iterator[None]:
    """Have fleets of this process give requests to instances that have blocks for their tokens so far."""

    def present_blocks(kv: KVFormat, record: RequestRecord) -> int:
        so_far = (len(record.request.prompt) + len(answer.tokens) + 1 for answer in record.live)
        return sum(instance.blocks_of(kv, tokens) for tokens in so_far)

    with (
        patch.object(instance, "all_blocks", present_blocks),
        patch.object(instance, "can_all_end", lambda *_: False),
    ):
        yield
