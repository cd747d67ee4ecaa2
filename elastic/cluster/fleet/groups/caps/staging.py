"""Room for one layer of another instance, kept by ranks that serve alone, so that a drop can begin when all is full.

A layer that flips needs room for its keys and values before it frees what it leaves. Where every page has an owner that
does not end soon, the first flip would find none. What is kept is one part in (layers + 1) of the KV cache of each
rank, while it is by itself; in a group nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from elastic.cluster.fleet.groups.caps.needs import load_blocks
from elastic.cluster.fleet.groups.group import Shape
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.cluster.fleet.groups.transition import Books
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.records.requests import RequestRecord


class _StagedRoom(NamedTuple):
    """What an instance has beside the room that its rank keeps."""

    sectors: int | None
    """None: the rank keeps none."""
    blocks: int
    uncapped: int
    """The blocks that it said it could have then; others, and its limit is another."""


class Staging:
    """What ranks that are by themselves are capped to. For one thread at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.caps: Mapping[str, int] = {}
        """Of ranks that keep room: the most sectors of their instance by itself."""
        self._kept: dict[str, _StagedRoom] = {}

    def keep(self, alone: Iterable[str]) -> None:
        """Have these keep room, if there are others, and those no more that have it besides; not in a group.

        Raises `RankLost`.
        """
        names = [*alone]
        keeping = names if len(self._ranks.serving()) > 1 and not self._is_tight() else []
        self._change(names, {name: cap for name in keeping if (cap := self._cap_of(name)) is not None})

    def give_way(self, alone: Iterable[str]) -> None:
        """Have these keep no room while a request waits that needs it, until somebody wants it kept again.

        Raises `RankLost`.
        """
        names = [name for name in alone if name in self.caps]
        if names:
            kept = [] if self._is_tight() else [name for name in names if not self._has_larger(name)]
            self._change(names, {name: self.caps[name] for name in kept})

    def _change(self, names: Sequence[str], caps: Mapping[str, int]) -> None:
        """Have ranks by themselves have these caps, and the others of them none."""
        if changed := {name: caps.get(name) for name in names if caps.get(name) != self.caps.get(name)}:
            self._ranks.set_caps(changed)
        serving = {instance.name for instance in self._ranks.serving()}
        self._kept = {name: kept for name, kept in self._kept.items() if name in serving}
        self.caps = {**{name: cap for name, cap in self.caps.items() if name in serving.difference(names)}, **caps}

    def _cap_of(self, name: str) -> int | None:
        """Return the cap of a rank by itself; None where it could serve nothing then: no sector for each group."""
        uncapped = self._ranks.instance(name).load.uncapped_blocks
        if (kept := self._kept.get(name)) is None or kept.uncapped != uncapped:
            rooms, format = self._ranks.measure([name]), self._ranks.instance(name).kv_format
            shape = Shape({name: rooms[name].path}, {name: rooms[name].resident})
            sectors = Books(rooms, format, shape).staged(name)
            cap = sectors if sectors >= len(format.groups) else None
            kept = self._kept[name] = _StagedRoom(cap, sectors * load_blocks(rooms[name], format), uncapped)
        return None if self._has_larger(name) else kept.sectors

    def _has_larger(self, name: str) -> bool:
        """Return whether an instance was given a request that only all of its rank's memory is enough for.

        Capped, the rank would never begin it.
        """
        instance = self._ranks.instance(name)
        with self._ranks.dispatcher.lock:
            records = instance.records.values()
            return any(instance.request_blocks(record.request) > self._kept[name].blocks for record in records)

    def _is_tight(self) -> bool:
        """Return whether a request waits that only all of a rank's memory would be enough for."""
        instances = self._ranks.serving()
        with self._ranks.dispatcher.lock:
            queue = self._ranks.dispatcher.queue
            return any(not any(self._has_room(instance, record) for instance in instances) for record in queue)

    def _has_room(self, instance: Instance, record: RequestRecord) -> bool:
        """Return whether a rank that keeps room could hold a request beside it, also while it keeps none."""
        kept = self._kept.get(instance.name)
        if kept is None or kept.sectors is None or instance.group:
            most = instance.load.total_blocks
        else:
            most = min(kept.blocks, instance.load.total_blocks)
        return instance.request_blocks(record.request) <= most and instance.name not in record.refused
