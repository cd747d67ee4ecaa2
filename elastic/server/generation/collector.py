"""Engine and runtime as Prometheus sees them, read when it asks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from elastic.controller.snapshot import RequestStats
from elastic.engines.base import Engine
from elastic.types import HOST, KINDS, Event, Status

ABSENT = "absent"
_STATUSES = ("applied", "deferred", "stale")
_WINDOWS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "queue": "queued_s"}
_QUANTILES = {"0.5": "p50", "0.95": "p95", "0.99": "p99"}
Labels = tuple[str, ...]


class Collector:
    """A collector for a registry of `prometheus_client`."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._gauge = partial(self._family, GaugeMetricFamily)
        self._counter = partial(self._family, CounterMetricFamily)
        self._lock = threading.Lock()
        self._last_event = -1
        self._done: Counter[Labels] = Counter()
        self._pauses: dict[Labels, float] = {}
        self._moved: Counter[Labels] = Counter()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield self._gauge("serving", "1 while requests are taken.", {(): float(self._engine.serving)})
        yield from self._traffic(self._engine.counters.read())
        runtime = self._engine.runtime
        if runtime is not None:
            yield from self._memory(runtime.status())
            yield from self._actions(runtime.events())

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the registry need not ask engine and runtime to know the names."""
        return iter(())

    def _traffic(self, now: RequestStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests in the batch.", {(): now.running})
        yield self._gauge("num_requests_waiting", "Requests not scheduled yet.", {(): now.waiting})
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

    def _memory(self, now: Status) -> Iterator[Metric]:
        owned: dict[Labels, float] = {(p.name, o): size for p in now.places for o, size in p.owners.items()}
        owned |= {(place.name, "free"): place.free_bytes for place in now.places}
        budgets: dict[Labels, float] = {(place.name,): place.budget_bytes for place in now.places}
        pages: dict[Labels, float] = {(place.name,): place.page_bytes for place in now.places}
        yield self._gauge("memory_bytes", "A place's budget by owner.", owned, "place", "owner")
        yield self._gauge("memory_budget_bytes", "The sum of the owners.", budgets, "place")
        yield self._gauge("page_bytes", "The size of a page.", pages, "place")
        layers: Counter[Labels] = Counter((variant,) for variant in variants(now))
        yield self._gauge("layers", "Decoder layers by the variant they are in.", layers, "variant")
        for word in ("used", "capacity", "limit", "maximum", "idle", "retained"):
            sizes: dict[Labels, float] = {(kv.place,): getattr(kv, f"{word}_bytes") for kv in now.kv}
            yield self._gauge(f"kv_{word}_bytes", f"KV cache: {word}.", sizes, "place")
        uses = [
            kv.used_bytes / kv.capacity_bytes if kv.capacity_bytes else float(bool(kv.used_bytes))
            for kv in now.kv
            if kv.share
        ]
        fullest = max(uses, default=0.0)
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV capacity; 1 is all of it.", {(): fullest})

    def _actions(self, events: Sequence[Event]) -> list[Metric]:
        """Return totals over all events, although the runtime remembers only the last ones."""
        with self._lock:
            for event in events:
                if event.id <= self._last_event:
                    continue
                self._last_event = event.id
                kind = KINDS.get(type(event.action), "other")
                outcome = event.outcome if event.outcome in _STATUSES else "applied_later"
                self._done[kind, outcome if event.ok else "failed"] += 1
                self._pauses[kind,] = self._pauses.get((kind,), 0.0) + event.pause_ms / 1000
                self._moved[kind,] += event.moved_bytes
            pause = "Time in which no forward pass could run."
            return [
                self._counter("actions", "Actions by kind and outcome.", self._done, "kind", "outcome"),
                self._counter("action_pause_seconds", pause, self._pauses, "kind"),
                self._counter("action_moved_bytes", "Bytes copied by actions.", self._moved, "kind"),
            ]

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help: str,
        values: Mapping[Labels, float],
        *labels: str,
    ) -> Metric:
        """Make a family of the values by their labels."""
        family = kind(f"elastic_{name}", help, labels=["model_name", *labels])
        for label_values, value in values.items():
            family.add_metric([self._name, *label_values], value)
        return family


def variants(status: Status) -> list[str]:
    """List for each decoder layer the variant it is in, or "absent"."""
    by_layer, layer = [], ""
    for name, residencies in status.residencies.items():
        if layer and name.startswith(f"{layer}."):
            continue  # modules of the layer that are elsewhere
        layer = name
        by_layer.append(next((r.variant for r in residencies if r.place != HOST), ABSENT))
    return by_layer
