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
        serving = [instance.name for instance in self._ranks.serving()]
        wanted = [*alone] if len(serving) > 1 and not self._is_tight() else []
        if new := [name for name in wanted if name not in self.caps]:
            caps = {name: self._cap_of(name) for name in new}
            self._ranks.set_caps(caps)
            self.caps = {**self.caps, **caps}
        if lifted := [name for name in alone if name in self.caps and name not in wanted]:
            self._ranks.set_caps(dict.fromkeys(lifted))
        self.caps = {name: cap for name, cap in self.caps.items() if name in serving and name not in lifted}

    def _cap_of(self, name: str) -> int:
        rooms = measure(self._ranks, [name])
        shape = Shape({name: rooms[name].path}, {name: rooms[name].resident})
        return Books(rooms, self._ranks.instance(name).kv_format, shape).staged(name)

    def _is_tight(self) -> bool:
        """Return whether a request waits that only all of a rank's memory would be enough for."""
        instances = self._ranks.serving()
        with self._ranks.dispatcher.lock:
            waiting = [record.request for record in self._ranks.dispatcher.queue]
            return any(not any(instance.fits_alone(request) for instance in instances) for request in waiting)
