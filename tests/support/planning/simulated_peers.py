"""Simulated models that share places, each with the policy `scale` in one group: to try planning together on.

Bytes are counted as a page pool counts them: those of layers and replicas that are there, those of copies on their way
once they have begun, and of KV caches. An action takes some ticks. Time goes by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from elastic import Scale
from elastic.controller.decision import Plan
from elastic.controller.policies.peer_group import PeerGroup, PeerModel
from elastic.controller.policies.scaling import ScalingPolicy
from elastic.controller.snapshot import MemoryStats, PlaceReading, Quantiles, RequestStats, Snapshot
from elastic.planning.measured_cost import Calibration, LinearLatency, MeasuredCostModel
from elastic.planning.placement import ResourceDemand
from elastic.types import Action, Event, Evict, Migrate, MigrateKV, Release, Replicate, Restore

LAYERS, NBYTES = 4, 100
NEEDS = [ResourceDemand(NBYTES)] * LAYERS
EAGER = Scale(pressure_ticks=1, vacancy_ticks=1, cooldown_s=0.0, dwell_s=0.0, group="x")
SLOW = Quantiles(9, 0.4, 0.4, 0.4, 0.4)


def cost_model(places: str) -> Callable[[int], MeasuredCostModel]:
    links = {(a, b): LinearLatency(0.1, 0.0) for a in places for b in places if a < b}
    known = Calibration({place: LinearLatency(1.0, 1.0) for place in places}, links)
    return lambda rows: MeasuredCostModel(known, rows, 1, 1)


@dataclass
class Lender:
    """One model: `layers` are its residencies, `kv` the bytes that its caches need."""

    member: PeerModel
    layers: list[tuple[str, ...]]
    places: str
    kv: int = 0
    running: int = 8
    slow: bool = False
    state: Any = None
    events: tuple[Event, ...] = ()
    under_way: tuple[int, tuple[Action, ...]] | None = None
    absent: set[int] = field(default_factory=set)
    answers: bool = True
    """Whether what it asks for succeeds."""

    @property
    def name(self) -> str:
        return self.member.name

    begun: bool = False
    """Whether what is under way has its pages."""

    def at(self, place: str, *, asked: bool = False) -> list[int]:
        """Layers whose bytes are at a place, or on their way there; with `asked`, also those that have no pages yet."""
        here = [i for i, places in enumerate(self.layers) if place in places and i not in self.absent]
        coming = self.under_way[1] if self.under_way and (self.begun or asked) else ()
        return here + [i for one in coming if getattr(one, "place", "") == place for i in arriving(one)]

    def replicas(self, place: str) -> list[int]:
        return [i for i, places in enumerate(self.layers) if place in places[1:]]

    def kv_at(self, place: str) -> int:
        shares = sum(1 / len(places) for places in self.layers if place in places)
        return round(self.kv * shares / LAYERS)


def arriving(action: Action) -> tuple[int, ...]:
    return action.layers if isinstance(action, Migrate | Replicate) else ()


class World:
    """Places of so many bytes, and the models in them."""

    def __init__(self, **totals: int) -> None:
        self.totals = totals
        self.group = PeerGroup()
        self.lenders: dict[str, Lender] = {}
        self.now = 100.0
        self.took = 0
        """Ticks that an action takes."""

    def wrap(self, name: str, home: str, settings: Scale = EAGER, slo: Any = None, **fields: Any) -> Lender:
        places = fields.pop("places", "".join(self.totals))
        model = cost_model(places)
        policy = ScalingPolicy(settings, NEEDS, model, slo)
        member = PeerModel(self.group, policy, NEEDS, model)
        here = Lender(member, [(home,)] * LAYERS, places, **fields)
        self.lenders[name] = here
        return here

    def free(self, place: str, *, asked: bool = False) -> int:
        lenders = self.lenders.values()
        used = sum(NBYTES * len(one.at(place, asked=asked)) + one.kv_at(place) for one in lenders)
        return self.totals[place] - used

    def look(self, name: str) -> Snapshot:
        one = self.lenders[name]
        places = []
        for place in one.places:
            used = one.kv_at(place)
            home = any(here[0] == place for here in one.layers)
            capacity = used + max(0, self.free(place)) if home or used else 0
            places.append(
                PlaceReading(place, self.totals[place], max(0, self.free(place)), used, capacity, self.totals[place])
            )
        traffic = RequestStats(running=one.running, arrived=9, tpot_s=SLOW if one.slow else Quantiles())
        memory = MemoryStats(sum(p.kv_used_bytes for p in places), sum(p.kv_capacity_bytes for p in places), 2000)
        forms = tuple("absent" if i in one.absent else "float32" for i in range(LAYERS))
        busy = one.under_way is not None
        residencies = tuple(one.layers)
        return Snapshot(
            self.now, traffic, memory, forms, busy, residencies=residencies, places=tuple(places), events=one.events
        )

    def tick(self, name: str) -> Plan:
        """Look, decide, and begin what was decided."""
        one = self.lenders[name]
        plan = one.member.decide(self.look(name), one.state)
        one.state = plan.state
        if plan.actions:
            assert one.under_way is None
            one.under_way, one.begun = (self.took, plan.actions), False
        return plan

    def later(self, seconds: float = 0.2) -> None:
        """Actions get on."""
        self.now += seconds
        for one in self.lenders.values():
            if one.under_way is not None:
                left, actions = one.under_way
                one.under_way, one.begun = (left - 1, actions) if left else None, left < self.took
                for action in () if left else actions:
                    finish(one, action)

    def run(self, ticks: int, seconds: float = 0.2) -> dict[str, list[Plan]]:
        """Everyone in turn."""
        plans: dict[str, list[Plan]] = {name: [] for name in self.lenders}
        for _ in range(ticks):
            for name in self.lenders:
                plans[name].append(self.tick(name))
            self.later(seconds)
        return plans

    def guests(self) -> Counter[tuple[str, str]]:
        """(model, place) -> replicas."""
        return Counter((n, p) for n, one in self.lenders.items() for here in one.layers for p in here[1:])


def finish(one: Lender, action: Action) -> None:
    for layer in getattr(action, "layers", ()) if one.answers else ():
        own, *others = one.layers[layer]
        if isinstance(action, Migrate) and not action.parts:
            one.layers[layer] = (action.place, *(p for p in others if p != action.place))
        elif isinstance(action, Replicate | Evict):
            kept = sorted({*others, action.place} if isinstance(action, Replicate) else {*others} - {action.place})
            one.layers[layer] = (own, *kept)
        elif isinstance(action, Release):
            one.absent.add(layer)
        elif isinstance(action, Restore):
            one.absent.discard(layer)
        else:
            assert isinstance(action, Migrate | MigrateKV)
    event = Event(len(one.events), action, 0.0, "", 0, 0, 0.0, 0.0, 0.0, one.answers, "")
    one.events = (*one.events, event)[-16:]


def quick(settings: Scale = EAGER, **changes: Any) -> Scale:
    return replace(settings, **changes)
