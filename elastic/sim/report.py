"""What came of a simulated run: latencies, throughput, room, and what was done."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from elastic.cluster.control.status import FleetEvent
from elastic.engines.base import Listener, Output
from elastic.engines.continuous.active_requests import OUTCOMES
from elastic.engines.pipeline.turn import StageTimes
from elastic.sim.quantiles import QuantileSketch
from elastic.sim.workload import RequestArrival

MOST_ACTIONS = 1000


@dataclass(frozen=True)
class Action:
    """Something that a policy, or a fault, has done."""

    at_s: float
    kind: str
    about: str
    seconds: float = 0.0
    """How long it took."""


@dataclass
class Sample:
    """One moment of the run."""

    at_s: float
    kv_use: float
    """The share of blocks that requests have or were promised."""
    running: int
    queued: int
    """Requests at the fleet and at instances that have no blocks."""
    tokens_per_s: float
    """Since the moment before."""
    ttft_s: float
    """The mean of first tokens since the moment before; 0.0 without one."""


@dataclass
class RequestFigures:
    """Latencies of requests, and how they ended. Times are seconds of the run."""

    ttft_s: QuantileSketch = field(default_factory=QuantileSketch)
    tpot_s: QuantileSketch = field(default_factory=QuantileSketch)
    """Of answers with two tokens or more."""
    requests: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, int]:
        """Return how many requests came, and how they ended."""
        requests = {name: self.requests[name] for name in ("arrived", "completed", "rejected", "failed", "cancelled")}
        return {**requests, "unfinished": requests["arrived"] - sum(list(requests.values())[1:])}

    def described(self) -> dict[str, Any]:
        """Return these figures, as JSON has them."""
        return {"requests": self.counts(), "ttft_s": self.ttft_s.described(), "tpot_s": self.tpot_s.described()}


@dataclass
class Report(RequestFigures):
    """Figures of a run, which grow with neither requests nor tokens. Times are seconds of the run."""

    queued_s: QuantileSketch = field(default_factory=QuantileSketch)
    """Until a request was first in a step."""
    by_source: dict[str, QuantileSketch] = field(default_factory=dict)
    """TTFT."""
    by_model: dict[str, RequestFigures] = field(default_factory=dict)
    """Of models that have a name."""
    placements: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Where models are that were placed, or why they have no place."""
    devices: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What of them is in use, where models were placed."""
    stages: dict[str, StageTimes] = field(default_factory=dict)
    """What ranks that computed layers with others did with their time meanwhile."""
    tokens: int = 0
    prompt_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    """When the last token came."""
    actions: list[Action] = field(default_factory=list)
    action_counts: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    _since: tuple[int, int, float] = (0, 0, 0.0)

    def event(self, event: FleetEvent) -> None:
        """Note something that a fleet has done; the first of them are told one by one, all are counted."""
        self.action_counts[event.kind] += 1
        if len(self.actions) < MOST_ACTIONS:
            about = ", ".join(filter(None, (event.rank, event.why)))
            self.actions.append(Action(event.when_s, event.kind, about, event.seconds))

    def listener(self, job: RequestArrival, ended: Callable[[], object] = lambda: None, *, model: str = "") -> Listener:
        """Return the listener of a request that comes now, to a model."""
        figures = self._of(model)
        for each in figures:
            each.requests["arrived"] += 1
        if self.first_s is None:
            self.first_s = job.at_s
        return _Listener(self, figures, job, ended)

    def refused(self, model: str = "") -> None:
        """Note that the request which came was refused."""
        for figures in self._of(model):
            figures.requests["rejected"] += 1

    def sample(self, at_s: float, kv_use: float, running: int, queued: int) -> None:
        """Note one moment."""
        tokens, firsts, total = self._since
        before = self.samples[-1].at_s if self.samples else 0.0
        count = self.ttft_s.count - firsts
        ttft_s = (self.ttft_s.total - total) / count if count else 0.0
        rate = (self.tokens - tokens) / (at_s - before) if at_s > before else 0.0
        self.samples.append(Sample(at_s, kv_use, running, queued, rate, ttft_s))
        self._since = self.tokens, self.ttft_s.count, self.ttft_s.total

    @property
    def span_s(self) -> float:
        """From the first arrival to the last token; 0.0 where there is none."""
        return max(0.0, self.last_s - (self.first_s or 0.0))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, over the span."""
        return self.tokens / self.span_s if self.span_s else 0.0

    def document(self) -> dict[str, Any]:
        """Return all figures, as JSON has them: the same for the same scenario and seed."""
        return {
            "requests": self.counts(),
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "span_s": self.span_s,
            "tokens_per_s": self.tokens_per_s,
            "ttft_s": self.ttft_s.described(),
            "tpot_s": self.tpot_s.described(),
            "queued_s": self.queued_s.described(),
            "ttft_s_by_source": {name: each.described() for name, each in sorted(self.by_source.items())},
            "by_model": {name: each.described() for name, each in sorted(self.by_model.items())},
            "placements": self.placements,
            "devices": self.devices,
            "stages": {rank: {"busy_s": each.busy_s, "bubble_s": each.bubble_s} for rank, each in self.stages.items()},
            "kv_use": {"mean": self._kv_use(), "max": max((sample.kv_use for sample in self.samples), default=0.0)},
            "action_counts": dict(sorted(self.action_counts.items())),
            "actions": [vars(action) for action in self.actions],
            "timeline": [vars(sample) for sample in self.samples],
        }

    def _kv_use(self) -> float:
        """Return the mean use over time; 0.0 without samples. Each is of the time since the one before."""
        times = [sample.at_s for sample in self.samples]
        spans = [after - before for before, after in pairwise(times)]
        spans = [*(spans[:1] or times), *spans]
        total = math.fsum(spans)
        return sum(s.kv_use * span for s, span in zip(self.samples, spans, strict=True)) / total if total else 0.0

    def _of(self, model: str) -> tuple[RequestFigures, ...]:
        """Return the figures that a request to a model is counted in."""
        return (self, self.by_model.setdefault(model, RequestFigures())) if model else (self,)


class _Listener:
    """One request's outputs."""

    __slots__ = ("_ended", "_figures", "_first_s", "_job", "_report", "_tokens")

    def __init__(
        self, report: Report, figures: tuple[RequestFigures, ...], job: RequestArrival, ended: Callable[[], object]
    ) -> None:
        self._report, self._figures, self._job, self._ended = report, figures, job, ended
        self._first_s: float | None = None
        self._tokens = 0

    def __call__(self, output: Output) -> None:
        report = self._report
        if output.tokens:
            self._tokens += len(output.tokens)
            report.tokens += len(output.tokens)
            report.last_s = max(report.last_s, output.at_s)
            if self._first_s is None:
                self._begin(output)
        if output.finish is not None:
            outcome = OUTCOMES[output.finish]
            for figures in self._figures:
                figures.requests[outcome] += 1
                if self._first_s is not None and self._tokens > 1 and outcome == "completed":
                    figures.tpot_s.add((output.at_s - self._first_s) / (self._tokens - 1))
            self._ended()

    def _begin(self, output: Output) -> None:
        report, job = self._report, self._job
        self._first_s = output.at_s
        ttft_s = output.at_s - job.at_s
        for figures in self._figures:
            figures.ttft_s.add(ttft_s)
        report.by_source.setdefault(job.source, QuantileSketch()).add(ttft_s)
        report.prompt_tokens += job.prompt
        if output.scheduled_s is not None:
            report.queued_s.add(output.scheduled_s - job.at_s)
