"""Models that lend each other places: what one may take, and what its peers are to give back first. All pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elastic.config import Scale
from elastic.controller.policies.shortage import PlaceLoad, describe
from elastic.controller.snapshot import EvictionRequest, PeerState, Snapshot
from elastic.planning.cost_model import CostModel, speedup
from elastic.planning.local_search import PlannedModel, plan_together, plan_up
from elastic.planning.placement import PlaceCapacity, Placement, added_replicas, occupied
from elastic.planning.scale_down import Deficit, OfLayers, joined, scale_down
from elastic.types import Evict, Migrate, MigrateKV, Replicate, Restore


@dataclass(frozen=True)
class CapacityOffer:
    """Capacity for replicas of one model: what it may take now, and what peers could give back for it."""

    places: tuple[PlaceCapacity, ...]
    gain: float = 1.0
    """Speed-up with what is asked for, as a factor of the present one."""
    asks: tuple[EvictionRequest, ...] = ()


@dataclass(frozen=True)
class Peer:
    """Another model as planners see it."""

    name: str
    load: PlaceLoad
    model: CostModel
    rows: float
    """Moving average of its running requests."""


class SharedCapacity:
    """The places of a model, alone or in a group. `load` is the model's own, beside what peers are about to take."""

    def __init__(self, load: PlaceLoad, snapshot: Snapshot, settings: Scale) -> None:
        self._snapshot, self._settings = snapshot, settings
        self.load = _beside_peers(load, snapshot, settings) if snapshot.others else load

    @cached_property
    def _peers(self) -> list[Peer]:
        """The peers that say where their layers are."""
        return [
            Peer(
                peer.name,
                describe(peer.snapshot, peer.needs, self._settings),
                peer.model(max(1, math.floor(peer.rows + 0.5))),
                peer.rows,
            )
            for peer in self._snapshot.others
            if peer.snapshot.residencies and peer.snapshot.places
        ]

    def requested(self) -> tuple[Evict, ...]:
        """Return the evictions that peers ask of this model, as far as it has such replicas."""
        layers: dict[str, set[int]] = {}
        for ask in (ask for peer in self._snapshot.others for ask in peer.asks if ask.model == self._snapshot.name):
            place = ask.action.place
            replicas = [i for i in ask.action.layers if place in self._snapshot.residencies[i][1:]]
            layers.setdefault(place, set()).update(replicas)
        return tuple(Evict(tuple(sorted(indices)), place) for place, indices in layers.items() if indices)

    def guests(self, shortage: Deficit) -> tuple[EvictionRequest, ...]:
        """Return the peers' replicas that are to leave a place where bytes are short, until the shortage is over.

        Those of the model with the fewest rows leave first, of each the least useful first; none whose own place has no
        room for its KV rows. Only a place where this model has layers of its own has guests.
        """
        if not any(places[0] == shortage.place for places in self.load.placement.layers):
            return ()
        asks: list[EvictionRequest] = []
        for peer in sorted(self._peers, key=lambda peer: (peer.rows, peer.name)):
            if shortage.over:
                break
            needs = [replace(need, compute=0.0) for need in peer.load.needs]  # at home they were computed before
            placement, places = peer.load.placement, peer.load.places
            result = scale_down(placement, needs, places, peer.model, shortage, remedies=("eviction",))
            asks += [EvictionRequest(peer.name, action) for action in result.actions if isinstance(action, Evict)]
            shortage = result.left
        return tuple(asks)

    def fair_share(self, model: CostModel) -> CapacityOffer:
        """Return this model's share of all places: by `plan_together`, as if there were no replicas yet.

        It may take what is not in the peers' shares, or not taken by them yet. Peers are asked for what they have
        beyond their shares where this model lacks room for its own.
        """
        load, rooms = self.load, {place.name: place for place in self.load.places}
        if not self._snapshot.others:
            return CapacityOffer(load.places)
        empty = rooms
        for model_load in (load, *(peer.load for peer in self._peers)):
            replicas = added_replicas(model_load.placement.alone_at_home, model_load.placement)
            empty = occupied(empty, replicas, model_load.replica_needs, times=-1)
        loads = {peer.name: (peer.load, peer.model) for peer in self._peers if math.floor(peer.rows + 0.5) > 1}
        loads[self._snapshot.name] = load, model
        models = {
            name: PlannedModel(own.placement.alone_at_home, own.replica_needs, cost, tuple(p.name for p in own.places))
            for name, (own, cost) in loads.items()
        }
        targets = plan_together(models, list(empty.values()), self._settings.t_up)
        for peer in self._peers:
            to_come = added_replicas(peer.load.placement, targets.get(peer.name, peer.load.placement))
            rooms = occupied(rooms, to_come, peer.load.replica_needs)
        wanted = added_replicas(load.placement, targets[self._snapshot.name])
        after = load.placement
        for layer, place in wanted:
            after = after.after(Replicate((layer,), place))
        gain = speedup(model, after) / speedup(model, load.placement)
        return CapacityOffer(tuple(rooms.values()), gain, self._surplus(wanted, targets))

    def _surplus(
        self, wanted: Sequence[tuple[int, str]], targets: Mapping[str, Placement]
    ) -> tuple[EvictionRequest, ...]:
        """Return replicas of peers beyond their shares, where there is no room for what this model wants."""
        rooms = occupied({place.name: place for place in self.load.places}, wanted, self.load.replica_needs)
        crowded = {name for _, name in wanted if rooms[name].free_bytes < rooms[name].margin * rooms[name].total_bytes}
        asks: list[EvictionRequest] = []
        for peer in self._peers:
            target = targets.get(peer.name, peer.load.placement.alone_at_home)
            surplus: list[OfLayers] = [
                Evict((i,), place) for i, place in added_replicas(target, peer.load.placement) if place in crowded
            ]
            asks += [EvictionRequest(peer.name, action) for action in joined(surplus) if isinstance(action, Evict)]
        return tuple(asks)

    def take_over(self, model: CostModel) -> CapacityOffer:
        """Return all that is free, and of the replicas of one peer at one place those that gain most together.

        The gain is the product of both models' speed-ups: what one doubles is worth what another halves, whoever is
        larger.
        """
        load, rooms = self.load, {place.name: place for place in self.load.places}
        offers = [CapacityOffer(load.places)]
        for peer in self._peers:
            for place in rooms:
                layers = tuple(i for i, places in enumerate(peer.load.placement.layers) if place in places[1:])
                if not layers:
                    continue
                freed = occupied(rooms, [(i, place) for i in layers], peer.load.replica_needs, times=-1)
                after = plan_up(load.placement, load.replica_needs, list(freed.values()), model, self._settings.t_up)
                eviction = Evict(layers, place)
                without = peer.load.placement.after(eviction)
                won = speedup(model, after) / speedup(model, load.placement)
                lost = speedup(peer.model, peer.load.placement) / speedup(peer.model, without)
                offers.append(CapacityOffer(load.places, won / lost, (EvictionRequest(peer.name, eviction),)))
        return max(offers, key=lambda offer: offer.gain)


def _beside_peers(load: PlaceLoad, snapshot: Snapshot, settings: Scale) -> PlaceLoad:
    """Take from the places what peers are about to take, and the headroom of all models' KV caches beyond the margin.

    The headroom keeps the use of the caches that are there below that of a shortage.
    """
    kv_used: Counter[str] = Counter()
    for reading in (snapshot, *(peer.snapshot for peer in snapshot.others)):
        for place in reading.places:
            kv_used[place.name] += place.kv_used_bytes
    pending = sum(map(_pending_bytes, snapshot.others), Counter[str]())
    places = []
    for room in load.places:
        headroom = math.ceil(kv_used[room.name] / (settings.kv_high - settings.margin)) - kv_used[room.name]
        beyond_margin = max(0, headroom - math.floor(settings.margin * room.total_bytes))
        places.append(replace(room, free_bytes=room.free_bytes - pending[room.name] - beyond_margin))
    return replace(load, places=tuple(places))


def _pending_bytes(peer: PeerState) -> Counter[str]:
    """Count the bytes by place that a model has asked for, and may not have yet."""
    pending: Counter[str] = Counter()
    for action in peer.pending:
        if isinstance(action, Migrate | Replicate):
            pending[action.place] += sum(peer.needs[i].nbytes for i in action.layers)
        elif isinstance(action, Restore):
            for i in action.layers:
                pending[peer.snapshot.residencies[i][0]] += peer.needs[i].nbytes
        elif isinstance(action, MigrateKV):
            pending[action.place] += sum(place.kv_used_bytes for place in peer.snapshot.places)
    return pending
