"""Entry and exit of pressure: when layers should leave and when they should return, possible or not."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.config import SLO, Policy
from elastic.controller.snapshot import Quantiles, RequestStats


@dataclass(frozen=True)
class PressureReading:
    """The figures behind entry and exit; smoothed, but for `stalled` and the traffic."""

    used_bytes: float
    capacity_bytes: int
    base_bytes: int
    """The capacity that is left when all swapped layers are back."""
    queue_s: float
    stalled: bool
    """Whether, since the last tick, a request found no KV block."""
    traffic: RequestStats
    use: float = field(init=False)
    """Used share of the capacity."""
    base_use: float = field(init=False)
    """Used share of the capacity without swapped layers."""
    idle: bool = field(init=False)
    """True when all requests have ended. Where none was ever counted, nobody counts: then it is not known."""

    def __post_init__(self) -> None:
        traffic = self.traffic
        object.__setattr__(self, "use", share(self.used_bytes, self.capacity_bytes))
        object.__setattr__(self, "base_use", share(self.used_bytes, self.base_bytes))
        object.__setattr__(self, "idle", bool(traffic.arrived) and not traffic.waiting and not traffic.running)


def share(used: float, capacity: int) -> float:
    """Return the used share of a capacity that may be 0 or less."""
    return used / capacity if capacity > 0 else (1.0 if used > 0 else 0.0)


def entry(reading: PressureReading, policy: Policy, slo: SLO | None = None) -> str | None:
    """Name the pressure there is, in words; None: there is none."""
    if reading.idle:  # what caches then hold, nobody waits for
        return None
    if reading.use >= policy.kv_high:
        return "the KV cache is nearly full"
    if reading.stalled:
        return "requests find no KV block"
    if reading.use < policy.queue_kv:
        return None
    if reading.queue_s >= _queue_high_s(policy, slo):
        return "requests wait for KV"
    if reading.queue_s > policy.queue_low_s and not alone(reading.traffic) and missed(reading.traffic, slo):
        return "requests wait, and an SLO is missed"
    return None


def exit_wish(reading: PressureReading, policy: Policy, slo: SLO | None = None) -> bool:
    """Tell whether the load would do without swapped layers; whether they can return now is another question."""
    if reading.stalled or reading.base_use > policy.kv_low:
        return False
    low_s = min(policy.queue_low_s, _queue_high_s(policy, slo))
    return reading.queue_s <= low_s or reading.base_use < policy.queue_kv


def _queue_high_s(policy: Policy, slo: SLO | None) -> float:
    """Return the policy's limit of waiting, or half of a TTFT that is promised, if that is less."""
    return min(policy.queue_high_s, slo.ttft_s / 2) if slo and slo.ttft_s else policy.queue_high_s


def missed(traffic: RequestStats, slo: SLO | None) -> tuple[str, ...]:
    """Name the SLOs that more than one in twenty of the last requests missed."""
    return tuple(name for name, limit, times in promises(traffic, slo) if times.p95 is not None and times.p95 > limit)


def promises(traffic: RequestStats, slo: SLO | None) -> list[tuple[str, float, Quantiles]]:
    """List (name, seconds promised, seconds measured) of the SLOs that are set for each request or token."""
    pairs = (("ttft_s", slo.ttft_s, traffic.ttft_s), ("tpot_s", slo.tpot_s, traffic.tpot_s)) if slo else ()
    return [(name, limit, times) for name, limit, times in pairs if limit]


def alone(traffic: RequestStats) -> bool:
    """Tell whether what is slow now is slow by itself: no other request is in its way."""
    return not traffic.waiting and traffic.running <= 1
