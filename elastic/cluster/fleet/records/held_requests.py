"""Requests of a killed rank whose layers others have computed: they wait until these can say what they have of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.cluster.control.stage_questions import CloseStage
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.engines.core.kv_state import KVSource, LayersKV

KEPT_S = 1.0
"""How long ranks keep keys and values at the least for requests that find no room."""


@dataclass(frozen=True)
class _Kept:
    """What ranks keep of a home that was killed."""

    home: str
    ranks: tuple[Instance, ...]
    readers: Mapping[RequestRecord, KVSource]
    """Requests that go on with it, and where it lies for each."""
    until_s: float


@dataclass(eq=False)
class HeldRequests:
    """Under the lock of the dispatcher.

    They count as moving: nobody else has them go on. What ranks keep is given back when nobody can read it any more,
    and not before: its pages would be another's.
    """

    _waiting: dict[str, tuple[list[RequestRecord], int]] = field(default_factory=dict)
    _kept: list[_Kept] = field(default_factory=list)

    def hold(self, instance: Instance, records: Sequence[RequestRecord]) -> list[RequestRecord]:
        """Hold those requests of a rank that has gone whose keys and values it had told of; return the others."""
        memory, directory = instance.memory, instance.directory
        if not instance.group or memory is None or directory is None:
            return list(records)
        held = [r for r in records if r.source is not None and r.source.file == memory.source.file]
        for record in held:
            record.moving = True
        self._waiting[instance.name] = held, directory.epoch
        return [record for record in records if not record.moving]

    def epoch(self, home: str) -> int | None:
        """Return the path's epoch by which requests of a rank were computed; None: there are none that wait."""
        held, epoch = self._waiting.get(home, ((), 0))
        return epoch if held else None

    @property
    def records(self) -> list[RequestRecord]:
        """Those that wait."""
        return [record for held, _ in self._waiting.values() for record in held]

    def go_on(self, home: str, kept: Sequence[tuple[Instance, LayersKV]], now: float) -> list[RequestRecord]:
        """Hold those of a rank no more, which find what others have of them; return those that have not ended."""
        held, _ = self._waiting.pop(home, ([], 0))
        live = [record for record in held if record.left]
        for record in live:
            record.moving = False
            assert record.source is not None
            record.source = replace(record.source, others=tuple(kv.with_blocks_of(record.kv) for _, kv in kept))
        for instance, _ in kept:
            instance.moves += 1
        if kept:
            readers = {record: record.source for record in live if record.source is not None}
            self._kept.append(_Kept(home, tuple(instance for instance, _ in kept), readers, now + KEPT_S))
        return live

    def give_back(self, now: float) -> None:
        """Have ranks forget what nobody reads. Requests that still find no room are computed anew then."""
        for kept in [*self._kept]:
            readers = [record for record, source in kept.readers.items() if record.source is source]
            if any(record.instance is not None for record in readers) or (readers and now < kept.until_s):
                continue
            for record in readers:
                record.forget_kv()
            for instance in kept.ranks:
                instance.client.ask(CloseStage(kept.home))
                instance.moves -= 1
            self._kept.remove(kept)
