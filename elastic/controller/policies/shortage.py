"""What a snapshot says about placement: what the layers need, what the places have left, and what is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elastic.config import SLO, Scale
from elastic.controller.policies.pressure import alone, share
from elastic.controller.snapshot import PlaceReading, Quantiles, RequestStats, Snapshot
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.planning.scale_down import Deficit
from elastic.types import Action, Migrate, Replicate

NOWHERE = 1 << 60
"""Bytes that no place has."""


@dataclass(frozen=True)
class PlaceLoad:
    """The instance as planners see it. Compute is counted in shares of one place."""

    placement: Placement
    needs: tuple[ResourceDemand, ...]
    places: tuple[PlaceCapacity, ...]
    rows: int
    """Requests that run."""
    apart: tuple[int, ...] = ()
    """Layers with modules at other places."""

    @property
    def replica_needs(self) -> tuple[ResourceDemand, ...]:
        """Of one more replica of each layer: half of the rows at most. No place has room for one that is apart."""
        needs = [replace(n, compute=n.compute / 2, kv_bytes=-(-n.kv_bytes // 2)) for n in self.needs]
        return tuple(replace(n, nbytes=NOWHERE) if i in self.apart else n for i, n in enumerate(needs))

    def has_room(self, actions: Sequence[Action]) -> bool:
        """Whether layers and replicas that are to come still fit below the margins."""
        left = {place.name: place.room_bytes for place in self.places}
        for action in actions:
            if isinstance(action, Migrate | Replicate) and not getattr(action, "parts", ()):
                needs = self.needs if isinstance(action, Migrate) else self.replica_needs
                left[action.place] -= sum(needs[layer].total_bytes for layer in action.layers)
        return min(left.values(), default=0) >= 0


def describe(snapshot: Snapshot, needs: Sequence[ResourceDemand], settings: Scale) -> PlaceLoad:
    """From readings: KV bytes and compute of each place are divided among the layers that are there.

    Where nobody tells how busy a place is, it is taken to be as busy as its share of the layers while requests run:
    they run one after another.
    """
    placement = Placement(snapshot.residencies)
    readings = {place.name: place for place in snapshot.places}
    busy = {name: _busy(one, placement, snapshot.traffic) for name, one in readings.items()}
    counts = {name: len(placement.at(name)) for name in readings}
    found = []
    for need, (own, *_) in zip(needs, placement.layers, strict=True):
        one = readings[own]
        kv, compute = one.kv_used_bytes // counts[own], busy[own] / counts[own]
        found.append(replace(need, compute=compute, kv_bytes=kv, parts=_parts(need, compute)))
    places = (
        PlaceCapacity(one.name, one.total_bytes, one.free_bytes, 1.0, 1 - busy[one.name], margin=settings.margin)
        for one in snapshot.places
    )
    return PlaceLoad(placement, tuple(found), tuple(places), snapshot.traffic.running, snapshot.apart)


def find_shortage(
    snapshot: Snapshot, load: PlaceLoad, settings: Scale, slo: SLO | None, waits: int
) -> tuple[Deficit | None, str]:
    """What is short, and why that is thought, in words. `waits`: how often requests had found no KV block before."""
    traffic = snapshot.traffic
    if traffic.arrived and not traffic.running and not traffic.waiting:
        return None, ""
    stalled = traffic.stalls + traffic.preemptions > waits
    fullest = max((p for p in snapshot.places if load.placement.at(p.name)), key=_use)
    if _use(fullest) >= settings.kv_high or stalled:
        target = settings.kv_high - settings.margin
        missing = int(fullest.kv_used_bytes / target) - fullest.kv_capacity_bytes
        words = "requests find no KV block" if stalled else f"the KV cache of {fullest.name} is nearly full"
        return Deficit(fullest.name, max(1, missing)), words
    if alone(traffic) or violations(traffic, slo) <= settings.t_down:
        return None, ""
    busiest = min((p for p in load.places if load.placement.at(p.name)), key=lambda p: p.idle)
    excess = 1 - 1 / _times_over(traffic, slo)
    return Deficit(busiest.name, compute=excess * (1 - busiest.idle)), "SLOs are missed"


def violations(traffic: RequestStats, slo: SLO | None) -> float:
    """The SLO violation rate: the share of requests that misses the SLO missed most, as far as quantiles tell."""
    return max((_above(limit, seen) for limit, seen in _promised(traffic, slo)), default=0.0)


def _above(limit: float, seen: Quantiles) -> float:
    """At least this share was above a limit; between known quantiles, on a straight line."""
    points = [(seen.p50, 0.5), (seen.p95, 0.05), (seen.p99, 0.01)]
    known = [(value, rate) for value, rate in points if value is not None]
    if not known or known[-1][0] <= limit:
        return 0.0
    for (low, more), (high, less) in pairwise(known):
        if low <= limit < high:
            return less + (more - less) * (high - limit) / (high - low)
    return 0.5


def _times_over(traffic: RequestStats, slo: SLO | None) -> float:
    return max(((seen.p95 or 0.0) / limit for limit, seen in _promised(traffic, slo)), default=1.0) or 1.0


def _promised(traffic: RequestStats, slo: SLO | None) -> list[tuple[float, Quantiles]]:
    pairs = ((slo.ttft_s, traffic.ttft_s), (slo.tpot_s, traffic.tpot_s)) if slo else ()
    return [(limit, seen) for limit, seen in pairs if limit]


def _use(place: PlaceReading) -> float:
    return share(place.kv_used_bytes, place.kv_capacity_bytes)


def _busy(place: PlaceReading, placement: Placement, traffic: RequestStats) -> float:
    """Share of a place's compute that is in use."""
    if place.idle is not None:
        return 1 - place.idle
    if not traffic.running and not traffic.waiting:
        return 0.0
    return sum(1 / len(p) for p in placement.layers if place.name in p) / len(placement.layers)


def _parts(need: ResourceDemand, compute: float) -> dict[str, ResourceDemand]:
    """Modules take compute as they take bytes: decoding reads every weight once."""
    whole = max(1, need.nbytes)
    return {name: replace(part, compute=compute * part.nbytes / whole) for name, part in need.parts.items()}
