"""Room for one layer of another instance, kept by ranks that serve alone, so that a drop can begin when all is full.

A layer that flips needs room for its keys and values before it frees what it leaves. Where every page has an owner that
does not end soon, the first flip would find none. What is kept is one part in (layers + 1) of the KV cache of each
rank, while it is by itself; in a group nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastic.cluster.fleet.groups.exchange import measure
from elastic.cluster.fleet.groups.group import Shape
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.cluster.fleet.groups.transition import Books


class Staging:
    """What ranks that are by themselves are capped to. For one thread at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.caps: Mapping[str, int] = {}
        """Of ranks that keep room: the most sectors of their instance by itself."""

    def keep(self, alone: Iterable[str]) -> None:
        """Have these keep room, if there are others, and those no more that have it besides; not in a group.

        Raises `RankLost`.
        """
        names, serving = [*alone], {instance.name for instance in self._ranks.serving()}
        keeping = names if len(serving) > 1 and not self._is_tight() else []
        caps = {name: cap for name in keeping if (cap := self._cap_of(name)) is not None}
        if changed := {name: caps.get(name) for name in names if caps.get(name) != self.caps.get(name)}:
            self._ranks.set_caps(changed)
        self.caps = {**{name: cap for name, cap in self.caps.items() if name in serving.difference(names)}, **caps}

    def _cap_of(self, name: str) -> int | None:
        """Return the cap of a rank by itself; None where it could serve nothing then: no sector for each group."""
        if name in self.caps:
            return self.caps[name]
        rooms, format = measure(self._ranks, [name]), self._ranks.instance(name).kv_format
        shape = Shape({name: rooms[name].path}, {name: rooms[name].resident})
        sectors = Books(rooms, format, shape).staged(name)
        return sectors if sectors >= len(format.groups) else None

    def _is_tight(self) -> bool:
        """Return whether a request waits that only all of a rank's memory would be enough for."""
        instances = self._ranks.serving()
        with self._ranks.dispatcher.lock:
            return any(
                all(
                    instance.name in record.refused or not instance.fits_alone(record.request) for instance in instances
                )
                for record in self._ranks.dispatcher.queue
            )
