"""Several models that lend each other places: what each may take, and what others are to give back first. All pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.config import Scale
from elastic.controller.load import Load, describe
from elastic.controller.notice import Ask, Notice
from elastic.controller.placement import Need, Placement, PlaceSize
from elastic.controller.scale_down import OfLayers, Shortage, joined, scale_down
from elastic.controller.search import Instance, plan_together, plan_up
from elastic.controller.snapshot import Snapshot
from elastic.controller.speedup import CostModel, speedup
from elastic.types import Evict, Migrate, MigrateKV, Replicate, Restore


@dataclass(frozen=True)
class Share:
    """What a model may take now, and what others could give back for it."""

    rooms: tuple[PlaceSize, ...]
    gain: float = 1.0
    """By what is asked, as a factor."""
    asks: tuple[Ask, ...] = ()


@dataclass(frozen=True)
class Partner:
    """Another model as planners see it."""

    name: str
    load: Load
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


def beside_others(load: Load, snapshot: Snapshot, settings: Scale) -> Load:
    """Places as the other models leave them: less the bytes that they are about to take, and less what keeps the KV
    caches of all that are there below the use that is a shortage."""
    if not snapshot.others:
        return load
    taken = sum((_taken(other) for other in snapshot.others), Counter[str]())
    used = {place.name: _kv_used(snapshot, place.name) for place in load.places}
    places = tuple(_narrowed(place, taken[place.name], used[place.name], settings) for place in load.places)
    return replace(load, places=places)


def guests(load: Load, snapshot: Snapshot, shortage: Shortage, settings: Scale) -> tuple[Ask, ...]:
    """Replicas of other models that are to leave a place where bytes are short: those of the model with the fewest rows
    first, of each the least useful first, until the shortage is over.

    Only at a place where the model has layers of its own. None that finds no room at home for its KV rows.
    """
    if not any(own == shortage.place for own, *_ in load.placement.layers):
        return ()
    asks: list[Ask] = []
    for other in sorted(snapshot.others, key=lambda other: (other.rows, other.name)):
        theirs = _partner(other, settings)
        if shortage.over or theirs is None:
            continue
        needs = [replace(need, compute=0.0) for need in theirs.load.needs]  # at home they were computed before
        placement, places = theirs.load.placement, theirs.load.places
        found = scale_down(placement, needs, places, theirs.model, shortage, remedies=("eviction",))
        asks += [Ask(other.name, action) for action in found.actions if isinstance(action, Evict)]
        shortage = found.left
    return tuple(asks)


def share_out(load: Load, snapshot: Snapshot, rows: int, model: CostModel, settings: Scale) -> Share:
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
    return Share(tuple(left.values()), gain, _surplus(load, after, partners, planned))


def take_over(load: Load, snapshot: Snapshot, model: CostModel, settings: Scale) -> Share:
    """Where speed is short: all that is free, and of what others have at one place, what gains most together.

    The gain is the product of the speed-ups of both: what one doubles is worth what another halves, whoever is larger.
    """
    shares = [Share(load.places)]
    for partner in _partners(snapshot, settings):
        theirs, rooms = partner.load.placement, {place.name: place for place in load.places}
        for place in rooms:
            gone = [i for i, here in enumerate(theirs.layers) if place in here[1:]]
            offered = _with(rooms, [(i, place) for i in gone], partner.load.replica_needs, -1)
            after = plan_up(load.placement, load.replica_needs, list(offered.values()), model, settings.t_up)
            won = speedup(model, after) / speedup(model, load.placement)
            lost = speedup(partner.model, theirs) / speedup(partner.model, theirs.without_replicas(gone, place))
            if gone:
                shares.append(Share(load.places, won / lost, (Ask(partner.name, Evict(tuple(gone), place)),)))
    return max(shares, key=lambda share: share.gain)


def _surplus(
    load: Load, after: Placement, partners: Sequence[Partner], planned: Mapping[str, Placement]
) -> tuple[Ask, ...]:
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
        asks += [Ask(partner.name, action) for action in joined(actions) if isinstance(action, Evict)]
    return tuple(asks)


def _partners(snapshot: Snapshot, settings: Scale) -> list[Partner]:
    return [found for other in snapshot.others if (found := _partner(other, settings)) is not None]


def _partner(other: Notice, settings: Scale) -> Partner | None:
    if not other.snapshot.residencies or not other.snapshot.places:
        return None
    load = describe(other.snapshot, other.needs, settings)
    rows = math.floor(other.rows + 0.5)
    return Partner(other.name, load, other.model(max(1, rows)), rows)


def _instance(load: Load, model: CostModel) -> Instance:
    places = tuple(place.name for place in load.places)
    return Instance(load.placement.alone_at_home, load.replica_needs, model, places)


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
    rooms: dict[str, PlaceSize], replicas: Sequence[tuple[int, str]], needs: Sequence[Need], times: int = 1
) -> dict[str, PlaceSize]:
    """With these replicas in them, or with -1 without them."""
    rooms = dict(rooms)
    for layer, place in replicas:
        if place in rooms:
            rooms[place] = rooms[place].having(needs[layer], times)
    return rooms


def _cleared(rooms: dict[str, PlaceSize], load: Load) -> dict[str, PlaceSize]:
    """As if a model had no replicas."""
    replicas = _added(load.placement.alone_at_home, load.placement)
    return _with(rooms, replicas, load.replica_needs, -1)


def _taken(other: Notice) -> Counter[str]:
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


def _narrowed(place: PlaceSize, taken: int, kv_used: int, settings: Scale) -> PlaceSize:
    """The headroom of the caches, where it is more than the margin."""
    target = settings.kv_high - settings.margin
    headroom = math.ceil(kv_used / target) - kv_used
    more = max(0, headroom - math.floor(settings.margin * place.total_bytes))
    return replace(place, free_bytes=place.free_bytes - taken - more)
