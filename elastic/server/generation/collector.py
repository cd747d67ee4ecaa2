"""What Prometheus sees of engine and runtime, read when it asks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from elastic.controller.snapshot import Quantiles, RequestStats
from elastic.engines.base import Engine
from elastic.runtime.runtime import Runtime
from elastic.types import HOST, KINDS, Event, KVStatus, Status

_STATUSES = ("applied", "deferred", "stale")
_WINDOWS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "queue": "queued_s"}
Labels = tuple[str, ...]


class Collector:
    """A collector for a registry of `prometheus_client`."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._actions = _Actions()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield self._gauge("serving", "1 while requests are taken.", {(): float(self._engine.serving)})
        yield from self._traffic(self._engine.counters.read())
        runtime = self._engine.runtime
        if runtime is not None:
            yield from self._memory(runtime.status())
            yield from self._changes(runtime)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry need not ask engine and runtime to know the names."""
        return iter(())

    def _traffic(self, now: RequestStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests in the batch.", {(): now.running})
        yield self._gauge("num_requests_waiting", "Requests not scheduled yet.", {(): now.waiting})
        yield self._gauge("queue_delay_seconds", "How long the oldest waiting one has waited.", {(): now.queue_delay_s})
        outcomes = ("completed", "cancelled", "failed", "rejected")
        ended: dict[Labels, float] = {(outcome,): getattr(now, outcome) for outcome in outcomes}
        yield self._counter("requests_arrived", "Requests offered.", {(): now.arrived})
        yield self._counter("requests", "Requests that ended, by outcome.", ended, ["outcome"])
        yield self._counter("num_preemptions", "Running requests that lost their cache.", {(): now.preemptions})
        yield self._counter("stalls", "Running requests left out of a step for want of KV blocks.", {(): now.stalls})
        yield self._counter("prompt_tokens", "Tokens of prompts.", {(): now.prompt_tokens})
        yield self._counter("generation_tokens", "Tokens generated.", {(): now.generated_tokens})
        yield self._gauge("tokens_per_second", "Generated, over the last seconds.", {(): now.tokens_per_s})
        yield self._gauge("arrivals_per_second", "Requests, over the last seconds.", {(): now.arrivals_per_s})
        recent: dict[Labels, float] = {}
        for measure, field in _WINDOWS.items():
            recent |= {(measure, name): value for name, value in _quantiles(getattr(now, field)).items()}
        yield self._gauge("window_seconds", "Latencies of the last seconds.", recent, ["measure", "quantile"])

    def _memory(self, now: Status) -> Iterator[Metric]:
        owned: dict[Labels, float] = {(p.name, o): size for p in now.places for o, size in p.owners.items()}
        owned |= {(place.name, "free"): place.free_bytes for place in now.places}
        budgets: dict[Labels, float] = {(place.name,): place.budget_bytes for place in now.places}
        pages: dict[Labels, float] = {(place.name,): place.page_bytes for place in now.places}
        yield self._gauge("memory_bytes", "A place's budget by owner.", owned, ["place", "owner"])
        yield self._gauge("memory_budget_bytes", "The sum of the owners.", budgets, ["place"])
        yield self._gauge("page_bytes", "The size of a page.", pages, ["place"])
        layers: Counter[Labels] = Counter((variant,) for variant in variants(now))
        yield self._gauge("layers", "Decoder layers by the variant they are in.", layers, ["variant"])
        for word in ("used", "capacity", "limit", "maximum", "idle", "retained"):
            sizes: dict[Labels, float] = {(kv.place,): getattr(kv, f"{word}_bytes") for kv in now.kv}
            yield self._gauge(f"kv_{word}_bytes", f"KV cache: {word}.", sizes, ["place"])
        fullest = max((_use(kv) for kv in now.kv if kv.share), default=0.0)
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV capacity; 1 is all of it.", {(): fullest})

    def _changes(self, runtime: Runtime) -> Iterator[Metric]:
        done, pauses, moved = self._actions.read(runtime)
        yield self._counter("actions", "Actions by kind and outcome.", done, ["kind", "outcome"])
        yield self._counter("action_pause_seconds", "Time in which no forward pass could run.", pauses, ["kind"])
        yield self._counter("action_moved_bytes", "Bytes copied by actions.", moved, ["kind"])

    def _gauge(self, name: str, help: str, values: Mapping[Labels, float], labels: list[str] | None = None) -> Metric:
        return self._filled(GaugeMetricFamily(f"elastic_{name}", help, labels=self._labels(labels)), values)

    def _counter(self, name: str, help: str, values: Mapping[Labels, float], labels: list[str] | None = None) -> Metric:
        return self._filled(CounterMetricFamily(f"elastic_{name}", help, labels=self._labels(labels)), values)

    @staticmethod
    def _labels(labels: list[str] | None) -> list[str]:
        return ["model_name", *(labels or [])]

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Labels, float]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for labels, value in values.items():
            family.add_metric([self._name, *labels], value)
        return family


class _Actions:
    """Totals over all events, although the runtime remembers only the last ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = -1
        self._done: Counter[Labels] = Counter()
        self._pauses: dict[Labels, float] = {}
        self._moved: Counter[Labels] = Counter()

    def read(self, runtime: Runtime) -> tuple[dict[Labels, float], dict[Labels, float], dict[Labels, float]]:
        """Actions, seconds of pause and bytes copied."""
        with self._lock:
            for event in runtime.events():
                if event.id > self._seen:
                    self._add(event)
            return dict(self._done), dict(self._pauses), dict(self._moved)

    def _add(self, event: Event) -> None:
        self._seen = event.id
        kind = KINDS.get(type(event.action), "other")
        self._done[kind, _outcome(event)] += 1
        self._pauses[kind,] = self._pauses.get((kind,), 0.0) + event.pause_ms / 1000
        self._moved[kind,] += event.moved_bytes


def _outcome(event: Event) -> str:
    if not event.ok:
        return "failed"
    return event.outcome if event.outcome in _STATUSES else "applied_later"


def _quantiles(of: Quantiles) -> dict[str, float]:
    found = {"0.5": of.p50, "0.95": of.p95, "0.99": of.p99}
    return {name: value for name, value in found.items() if value is not None}


def _use(kv: KVStatus) -> float:
    return kv.used_bytes / kv.capacity_bytes if kv.capacity_bytes else float(bool(kv.used_bytes))


ABSENT = "absent"


def variants(status: Status) -> list[str]:
    """For each decoder layer the variant it is in, or "absent"."""
    found, layer = [], ""
    for name, residencies in status.residencies.items():
        if layer and name.startswith(f"{layer}."):
            continue  # modules of the layer that are elsewhere
        layer = name
        found.append(next((r.variant for r in residencies if r.place != HOST), ABSENT))
    return found
