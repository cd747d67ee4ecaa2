"""Scale down by module reduction: algorithm 2. (CoCoServe, section 4.2)

Three remedies, the cheapest first: modules migrate, replicas are evicted, the batch shrinks and layers are offloaded.
The first that suffices is the last that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elastic.planning.cost_model import CostModel, cost
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.types import Action, Evict, Migrate, MigrateKV, Release

OfLayers = Migrate | MigrateKV | Evict | Release
Remedy = Literal["none", "migration", "eviction", "reduction"]
REMEDIES: tuple[Remedy, ...] = ("migration", "eviction", "reduction")


@dataclass(frozen=True)
class Deficit:
    """The memory and compute that a place lacks, g_src."""

    place: str
    nbytes: int = 0
    compute: float = 0.0
    """Work a second, in the units of `PlaceCapacity.compute`."""

    @property
    def over(self) -> bool:
        """True once nothing is lacking."""
        return self.nbytes <= 0 and self.compute <= 1e-12


@dataclass(frozen=True)
class ScaleDownResult:
    """The answer of algorithm 2."""

    placement: Placement
    """P'."""
    rows: int
    """bs', the number of sequences that may run at once."""
    actions: tuple[Action, ...]
    """In the order in which they are to be done."""
    remedy: Remedy
    """The last one used."""
    left: Deficit
    """What is still lacking."""


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
    apart: Collection[int] = (),
) -> ScaleDownResult:
    """Remedy a deficit; `left` of the answer says what no remedy gave.

    `needs` are of all layers. No place that takes something over, and none that is left with the rows of a replica
    that goes, is filled beyond its margin. `delta` rows at a time leave the batch, and with `offload` one more layer
    each time; a layer gives back its `kv_bytes` and its `compute` in proportion to the rows. Layers that are
    `apart`, with modules at other places or released already, move as a whole or not at all, and are not released: no
    weights of theirs count as relief.
    """
    attempt = _Attempt(placement, needs, places, model, shortage, rows, apart)
    steps: dict[Remedy, Callable[[], None]] = {
        "migration": attempt.migrate,
        "eviction": attempt.evict,
        "reduction": lambda: attempt.reduce(delta, offload),
    }
    for remedy in remedies:
        if not attempt.deficit.over:
            steps[remedy]()
    return ScaleDownResult(attempt.placement, attempt.rows, joined(attempt.actions), attempt.remedy, attempt.deficit)


class _Attempt:
    def __init__(
        self,
        placement: Placement,
        needs: Sequence[ResourceDemand],
        places: Sequence[PlaceCapacity],
        model: CostModel,
        deficit: Deficit,
        rows: int,
        apart: Collection[int],
    ) -> None:
        self.deficit = deficit
        self.placement = placement
        self.rows = rows
        self.actions: list[OfLayers] = []
        self.remedy: Remedy = "none"
        self._needs, self._model = needs, model
        self._rooms = {place.name: place for place in places}
        self._source = deficit.place
        self._apart = set(apart)

    # -- phase 1

    def migrate(self) -> None:
        """Move modules off the place until the deficit is over, each to where there is most room for it.

        FilterModules: of layers that have their own place there and no replicas, from the end of their runs on, so that
        those which leave are consecutive.
        """
        runs = [run for run in reversed(self.placement.runs()) if run.places == (self._source,)]
        for layer in [layer for run in runs for layer in reversed(run.layers)]:
            if self.deficit.over:
                return
            move = self._module(layer)
            if move is not None:
                taken, actions = move
                first = actions[0]
                self._rooms[first.place] = self._rooms[first.place].having(taken)
                self.actions += actions
                self._relieve(replace(taken, nbytes=0) if layer in self._apart else taken, "migration")
                if isinstance(first, Migrate) and first.parts:
                    self._apart.add(layer)
                elif isinstance(first, Migrate):
                    self.placement = self.placement.after(first)

    def _module(self, layer: int) -> tuple[ResourceDemand, tuple[Migrate | MigrateKV, ...]] | None:
        """Choose what of a layer goes where: all of it if it can.

        Else its KV to a place with memory, or a module to one with compute, by what is short. (Section 3.3)
        """
        need = self._needs[layer]
        target = self._destination(need, layer)
        if target:
            kv = (MigrateKV((layer,), target),) if need.kv_bytes else ()
            return need, (Migrate((layer,), target), *kv)
        if self.deficit.nbytes > 0 and need.kv_bytes:
            taken = ResourceDemand(0, kv_bytes=need.kv_bytes)
            target = self._destination(taken, layer)
            if target:
                return taken, (MigrateKV((layer,), target),)
        for part, taken in need.parts.items() if layer not in self._apart else ():
            target = self._destination(taken, layer)
            if target:
                return taken, (Migrate((layer,), target, (part,)),)
        return None

    def _destination(self, need: ResourceDemand, layer: int) -> str:
        """FindOptimalDestination: where the next layer is, if it fits there; else the place that stays emptiest."""
        fits = [room for room in self._rooms.values() if room.name != self._source and room.fits(need)]
        if not fits:
            return ""
        beside = self.placement.layers[layer + 1 : layer + 2]
        return max(fits, key=lambda room: (beside == ((room.name,),), room.having(need).vacancy)).name

    # -- phase 2

    def evict(self) -> None:
        """Evict replicas from the place, the least useful first, where those that remain can take their rows."""
        while not self.deficit.over:
            cheapest = min(self._evictable(), default=None)
            if cheapest is None:
                return
            _, layer = cheapest
            before, eviction = self.placement.layers[layer], Evict((layer,), self._source)
            self.placement = self.placement.after(eviction)
            self.actions.append(eviction)
            for survivor, more in self._survivors(before):
                self._rooms[survivor] = self._rooms[survivor].having(_times(self._needs[layer], more))
            self._relieve(self._needs[layer], "eviction")

    def _evictable(self) -> Iterator[tuple[float, int]]:
        """Yield (what it would cost, layer)."""
        now = cost(self._model, self.placement)
        for layer in self.placement.at(self._source):
            places, need = self.placement.layers[layer], self._needs[layer]
            if places[0] != self._source and all(
                self._rooms[place].fits(_times(need, more)) for place, more in self._survivors(places)
            ):
                yield cost(self._model, self.placement.after(Evict((layer,), self._source))) - now, layer

    def _survivors(self, places: tuple[str, ...]) -> list[tuple[str, float]]:
        """Return places with the share of a layer's load that each has to take when its replica at the source goes."""
        rest = [place for place in places if place != self._source]
        return [(place, 1 / len(rest) - 1 / len(places)) for place in rest]

    # -- phase 3

    def reduce(self, delta: int, offload: bool) -> None:
        """Run fewer rows, and while memory is short, offload layers to the host."""
        needs = [self._needs[layer] for layer in self.placement.at(self._source)]
        per_row = ResourceDemand(
            0, sum(need.compute for need in needs) / self.rows, sum(need.kv_bytes for need in needs) // self.rows
        )
        rows_help = per_row.compute > 0 or per_row.kv_bytes > 0
        alone = [i for i, places in enumerate(self.placement.layers) if places == (self._source,)]
        resident = [layer for layer in alone if layer not in self._apart]
        while not self.deficit.over:
            fewer = min(delta, self.rows - 1) if rows_help else 0
            layer = resident.pop() if offload and resident and self.deficit.nbytes > 0 else None
            if not fewer and layer is None:
                return
            self.rows -= fewer
            self._relieve(_times(per_row, fewer), "reduction")
            if layer is not None and self.deficit.nbytes > 0:
                self.actions.append(Release((layer,)))
                self._relieve(ResourceDemand(self._needs[layer].nbytes), "reduction")

    def _relieve(self, need: ResourceDemand, remedy: Remedy) -> None:
        """Count what no longer needs the source."""
        before = self.deficit
        self.deficit = replace(before, nbytes=before.nbytes - need.total_bytes, compute=before.compute - need.compute)
        self.remedy = remedy


def _times(need: ResourceDemand, share: float) -> ResourceDemand:
    """Return a share of what rows need: compute and KV, no weights."""
    return ResourceDemand(0, share * need.compute, round(share * need.kv_bytes))


def joined(actions: Sequence[OfLayers]) -> tuple[Action, ...]:
    """Join actions of one kind and one target into one with all their layers, at the place of the first."""
    layers: dict[OfLayers, list[int]] = {}
    for action in actions:
        layers.setdefault(replace(action, layers=()), []).extend(action.layers)
    return tuple(replace(action, layers=tuple(sorted(indices))) for action, indices in layers.items())
