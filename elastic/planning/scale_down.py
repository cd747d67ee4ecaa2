"""Scale down by module reduction: algorithm 2. (CoCoServe, section 4.2)

Three remedies, the cheapest first: modules migrate, replicas are evicted, the batch shrinks and layers are offloaded.
The first that suffices is the last that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from elastic.planning.cost_model import CostModel, cost
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.types import Action, Evict, Migrate, MigrateKV, Release

OfLayers = Migrate | MigrateKV | Evict | Release
Remedy = Literal["none", "migration", "eviction", "reduction"]
REMEDIES: tuple[Remedy, ...] = ("migration", "eviction", "reduction")


@dataclass(frozen=True)
class Deficit:
    """What is missing at a place, g_src."""

    place: str
    nbytes: int = 0
    compute: float = 0.0
    """Work a second, in the units of `PlaceCapacity.compute`."""

    @property
    def over(self) -> bool:
        return self.nbytes <= 0 and self.compute <= 1e-12


@dataclass(frozen=True)
class ScaleDownResult:
    """What algorithm 2 found."""

    placement: Placement
    """P'."""
    rows: int
    """bs': how many sequences may run at once."""
    actions: tuple[Action, ...] = ()
    """In the order in which they are to be done."""
    remedy: Remedy = "none"
    """The last one used."""
    left: Deficit = field(default_factory=lambda: Deficit(""))
    """What is missing still."""


def scale_down(
    placement: Placement,
    needs: Sequence[ResourceDemand],
    places: Sequence[PlaceCapacity],
    model: CostModel,
    shortage: Deficit,
    *,
    rows: int = 1,
    delta: int = 5,
    offload: bool = True,
    remedies: Sequence[Remedy] = REMEDIES,
) -> ScaleDownResult:
    """Remedy a shortage; `left` of the answer says what no remedy gave.

    `needs` are of all layers. No place that takes something over, and none that is left with the rows of a replica
    that goes, is filled beyond its margin. `delta` rows at a time leave the batch, and with `offload` one more layer
    each time; a layer gives back its `kv_bytes` and its `compute` in proportion to the rows.
    """
    attempt = _Attempt(placement, needs, places, model, shortage, rows)
    steps: dict[Remedy, Callable[[], None]] = {
        "migration": attempt.migrate,
        "eviction": attempt.evict,
        "reduction": lambda: attempt.reduce(delta, offload),
    }
    for remedy in remedies:
        if not attempt.left.over:
            steps[remedy]()
    return attempt.answer()


class _Attempt:
    def __init__(
        self,
        placement: Placement,
        needs: Sequence[ResourceDemand],
        places: Sequence[PlaceCapacity],
        model: CostModel,
        shortage: Deficit,
        rows: int,
    ) -> None:
        self.left = shortage
        self._placement, self._needs, self._model = placement, needs, model
        self._rooms = {place.name: place for place in places}
        self._source = shortage.place
        self._rows = rows
        self._actions: list[OfLayers] = []
        self._remedy: Remedy = "none"

    def answer(self) -> ScaleDownResult:
        return ScaleDownResult(self._placement, self._rows, joined(self._actions), self._remedy, self.left)

    # -- phase 1

    def migrate(self) -> None:
        """Modules leave the place until it is over, each for where there is most room for it."""
        for layer in self._movable():
            if self.left.over:
                return
            found = self._module(layer)
            if found is not None:
                taken, actions = found
                self._rooms[actions[0].place] = self._rooms[actions[0].place].having(taken)
                self._actions += actions
                if isinstance(actions[0], Migrate) and not actions[0].parts:
                    self._placement = self._placement.moved([layer], actions[0].place)
                self._take(taken, "migration")

    def _movable(self) -> list[int]:
        """FilterModules: layers that have their own place there and no replicas, from the end of their runs on, so
        that those which leave are consecutive."""
        runs = self._placement.runs()
        return [layer for run in reversed(runs) if run.places == (self._source,) for layer in reversed(run.layers)]

    def _module(self, layer: int) -> tuple[ResourceDemand, tuple[Migrate | MigrateKV, ...]] | None:
        """What of a layer goes where: all of it if it can; else its KV to a place with memory, or a module to one with
        compute, by what is short. (Section 3.3)"""
        need = self._needs[layer]
        there = self._destination(need, layer)
        if there:
            kv = (MigrateKV((layer,), there),) if need.kv_bytes else ()
            return need, (Migrate((layer,), there), *kv)
        if self.left.nbytes > 0 and need.kv_bytes:
            taken = ResourceDemand(0, kv_bytes=need.kv_bytes)
            there = self._destination(taken, layer)
            if there:
                return taken, (MigrateKV((layer,), there),)
        for part, taken in need.parts.items():
            there = self._destination(taken, layer)
            if there:
                return taken, (Migrate((layer,), there, (part,)),)
        return None

    def _destination(self, need: ResourceDemand, layer: int) -> str:
        """FindOptimalDestination: where the next layer is, if it fits there; else the place that stays emptiest."""
        fits = [room for room in self._rooms.values() if room.name != self._source and room.fits(need)]
        if not fits:
            return ""
        beside = self._placement.layers[layer + 1 : layer + 2]
        return max(fits, key=lambda room: (beside == ((room.name,),), room.having(need).vacancy)).name

    # -- phase 2

    def evict(self) -> None:
        """Replicas leave the place, the least useful first, where those that are left can take their rows."""
        while not self.left.over:
            found = min(self._evictable(), default=None)
            if found is None:
                return
            _, layer = found
            before = self._placement.layers[layer]
            self._placement = self._placement.without_replicas([layer], self._source)
            self._actions.append(Evict((layer,), self._source))
            for survivor, more in self._survivors(before):
                self._rooms[survivor] = self._rooms[survivor].having(_times(self._needs[layer], more))
            self._take(self._needs[layer], "eviction")

    def _evictable(self) -> Iterator[tuple[float, int]]:
        """(what it would cost, layer)."""
        now = cost(self._model, self._placement)
        for layer in self._placement.at(self._source):
            places = self._placement.layers[layer]
            if places[0] != self._source and self._bearable(layer, places):
                without = self._placement.without_replicas([layer], self._source)
                yield cost(self._model, without) - now, layer

    def _bearable(self, layer: int, places: tuple[str, ...]) -> bool:
        return all(self._rooms[p].fits(_times(self._needs[layer], more)) for p, more in self._survivors(places))

    def _survivors(self, places: tuple[str, ...]) -> list[tuple[str, float]]:
        """Places with the share of a layer's load that each has to take when its replica at the source goes."""
        rest = [place for place in places if place != self._source]
        return [(place, 1 / len(rest) - 1 / len(places)) for place in rest]

    # -- phase 3

    def reduce(self, delta: int, offload: bool) -> None:
        """Fewer rows, and while memory is short, layers to the host."""
        here = [self._needs[layer] for layer in self._placement.at(self._source)]
        per_row = ResourceDemand(
            0, sum(n.compute for n in here) / self._rows, sum(n.kv_bytes for n in here) // self._rows
        )
        rows_help = per_row.compute > 0 or per_row.kv_bytes > 0
        resident = [i for i, places in enumerate(self._placement.layers) if places == (self._source,)]
        while not self.left.over:
            fewer = min(delta, self._rows - 1) if rows_help else 0
            layer = resident.pop() if offload and resident and self.left.nbytes > 0 else None
            if not fewer and layer is None:
                return
            self._rows -= fewer
            self._take(_times(per_row, fewer), "reduction")
            if layer is not None and self.left.nbytes > 0:
                self._actions.append(Release((layer,)))
                self._take(ResourceDemand(self._needs[layer].nbytes), "reduction")

    def _take(self, need: ResourceDemand, remedy: Remedy) -> None:
        """So much is no longer at the source."""
        left = self.left
        self.left = replace(left, nbytes=left.nbytes - need.total_bytes, compute=left.compute - need.compute)
        self._remedy = remedy


def _times(need: ResourceDemand, share: float) -> ResourceDemand:
    """What a survivor takes over: rows, so compute and KV, no weights."""
    return ResourceDemand(0, share * need.compute, round(share * need.kv_bytes))


def joined(actions: Sequence[OfLayers]) -> tuple[Action, ...]:
    """The same with layers of one kind and one target in one action, at the place of the first."""
    found: dict[OfLayers, list[int]] = {}
    for action in actions:
        found.setdefault(replace(action, layers=()), []).extend(action.layers)
    return tuple(replace(action, layers=tuple(sorted(layers))) for action, layers in found.items())
