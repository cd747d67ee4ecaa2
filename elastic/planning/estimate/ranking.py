"""Configurations that fit, in order, and the reasons of those that do not. (iServe, sections 4.1 and 6)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.devices import shown_bytes
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.performance import InstanceCost, Load

UNKNOWN_SECONDS = "its seconds are not known; measure it"


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds, in bytes: all of them together are its device's memory."""

    device: str
    total: int
    fixed: int
    """Embedding, head, norms and buffers, which every rank has."""
    layers: int
    """The weights of its layers, in pages."""
    staging: int
    """Kept back for swaps."""
    activations: int
    """For the largest batch, outside of pages; on a CPU so much for each instance whose layers it computes."""
    copied: int
    """For the keys and values of one layer that decode steps copy, if all that is left is in use."""

    @property
    def kv(self) -> int:
        """What is left for keys and values; below zero: what is lacking."""
        return self.total - self.used - self.copied

    @property
    def place_bytes(self) -> int:
        """The budget of the place that the rank has there: all that lies in pages, or is charged to them."""
        return self.fixed + self.layers + self.staging + self.kv

    @property
    def used(self) -> int:
        """All but what is left for keys and values."""
        return self.fixed + self.layers + self.staging + self.activations


@dataclass(frozen=True)
class Candidate:
    """A configuration with what must be known to judge it."""

    configuration: Configuration
    stages: tuple[range, ...]
    """The layers of each stage."""
    ranks: tuple[RankBytes, ...]
    """Stage by stage, the ranks that share one side by side."""
    requests: int
    """How many requests of the load the rank with the least room for keys and values has room for."""
    request_bytes: int
    """Keys and values of one request at all ranks, with what decode steps copy of it."""
    cost: InstanceCost | None
    """Seconds of its batches; None: they are not known."""
    basis: str
    """Where the seconds are from: "measured", "data sheet" or "assumed"."""
    unserved: str = ""
    """Why this version cannot run it; "": it can."""
    quality_loss: float | None = None
    """By how much the mean loss of a token rises, in nats; None: it is not known."""
    activations: Callable[[int], int] | None = None
    """Gives what a batch of so many requests takes at each rank; None: what `ranks` have for the largest one."""


@dataclass(frozen=True)
class Estimate:
    """What one configuration would do with a load. Seconds are predictions."""

    configuration: Configuration
    stages: tuple[range, ...]
    ranks: tuple[RankBytes, ...] = field(repr=False)
    basis: str
    why_not: str
    """Why it cannot be used; "": it can."""
    requests: int
    """That can run at a time."""
    running: int = 0
    """That run at a time at the load's rate."""
    ttft_s: float = math.nan
    tpot_s: float = math.nan
    latency_s: float = math.nan
    """TTFT and the time of all tokens after the first."""
    tokens_s: float = math.nan
    """The most tokens generated a second."""
    rate: float = math.nan
    """The most requests served a second."""
    memory_bytes: int = 0
    """Of all ranks, with the keys and values of what runs, and its batches."""
    quality_loss: float | None = None
    """By how much the mean loss of a token rises, in nats; None: it is not known."""

    @property
    def fits(self) -> bool:
        """Whether it can be used."""
        return not self.why_not

    @property
    def cost(self) -> float:
        """GiB seconds of one request's latency. (Section 4.1)"""
        return self.memory_bytes / 2**30 * self.latency_s

    @property
    def gpu_hours(self) -> float:
        """Hours of all devices together for one request's latency."""
        return self.configuration.ranks * self.latency_s / 3600

    def value(self, minimize: Objective) -> float:
        """Return what is to be small."""
        values = {"latency": self.latency_s, "cost": self.cost, "memory": self.memory_bytes}
        return float(values.get(minimize, self.gpu_hours))


def rank(candidates: Iterable[Candidate], load: Load, intent: Intent | Objective = "cost") -> tuple[Estimate, ...]:
    """Return an estimate of every candidate: those that fit, the best first; then the others, as they came.

    What misses a bound of the intent does not fit. Equals stand in the order of their latency, then of their ranks;
    what is as good by the tolerance of the intent, in that of their memory.
    Raises `ConfigError` for an unknown objective.
    """
    wanted = Intent.of(intent)
    return ordered([judge(candidate, load, wanted) for candidate in candidates], wanted)


def ordered(estimates: Sequence[Estimate], intent: Intent) -> tuple[Estimate, ...]:
    """Return estimates in the order of `rank`."""
    good = sorted(
        (each for each in estimates if each.fits),
        key=lambda each: (each.value(intent.objective), each.latency_s, each.configuration.ranks),
    )
    return (*_as_good(good, intent), *(each for each in estimates if not each.fits))


def _as_good(estimates: Sequence[Estimate], intent: Intent) -> list[Estimate]:
    """Sort what is within the tolerance of the best by memory, then what is within that of the best of the others."""
    ranked: list[Estimate] = []
    while len(ranked) < len(estimates):
        most = (1 + intent.tolerance) * estimates[len(ranked)].value(intent.objective)
        near = [each for each in estimates[len(ranked) :] if each.value(intent.objective) <= most]
        ranked += sorted(near, key=lambda each: each.memory_bytes) if intent.tolerance else near
    return ranked


def judge(candidate: Candidate, load: Load, intent: Intent | None = None) -> Estimate:
    """Return the estimate of one candidate, which does not fit where it misses a bound of the intent."""
    estimate = _estimate(candidate, load)
    return estimate if intent is None else within_bounds(estimate, intent)


def within_bounds(estimate: Estimate, intent: Intent) -> Estimate:
    """Return an estimate, which does not fit where it misses a bound of the intent."""
    if not estimate.fits:
        return estimate
    lossy = intent.too_lossy(estimate.configuration.compressed, estimate.quality_loss)
    return replace(estimate, why_not=lossy or intent.missed(estimate.latency_s, estimate.cost))


def _estimate(candidate: Candidate, load: Load) -> Estimate:
    """Return the estimate of one candidate, whatever the intent."""
    cost, requests = candidate.cost, max(0, candidate.requests)
    estimate = Estimate(
        candidate.configuration,
        candidate.stages,
        candidate.ranks,
        candidate.basis,
        candidate.unserved or _shortage(candidate, load) or (UNKNOWN_SECONDS if cost is None else ""),
        requests,
        quality_loss=candidate.quality_loss,
    )
    if cost is None or estimate.why_not:
        return estimate
    most, running = cost.most_rate(load, requests), cost.running(load, requests)
    estimate = replace(estimate, rate=most, tokens_s=most * load.new)
    if running is None:
        why_not = f"serves {most:.3g} requests/s at most, of {load.rate:g}, {requests} at a time"
        return replace(estimate, why_not=why_not)
    ttft_s, tpot_s = cost.ttft_s(load, running - 1), cost.tpot_s(load, running)
    return replace(
        estimate,
        running=running,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        latency_s=ttft_s + (load.new - 1) * tpot_s,
        memory_bytes=_held_bytes(candidate, running) + running * candidate.request_bytes,
    )


def _held_bytes(candidate: Candidate, running: int) -> int:
    """Return what the ranks hold but for keys and values while so many requests run, maybe fewer than have room."""
    batch = candidate.activations
    return sum(
        each.used if batch is None else each.used - each.activations + batch(running) for each in candidate.ranks
    )


def _shortage(candidate: Candidate, load: Load) -> str:
    """Say which rank lacks memory for its weights, or for a single request; "" if none does."""
    tight = min(candidate.ranks, key=lambda each: each.kv)
    if tight.kv < 0:
        return (
            f"{tight.device} lacks {shown_bytes(-tight.kv)}: it needs {shown_bytes(tight.used)} without keys and values"
        )
    if candidate.requests < 1:
        left = shown_bytes(tight.kv)
        return f"{tight.device} has {left} left for keys and values: no request of {load.tokens} tokens fits"
    return ""
