"""A baseline of `reshard.py`, in ranks that serve: all that a rank is to have goes through host memory (Seesaw).

Instances stop (`exchange="stall"`), and everything else is the library's exchange, but for where it reads: keys and
values are written to a memory file of the host first, and read from that by whoever gets them, also by the rank itself
what stays with it; the weights that a rank is to have are dropped and read from the checkpoint, which the host has in
its page cache.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.core.kv_state import LayersKV
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import StateError
from elastic.kvcache.storage.sector_space import SectorSpace
from elastic.memory.backends.shared_file import share
from elastic.memory.pages.page_pool import PagePool
from elastic.weights.model import ModelWeights

FORM: dict[str, Any] = {"exchange": "stall"}


class ThroughHost:
    """As the engine's option `step_budget`: no budget, but a rank that reads it goes through host memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install, ()


def install() -> None:
    """Have engines of this process exchange layers by way of host memory from now on."""
    KVExchange.locate = _located_in_host_memory  # type: ignore[method-assign]
    ModelWeights.source = _nowhere  # type: ignore[method-assign]
    ContinuousEngine._put_together = _with_such_flips  # type: ignore[method-assign]


class HostFile:
    """Memory of the host with pages like those of a place, which other processes can read."""

    def __init__(self, pool: PagePool) -> None:
        self._page_bytes = pool.page_bytes
        self._pages, self._next = 2 * pool.budget_pages, 0
        file = os.memfd_create("through-host", os.MFD_CLOEXEC)
        os.ftruncate(file, self._pages * pool.page_bytes)
        self.shared = share(file)
        self._bytes = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)

    def write(self, content: torch.Tensor) -> tuple[int, ...]:
        """Copy whole pages, [bytes], and return which they are here. The oldest are overwritten."""
        count = content.numel() // self._page_bytes
        if self._next + count > self._pages:
            self._next = 0
        first, self._next = self._next, self._next + count
        self._at(first, count).copy_(content)
        return tuple(range(first, first + count))

    def read(self, pages: tuple[int, ...], content: torch.Tensor) -> None:
        """Copy what was written back."""
        content.copy_(self._at(pages[0], len(pages)))

    def _at(self, first: int, count: int) -> torch.Tensor:
        return self._bytes[first * self._page_bytes :][: count * self._page_bytes]


_files: dict[PagePool, HostFile] = {}
_locate, _put_together = KVExchange.locate, ContinuousEngine._put_together


def _file_of(memory: SectorSpace) -> HostFile:
    pool = memory.kv.pool
    if pool not in _files:
        _files[pool] = HostFile(pool)
    return _files[pool]


def _sector(memory: SectorSpace, part: int, sector: int) -> torch.Tensor:
    """View a sector of a part of the KV cache, [bytes]."""
    ranges = memory.groups[memory.group_of(part)]
    nbytes = ranges.layer_pages * memory.kv.pool.page_bytes
    return ranges.view(part, torch.uint8)[sector * nbytes :][:nbytes]


def _located_in_host_memory(
    exchange: KVExchange,
    memory: SectorSpace,
    parts: Iterable[int],
    sectors: Iterable[tuple[int, int]] | None = None,
) -> LayersKV:
    """Write parts of the KV cache to host memory, and say where they are there."""
    with memory.lock:
        told = _locate(exchange, memory, parts, sectors)
        file = _file_of(memory)
        pages = {
            part: {sector: file.write(_sector(memory, part, sector)) for sector in there}
            for part, there in told.pages.items()
        }
    return replace(told, file=file.shared, pages=pages)


def _nowhere(weights: ModelWeights, parts: Any) -> Any:
    raise StateError("weights come from the checkpoint")


def _with_such_flips(engine: ContinuousEngine, *parts: Any) -> None:
    _put_together(engine, *parts)
    flip = partial(_flip_with_what_stays, engine, engine.exchange.flip)
    engine.exchange.flip = flip  # type: ignore[method-assign]


def _flip_with_what_stays(
    engine: ContinuousEngine, flip: Callable[..., Any], path: LayerPath, *given: Any, **options: Any
) -> Any:
    """Have what stays at the home go to host memory and back, too: keys and values, and once for all of it weights."""
    stays = sorted(set(path.shards_of(engine.rank)) & set(engine.path.shards_of(engine.rank)))
    engine._loop.between_steps(partial(_there_and_back, engine, stays))
    engine.runtime.drop(shards=tuple(stays))
    engine.runtime.restore(shards=tuple(stays))
    return flip(path, *given, **options)


def _there_and_back(engine: ContinuousEngine, shards: list[int]) -> None:
    memory = engine._memory
    with memory.lock:
        file, told = _file_of(memory), memory.layer_pages(sorted(engine.kv.exchange.places(shards)), None)
        kept = {(part, sector): file.write(_sector(memory, part, sector)) for part, at in told.items() for sector in at}
        for (part, sector), pages in kept.items():
            file.read(pages, _sector(memory, part, sector))
