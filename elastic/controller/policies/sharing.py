"""Several models that lend each other places: what each may take, and what others are to give back first. All pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.config import Scale
from elastic.controller.policies.shortage import PlaceLoad, describe
from elastic.controller.snapshot import EvictionRequest, PeerState, Snapshot
from elastic.planning.cost_model import CostModel, speedup
from elastic.planning.local_search import PlannedModel, plan_together, plan_up
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.planning.scale_down import Deficit, OfLayers, joined, scale_down
from elastic.types import Evict, Migrate, MigrateKV, Replicate, Restore


@dataclass(frozen=True)
class SharedCapacity:
    """What a model may take now, and what others could give back for it."""

    rooms: tuple[PlaceCapacity, ...]
    gain: float = 1.0
    """By what is asked, as a factor."""
    asks: tuple[EvictionRequest, ...] = ()


@dataclass(frozen=True)
class Peer:
    """Another model as planners see it."""

    name: str
    load: PlaceLoad
    model: CostModel
    rows: int


def asked_of(snapshot: Snapshot) -> tuple[Evict, ...]:
    """What the others ask of this model, as far as it has such replicas."""
    found: dict[str, set[int]] = {}
    for ask in (ask for other in snapshot.others for ask in other.asks if ask.model == snapshot.name):
        place = ask.action.place
        here = [i for i in ask.action.layers if place in snapshot.residencies[i][1:]]
        found.setdefault(place, set()).update(here)
    return tuple(Evict(tuple(sorted(layers)), place) for place, layers in found.items() if layers)


def beside_others(load: PlaceLoad, snapshot: Snapshot, settings: Scale) -> PlaceLoad:
    """Places as the other models leave them: less the bytes that they are about to take, and less what keeps the KV
    caches of all that are there below the use that is a shortage."""
    if not snapshot.others:
        return load
    taken = sum((_taken(other) for other in snapshot.others), Counter[str]())
    used = {place.name: _kv_used(snapshot, place.name) for place in load.places}
    places = tuple(_narrowed(place, taken[place.name], used[place.name], settings) for place in load.places)
    return replace(load, places=places)


def guests(load: PlaceLoad, snapshot: Snapshot, shortage: Deficit, settings: Scale) -> tuple[EvictionRequest, ...]:
    """Replicas of other models that are to leave a place where bytes are short: those of the model with the fewest rows
    first, of each the least useful first, until the shortage is over.

    Only at a place where the model has layers of its own. None that finds no room at home for its KV rows.
    """
    if not any(own == shortage.place for own, *_ in load.placement.layers):
        return ()
    asks: list[EvictionRequest] = []
    for other in sorted(snapshot.others, key=lambda other: (other.rows, other.name)):
        theirs = _partner(other, settings)
        if shortage.over or theirs is None:
            continue
        needs = [replace(need, compute=0.0) for need in theirs.load.needs]  # at home they were computed before
        placement, places = theirs.load.placement, theirs.load.places
        found = scale_down(placement, needs, places, theirs.model, shortage, remedies=("eviction",))
        asks += [EvictionRequest(other.name, action) for action in found.actions if isinstance(action, Evict)]
        shortage = found.left
    return tuple(asks)


def share_out(load: PlaceLoad, snapshot: Snapshot, rows: int, model: CostModel, settings: Scale) -> SharedCapacity:
    """The part of this model in all places: by `plan_together`, as if no replica were there yet.

    Its rooms are the places less what is the others' part and not taken by them yet. What others have beyond their
    parts, where this model lacks room for its own, they are asked for; the gain is the own one.
    """
    partners = _partners(snapshot, settings)
    rooms = {place.name: place for place in load.places}
    for each in (load, *(partner.load for partner in partners)):
        rooms = _cleared(rooms, each)
    instances = {one.name: _instance(one.load, one.model) for one in partners if one.rows > 1}
    instances[snapshot.name] = _instance(load, model)
    planned = plan_together(instances, list(rooms.values()), settings.t_up)
    left = {place.name: place for place in load.places}
    for one in partners:
        left = _with(left, _added(one.load.placement, planned.get(one.name)), one.load.replica_needs)
    after = _union(load.placement, planned[snapshot.name])
    gain = speedup(model, after) / speedup(model, load.placement)
    return SharedCapacity(tuple(left.values()), gain, _surplus(load, after, partners, planned))


def take_over(load: PlaceLoad, snapshot: Snapshot, model: CostModel, settings: Scale) -> SharedCapacity:
    """Where speed is short: all that is free, and of what others have at one place, what gains most together.

    The gain is the product of the speed-ups of both: what one doubles is worth what another halves, whoever is larger.
    """
    shares = [SharedCapacity(load.places)]
    for partner in _partners(snapshot, settings):
        theirs, rooms = partner.load.placement, {place.name: place for place in load.places}
        for place in rooms:
            gone = [i for i, here in enumerate(theirs.layers) if place in here[1:]]
            offered = _with(rooms, [(i, place) for i in gone], partner.load.replica_needs, -1)
            after = plan_up(load.placement, load.replica_needs, list(offered.values()), model, settings.t_up)
            won = speedup(model, after) / speedup(model, load.placement)
            lost = speedup(partner.model, theirs) / speedup(partner.model, theirs.without_replicas(gone, place))
            if gone:
                shares.append(
                    SharedCapacity(load.places, won / lost, (EvictionRequest(partner.name, Evict(tuple(gone), place)),))
                )
    return max(shares, key=lambda share: share.gain)


def _surplus(
    load: PlaceLoad, after: Placement, partners: Sequence[Peer], planned: Mapping[str, Placement]
) -> tuple[EvictionRequest, ...]:
    """Replicas that others have beyond their parts, at places where there is no room for this model's part."""
    added = _added(load.placement, after)
    rooms = _with({place.name: place for place in load.places}, added, load.replica_needs)
    wanted = {place for _, place in added}
    crowded = {name for name in wanted if rooms[name].free_bytes < rooms[name].margin * rooms[name].total_bytes}
    asks = []
    for partner in partners:
        target = planned.get(partner.name, partner.load.placement.alone_at_home)
        gone = [Evict((i,), place) for i, place in _added(target, partner.load.placement) if place in crowded]
        actions: list[OfLayers] = list(gone)
        asks += [EvictionRequest(partner.name, action) for action in joined(actions) if isinstance(action, Evict)]
    return tuple(asks)


def _partners(snapshot: Snapshot, settings: Scale) -> list[Peer]:
    return [found for other in snapshot.others if (found := _partner(other, settings)) is not None]


def _partner(other: PeerState, settings: Scale) -> Peer | None:
    if not other.snapshot.residencies or not other.snapshot.places:
        return None
    load = describe(other.snapshot, other.needs, settings)
    rows = math.floor(other.rows + 0.5)
    return Peer(other.name, load, other.model(max(1, rows)), rows)


def _instance(load: PlaceLoad, model: CostModel) -> PlannedModel:
    places = tuple(place.name for place in load.places)
    return PlannedModel(load.placement.alone_at_home, load.replica_needs, model, places)


def _added(before: Placement, after: Placement | None) -> list[tuple[int, str]]:
    """(layer, place) of the replicas that the one has and the other has not."""
    if after is None:
        return []
    pairs = enumerate(zip(before.layers, after.layers, strict=True))
    return [(i, place) for i, (old, new) in pairs for place in new[1:] if place not in old]


def _union(before: Placement, after: Placement) -> Placement:
    for layer, place in _added(before, after):
        before = before.with_replicas([layer], place)
    return before


def _with(
    rooms: dict[str, PlaceCapacity],
    replicas: Sequence[tuple[int, str]],
    needs: Sequence[ResourceDemand],
    times: int = 1,
) -> dict[str, PlaceCapacity]:
    """With these replicas in them, or with -1 without them."""
    rooms = dict(rooms)
    for layer, place in replicas:
        if place in rooms:
            rooms[place] = rooms[place].having(needs[layer], times)
    return rooms


def _cleared(rooms: dict[str, PlaceCapacity], load: PlaceLoad) -> dict[str, PlaceCapacity]:
    """As if a model had no replicas."""
    replicas = _added(load.placement.alone_at_home, load.placement)
    return _with(rooms, replicas, load.replica_needs, -1)


def _taken(other: PeerState) -> Counter[str]:
    """Bytes by place that a model has asked for, and may not have yet."""
    found: Counter[str] = Counter()
    for action in other.pending:
        if isinstance(action, Migrate | Replicate):
            found[action.place] += sum(other.needs[i].nbytes for i in action.layers)
        elif isinstance(action, Restore):
            for i in action.layers:
                found[other.snapshot.residencies[i][0]] += other.needs[i].nbytes
        elif isinstance(action, MigrateKV):
            found[action.place] += sum(place.kv_used_bytes for place in other.snapshot.places)
    return found


def _kv_used(snapshot: Snapshot, place: str) -> int:
    """By all models of the group."""
    seen = (snapshot, *(other.snapshot for other in snapshot.others))
    return sum(one.kv_used_bytes for each in seen for one in each.places if one.name == place)


def _narrowed(place: PlaceCapacity, taken: int, kv_used: int, settings: Scale) -> PlaceCapacity:
    """The headroom of the caches, where it is more than the margin."""
    target = settings.kv_high - settings.margin
    headroom = math.ceil(kv_used / target) - kv_used
    more = max(0, headroom - math.floor(settings.margin * place.total_bytes))
    return replace(place, free_bytes=place.free_bytes - taken - more)
