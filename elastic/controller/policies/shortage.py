"""Placement as a snapshot shows it: what the layers need, what the places have left, and what is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elastic.config import SLO, Scale
from elastic.controller.policies.pressure import alone, promises, share
from elastic.controller.snapshot import PlaceReading, RequestStats, Snapshot
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.planning.scale_down import Deficit
from elastic.types import DROPPED, Action, Migrate, Replicate

NOWHERE = 1 << 60
"""Bytes that no place has."""
ROWS_WEIGHT = 0.1
"""Weight of the newest tick in the moving average of the running requests."""


@dataclass(frozen=True)
class PlaceLoad:
    """The instance as planners see it. Compute is counted in shares of one place."""

    placement: Placement
    needs: tuple[ResourceDemand, ...]
    places: tuple[PlaceCapacity, ...]
    rows: int
    """Running requests."""
    apart: tuple[int, ...] = ()
    """Layers with modules at other places, or whose weights are at none: they were released, or dropped."""

    @property
    def replica_needs(self) -> tuple[ResourceDemand, ...]:
        """Needs of one more replica of each layer: half of the rows at most. No place has room for a layer apart."""
        needs = [replace(n, compute=n.compute / 2, kv_bytes=-(-n.kv_bytes // 2)) for n in self.needs]
        return tuple(replace(n, nbytes=NOWHERE) if i in self.apart else n for i, n in enumerate(needs))

    def has_room(self, actions: Sequence[Action]) -> bool:
        """Tell whether layers and replicas that are to come still fit below the margins."""
        room_bytes = {place.name: place.room_bytes for place in self.places}
        for action in actions:
            if isinstance(action, Migrate | Replicate) and not getattr(action, "parts", ()):
                needs = self.needs if isinstance(action, Migrate) else self.replica_needs
                room_bytes[action.place] -= sum(needs[layer].total_bytes for layer in action.layers)
        return min(room_bytes.values(), default=0) >= 0


def describe(snapshot: Snapshot, needs: Sequence[ResourceDemand], settings: Scale) -> PlaceLoad:
    """Divide the KV bytes and the compute of each place among its layers, and of a layer among its modules.

    A place without a reading of its use is taken to be as busy as its share of the layers while requests run: layers
    run one after another. Modules take compute as they take bytes: decoding reads every weight once.
    """
    placement = Placement(snapshot.residencies)
    readings = {place.name: place for place in snapshot.places}
    busy = {name: _busy(reading, placement, snapshot.traffic) for name, reading in readings.items()}
    counts = {name: len(placement.at(name)) for name in readings}
    loaded = []
    for need, (own, *_) in zip(needs, placement.layers, strict=True):
        compute = busy[own] / counts[own]
        parts = {
            name: replace(part, compute=compute * part.nbytes / max(1, need.nbytes))
            for name, part in need.parts.items()
        }
        kv_bytes = readings[own].kv_used_bytes // counts[own]
        loaded.append(replace(need, compute=compute, kv_bytes=kv_bytes, parts=parts))
    places = [
        PlaceCapacity(
            place.name, place.total_bytes, place.free_bytes, 1.0, 1 - busy[place.name], margin=settings.margin
        )
        for place in snapshot.places
    ]
    nowhere = (i for i, variant in enumerate(snapshot.layers) if variant in ("absent", DROPPED))
    return PlaceLoad(placement, tuple(loaded), tuple(places), snapshot.traffic.running, (*snapshot.apart, *nowhere))


def find_shortage(
    snapshot: Snapshot, load: PlaceLoad, settings: Scale, slo: SLO | None, waits: int
) -> tuple[Deficit | None, str]:
    """Return what is short, and the reason in words. `waits` is `RequestStats.kv_waits` of the tick before."""
    traffic = snapshot.traffic
    if traffic.arrived and not traffic.running and not traffic.waiting:
        return None, ""
    use = {p.name: share(p.kv_used_bytes, p.kv_capacity_bytes) for p in snapshot.places}
    stalled = traffic.kv_waits > waits
    fullest = max((p for p in snapshot.places if load.placement.at(p.name)), key=lambda p: use[p.name])
    if use[fullest.name] >= settings.kv_high or stalled:
        target = settings.kv_high - settings.margin
        missing = int(fullest.kv_used_bytes / target) - fullest.kv_capacity_bytes
        words = "requests find no KV block" if stalled else f"the KV cache of {fullest.name} is nearly full"
        return Deficit(fullest.name, max(1, missing)), words
    if alone(traffic) or violations(traffic, slo) <= settings.t_down:
        return None, ""
    busiest = min((p for p in load.places if load.placement.at(p.name)), key=lambda p: p.idle)
    times_over = max(((times.p95 or 0.0) / limit for _, limit, times in promises(traffic, slo)), default=1.0) or 1.0
    return Deficit(busiest.name, compute=(1 - 1 / times_over) * (1 - busiest.idle)), "SLOs are missed"


def violations(traffic: RequestStats, slo: SLO | None) -> float:
    """Return the SLO violation rate: the share of requests, at least, that misses the SLO missed most.

    Between the quantiles that are known it is read on a straight line.
    """
    rates = [0.0]
    for _, limit, times in promises(traffic, slo):
        points = [(times.p50, 0.5), (times.p95, 0.05), (times.p99, 0.01)]
        quantiles = [(value, rate) for value, rate in points if value is not None]
        if not quantiles or quantiles[-1][0] <= limit:
            continue
        between = [
            less + (more - less) * (high - limit) / (high - low)
            for (low, more), (high, less) in pairwise(quantiles)
            if low <= limit < high
        ]
        rates.append(between[0] if between else 0.5)
    return max(rates)


def _busy(place: PlaceReading, placement: Placement, traffic: RequestStats) -> float:
    """Return the share of a place's compute that is in use."""
    if place.idle is not None:
        return 1 - place.idle
    if not traffic.running and not traffic.waiting:
        return 0.0
    return sum(1 / len(places) for places in placement.layers if place.name in places) / len(placement.layers)
