"""Engine and runtime as Prometheus sees them, read when it asks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from elastic.controller.snapshot import RequestStats
from elastic.engines.base import Engine
from elastic.types import DROPPED, HOST, KINDS, Event, Status

ABSENT = "absent"
_STATUSES = ("applied", "deferred", "stale")
_WINDOWS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "queue": "queued_s"}
_QUANTILES = {"0.5": "p50", "0.95": "p95", "0.99": "p99"}
_STEP_TOKENS = tuple(float(1 << bits) for bits in range(15))
"""Bounds of the steps that `RequestStats.steps_by_tokens` counts."""
Labels = tuple[str, ...]
Histograms = Mapping[Labels, tuple[Sequence[float], Sequence[int], float]]
"""By their labels: bounds, how many are in each bucket and beyond the last, and the sum."""


class Collector:
    """A collector for a registry of `prometheus_client`."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._families = Families(name)
        self._gauge, self._counter = self._families.gauge, self._families.counter
        self._actions = ActionTotals()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield self._gauge("serving", "1 while requests are taken.", {(): float(self._engine.serving)})
        yield from self._traffic(self._engine.counters.read())
        runtime = self._engine.runtime
        if runtime is not None:
            yield from memory(self._families, {(): runtime.status()})
            self._actions.add((), runtime.events())
            yield from self._actions.collect(self._families)

    def _traffic(self, now: RequestStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests in the batch.", {(): now.running})
        yield self._gauge("num_requests_waiting", "Requests not scheduled yet.", {(): now.waiting})
        reasons: dict[Labels, float] = {("capacity",): now.waiting, ("deferred",): 0}
        help = "The same by what they wait for, in vLLM's words: here always KV blocks, or a place in the batch."
        yield self._gauge("num_requests_waiting_by_reason", help, reasons, "reason")
        if now.steps_by_tokens:  # those of a fleet are at its ranks
            yield step_tokens(self._families, {(): now})
        yield self._gauge("queue_delay_seconds", "How long the oldest waiting one has waited.", {(): now.queue_delay_s})
        outcomes = ("completed", "cancelled", "failed", "rejected")
        ended: dict[Labels, float] = {(outcome,): getattr(now, outcome) for outcome in outcomes}
        yield self._counter("requests_arrived", "Requests offered.", {(): now.arrived})
        yield self._counter("requests", "Requests that ended, by outcome.", ended, "outcome")
        yield self._counter("num_preemptions", "Running requests that lost their cache.", {(): now.preemptions})
        yield self._counter("stalls", "Running requests left out of a step for want of KV blocks.", {(): now.stalls})
        yield self._counter("prompt_tokens", "Tokens of prompts.", {(): now.prompt_tokens})
        yield self._counter("generation_tokens", "Tokens generated.", {(): now.generated_tokens})
        yield self._gauge("tokens_per_second", "Generated, over the last seconds.", {(): now.tokens_per_s})
        yield self._gauge("arrivals_per_second", "Requests, over the last seconds.", {(): now.arrivals_per_s})
        recent: dict[Labels, float] = {}
        for measure, field in _WINDOWS.items():
            for quantile, name in _QUANTILES.items():
                value = getattr(getattr(now, field), name)
                recent |= {} if value is None else {(measure, quantile): value}
        yield self._gauge("window_seconds", "Latencies of the last seconds.", recent, "measure", "quantile")


class Families:
    """Makes families of one model's metrics; `of` are the names of labels that all have, such as instance and rank."""

    def __init__(self, name: str, of: Labels = ()) -> None:
        self._name, self._of = name, of
        self.gauge = partial(self._family, GaugeMetricFamily)
        self.counter = partial(self._family, CounterMetricFamily)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help: str,
        values: Mapping[Labels, float],
        *labels: str,
    ) -> Metric:
        """Make a family of the values by their labels."""
        family = kind(f"elastic_{name}", help, labels=["model_name", *self._of, *labels])
        for label_values, value in values.items():
            family.add_metric([self._name, *label_values], value)
        return family

    def histogram(self, name: str, help: str, values: Histograms) -> Metric:
        """Make a family of histograms."""
        family = HistogramMetricFamily(f"elastic_{name}", help, labels=["model_name", *self._of])
        for label_values, (bounds, counts, total) in values.items():
            ends = [*map(str, bounds), "+Inf"]
            family.add_metric([self._name, *label_values], list(zip(ends, accumulate(counts), strict=True)), total)
        return family


def step_tokens(families: Families, engines: Mapping[Labels, RequestStats]) -> Metric:
    """Return the histogram of the tokens of engines' steps."""
    values: dict[Labels, tuple[Sequence[float], Sequence[int], float]] = {}
    for labels, now in engines.items():
        steps = [*now.steps_by_tokens, *(0 for _ in _STEP_TOKENS)]
        counts = [*steps[: len(_STEP_TOKENS)], sum(steps[len(_STEP_TOKENS) :])]
        values[labels] = _STEP_TOKENS, counts, float(now.step_tokens)
    return families.histogram("iteration_tokens_total", "Tokens of a step, of prompts and of answers.", values)


def memory(families: Families, models: Mapping[Labels, Status]) -> Iterator[Metric]:
    """Yield what models say of their memory; each has labels of its own."""
    gauge = families.gauge
    places = [(of, place) for of, now in models.items() for place in now.places]
    caches = [(of, kv) for of, now in models.items() for kv in now.kv]
    owned: dict[Labels, float] = {(*of, p.name, owner): size for of, p in places for owner, size in p.owners.items()}
    owned |= {(*of, place.name, "free"): place.free_bytes for of, place in places}
    yield gauge("memory_bytes", "A place's budget by owner.", owned, "place", "owner")
    budgets: dict[Labels, float] = {(*of, place.name): place.budget_bytes for of, place in places}
    yield gauge("memory_budget_bytes", "The sum of the owners.", budgets, "place")
    pages: dict[Labels, float] = {(*of, place.name): place.page_bytes for of, place in places}
    yield gauge("page_bytes", "The size of a page.", pages, "place")
    layers = Counter((*of, variant) for of, now in models.items() for variant in variants(now))
    yield gauge("layers", "Decoder layers by the variant they are in.", layers, "variant")
    for word in ("used", "capacity", "limit", "maximum", "idle", "retained"):
        sizes: dict[Labels, float] = {(*of, kv.place): getattr(kv, f"{word}_bytes") for of, kv in caches}
        yield gauge(f"kv_{word}_bytes", f"KV cache: {word}.", sizes, "place")
    fullest = {of: kv_use(now) for of, now in models.items()}
    yield gauge("kv_cache_usage_perc", "Used share of the KV capacity; 1 is all of it.", fullest)


def kv_use(now: Status) -> float:
    """Return the used share of the KV capacity, of the place where it is the largest."""
    uses = [
        kv.used_bytes / kv.capacity_bytes if kv.capacity_bytes else float(bool(kv.used_bytes))
        for kv in now.kv
        if kv.share
    ]
    return max(uses, default=0.0)


class ActionTotals:
    """Totals over all actions, although runtimes remember only the last ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[Labels, Event] = {}
        """By rank, the last event that was counted."""
        self._done: Counter[Labels] = Counter()
        self._pauses: dict[Labels, float] = {}
        self._moved: Counter[Labels] = Counter()

    def add(self, of: Labels, events: Sequence[Event]) -> None:
        """Count the events of a model that were not counted yet; those of a rank, by whatever instance it has now."""
        rank = of[-1:]
        with self._lock:
            last = self._last.get(rank)
            if last is not None and events and events[-1].id <= last.id and events[-1].when_s > last.when_s:
                last = None  # another process has the rank's name now, and counts from 0
            for event in events:
                if last is not None and event.id <= last.id:
                    continue
                self._last[rank] = event
                kind = KINDS.get(type(event.action), "other")
                outcome = event.outcome if event.outcome in _STATUSES else "applied_later"
                self._done[*of, kind, outcome if event.ok else "failed"] += 1
                self._pauses[*of, kind] = self._pauses.get((*of, kind), 0.0) + event.pause_ms / 1000
                self._moved[*of, kind] += event.moved_bytes

    def collect(self, families: Families) -> list[Metric]:
        """Return the totals."""
        pause = "Time in which no forward pass could run."
        with self._lock:
            return [
                families.counter("actions", "Actions by kind and outcome.", self._done, "kind", "outcome"),
                families.counter("action_pause_seconds", pause, self._pauses, "kind"),
                families.counter("action_moved_bytes", "Bytes copied by actions.", self._moved, "kind"),
            ]


def variants(status: Status) -> list[str]:
    """List for each decoder layer the variant it is in, "absent" where host memory has it, or "dropped"."""
    by_layer, layer = [], ""
    for name, residencies in status.residencies.items():
        if layer and name.startswith(f"{layer}."):
            continue  # modules of the layer that are elsewhere
        layer = name
        away = DROPPED if residencies[0].place == DROPPED else ABSENT
        by_layer.append(next((r.variant for r in residencies if r.place not in (HOST, DROPPED)), away))
    return by_layer
