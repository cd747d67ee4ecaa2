"""An engine as a rank has it: what it tells is mirrored, the tokens that it computes are counted, its steps gated."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import elastic
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.core.kv_state import KVDirectory, KVReport, KVSource, SectorPages, SequenceKV
from elastic.engines.core.load import EngineLoad
from elastic.engines.core.step import SequenceState
from support.wrapped_model import small

_places = itertools.count()


def own_place(model: Any, nbytes: int) -> elastic.Place:
    """A place of no other engine where a model is. Pages of a GPU have the size that its driver wants."""
    device, number = next(model.parameters()).device, next(_places)
    if device.type == "cpu":
        return small(nbytes, f"cpu#tracked{number}")
    return elastic.Place(f"{device}#tracked{number}", device, nbytes)


class TrackedEngine:
    """Over a wrapped model of its own, at a place of its own; started."""

    def __init__(self, model: Any, nbytes: int = 4 << 20, *, wrap: Any = None, **options: Any) -> None:
        self.model = model
        elastic.wrap(model, places=own_place(model, nbytes), **(wrap or {}))
        self.engine = ContinuousEngine(model, **{"block_tokens": 8, "max_batch_tokens": 32, **options})
        self.computed = 0
        """Tokens that went through the model."""
        self.reports: list[KVReport] = []
        self.loads: list[EngineLoad] = []
        """As of each report."""
        self.rooms: list[EngineLoad] = []
        """As of when blocks came free behind the last one."""
        self.steps_without_report = 0
        self._left = math.inf  # steps that may begin
        self._more = threading.Condition()
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        source = self.engine.reports.kv_source()
        if source is not None:  # else no other process can read its blocks
            self.source = source
            self.directory = KVDirectory(source)
        self.engine.reports.on_step = self._hear
        self.engine.reports.on_room = lambda: self.rooms.append(self.engine.reports.load())
        self.engine.start()

    def sources_of(self, kv: Iterable[SequenceKV]) -> KVSource:
        """Where blocks of it can be read, as a fleet says it: by what the engine has told."""
        return replace(self.source, sectors=self.directory.sectors_of(kv))

    def sectors_of(self, sequences: Iterable[SequenceKV]) -> tuple[SectorPages, ...]:
        """The pages of the sectors in which blocks of sequences are: as the engine has them, not as it told."""
        memory = self.engine._memory
        with memory.lock:
            blocks = [(g, block) for kv in sequences for g, group in enumerate(kv.blocks) for block in group]
            located = sorted({(g, block // memory.blocks_per_sector(g)) for g, block in blocks})
            mapped = [(g, sector) for g, sector in located if sector in memory.groups[g].mapped]
            return tuple(SectorPages(g, sector, memory.groups[g].pages_of(sector)) for g, sector in mapped)

    def mirrored(self, states: Sequence[SequenceState]) -> tuple[SequenceKV, ...]:
        """What is known of a request's KV by what the engine has told."""
        found = (self.directory.of(s.id, len(s.request.prompt) + len(s.generated)) for s in states)
        return tuple(kv for kv in found if kv is not None)

    def only(self, steps: int) -> None:
        """Let so many steps begin from now on, and then no more."""
        with self._more:
            self._left = steps

    def go_on(self, steps: float = math.inf) -> None:
        """Let so many more begin."""
        with self._more:
            self._left += steps
            self._more.notify_all()

    def close(self) -> None:
        """Stop it, and see that nothing is left."""
        self.go_on()
        self.engine.stop(drain=False)
        self.engine.check()
        self.engine.runtime.check()
        assert self.engine.runtime.kv.used_bytes == 0
        self._hook.remove()
        if getattr(self.model, "elastic", None) is not None:
            elastic.unwrap(self.model)

    def _count(self, module: Any, args: Any, inputs: Any) -> None:
        if "paged_cache" in inputs and self.engine._variants.counts():
            with self._more:
                assert self._more.wait_for(lambda: self._left > 0, 60)
                self._left -= 1
                self.computed += inputs["input_ids"].shape[1]

    def _hear(self, report: KVReport | None) -> None:
        if report is None:
            self.steps_without_report += 1
            return
        self.reports.append(report)
        self.loads.append(self.engine.reports.load())
        if hasattr(self, "source"):
            self.directory.apply(report)
