"""Figures about requests, from what an engine tells of them."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from elastic import clock
from elastic.controller.sensors.sliding_window import BUCKET_S, BUCKETS, SlidingWindow, WindowSum
from elastic.controller.snapshot import RequestStats
from elastic.errors import require

Outcome = Literal["completed", "cancelled", "failed", "rejected", "moved"]
Time = Literal["queued_s", "ttft_s", "tpot_s", "itl_s"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
TIMES: tuple[Time, ...] = ("queued_s", "ttft_s", "tpot_s", "itl_s")
MOST_PENDING = 64
"""The most requests' tokens that wait to be counted."""


@dataclass(slots=True)
class _Request:
    arrived_s: float
    sequences: int
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0


class RequestMetrics:
    """Thread-safe; every call costs O(1) for each request. Times are seconds of `clock.now`; None: now.

    Definitions are vLLM's. TTFT: first token - arrival. TPOT: (last token - first) / (tokens - 1), of completed
    requests with two or more. ITL: each gap between the tokens of a request; tokens that come together are one gap.
    Only requests that have not ended are remembered, so nothing grows with the run. Windows are of 30 s, to a second;
    their quantiles are off by 4.9 % at most. A call that makes no sense (an unknown or ended request, one that arrives
    twice, no tokens) is ignored, but for its time: windows go by the latest one ever told, in whatever order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[tuple[Mapping[str, int], float]] = deque()  # tokens, by request, that no figure has yet
        self._waiting: OrderedDict[str, _Request] = OrderedDict()  # a plain dict finds its first slowly
        self._running: dict[str, _Request] = {}
        self._totals: Counter[str] = Counter()
        self._steps: Counter[int] = Counter()  # by the bits of their tokens less one
        self._windows = {name: SlidingWindow() for name in TIMES}
        self._tokens = WindowSum()
        self._arrivals = WindowSum()
        self._began_s: float | None = None
        self._now_s = -math.inf

    def arrived(self, request: str, prompt_tokens: int, at_s: float | None = None, *, sequences: int = 1) -> None:
        """Note that a request was offered, to be decoded as so many sequences side by side."""
        with self._lock:
            self._count_pending()
            at_s = self._clock(at_s)
            if request in self._waiting or request in self._running:
                return
            self._waiting[request] = _Request(at_s, max(1, sequences))
            self._totals["arrived"] += 1
            self._totals["prompt_tokens"] += prompt_tokens
            self._arrivals.add(1, self._now_s)

    def refused(self, at_s: float | None = None) -> None:
        """Note that a request was offered, and not taken."""
        with self._lock:
            self._count_pending()
            self._clock(at_s)
            self._totals["arrived"] += 1
            self._totals["rejected"] += 1
            self._arrivals.add(1, self._now_s)

    def scheduled(self, request: str, at_s: float | None = None) -> None:
        """Note that a request's first tokens go into a forward pass."""
        with self._lock:
            self._count_pending()
            at_s = self._clock(at_s)
            if request in self._waiting:
                self._schedule(request, at_s)

    def produced(self, request: str, tokens: int = 1, at_s: float | None = None) -> None:
        """Note that tokens were generated, counted over a request's sequences."""
        self.produced_together({request: tokens}, at_s)

    def produced_together(self, tokens: Mapping[str, int], at_s: float | None = None) -> None:
        """Note the tokens of one step, by request; the mapping is kept.

        The figures have them when they are read, or sooner: behind a forward pass every line of code is a cache miss.
        """
        self._pending.append((tokens, clock.now() if at_s is None else at_s))
        if len(self._pending) * max(1, len(tokens)) >= MOST_PENDING:
            with self._lock:
                self._count_pending()

    def ended(self, request: str, outcome: Outcome, at_s: float | None = None) -> None:
        """Note that a request is over. Raises `ConfigError` for an unknown outcome."""
        require(outcome in OUTCOMES, "outcome", outcome, f"one of {', '.join(OUTCOMES)}")
        with self._lock:
            self._count_pending()
            self._clock(at_s)
            timing = self._waiting.pop(request, None) or self._running.pop(request, None)
            if timing is None:
                return
            self._totals[outcome] += 1
            steps = timing.tokens / timing.sequences
            if outcome == "completed" and timing.first_s is not None and steps > 1:
                self._windows["tpot_s"].add((timing.last_s - timing.first_s) / (steps - 1), self._now_s)

    def stepped(self, tokens: int) -> None:
        """Note a step of the engine, of so many tokens of prompts and answers."""
        with self._lock:
            self._totals["step_tokens"] += tokens
            self._steps[(tokens - 1).bit_length()] += 1

    def stalled(self, requests: int = 1) -> None:
        """Note that running requests were left out of a step for want of KV blocks."""
        with self._lock:
            self._totals["stalls"] += requests

    def preempted(self, requests: int = 1) -> None:
        """Note that running requests lost their cache."""
        with self._lock:
            self._totals["preemptions"] += requests

    def read(self, at_s: float | None = None) -> RequestStats:
        """Return everything as of now."""
        with self._lock:
            self._count_pending()
            at_s = self._clock(at_s)
            now_s = self._now_s
            oldest = next(iter(self._waiting.values()), None)
            covered_s = (BUCKETS - 1) * BUCKET_S + now_s % BUCKET_S
            began_s = now_s if self._began_s is None else self._began_s
            span_s = max(BUCKET_S, min(covered_s, now_s - began_s))  # at the beginning less than the whole window
            figures: dict[str, Any] = {name: window.read(now_s) for name, window in self._windows.items()}
            figures |= self._totals
            sizes = range(max(self._steps, default=-1) + 1)
            return RequestStats(
                waiting=len(self._waiting),
                running=len(self._running),
                queue_delay_s=max(0.0, at_s - oldest.arrived_s) if oldest else 0.0,
                tokens_per_s=self._tokens.read(now_s) / span_s,
                arrivals_per_s=self._arrivals.read(now_s) / span_s,
                steps_by_tokens=tuple(self._steps[size] for size in sizes),
                **figures,
            )

    def _count_pending(self) -> None:
        while self._pending:
            self._count(*self._pending.popleft())

    def _count(self, tokens: Mapping[str, int], at_s: float) -> None:
        at_s = self._clock(at_s)
        gaps: Counter[float] = Counter()
        total = 0
        for request, count in tokens.items():
            if count <= 0:
                continue
            timing = self._running.get(request)
            if timing is None:
                if request not in self._waiting:
                    continue
                timing = self._schedule(request, at_s)
            if timing.first_s is None:
                timing.first_s = at_s
                self._windows["ttft_s"].add(at_s - timing.arrived_s, self._now_s)
            else:
                gaps[at_s - timing.last_s] += 1
            timing.last_s = max(at_s, timing.last_s)
            timing.tokens += count
            total += count
        for gap, times in gaps.items():  # few: requests of one batch have had their tokens together before
            self._windows["itl_s"].add(gap, self._now_s, times)
        if total:
            self._totals["generated_tokens"] += total
            self._tokens.add(total, self._now_s)

    def _schedule(self, request: str, at_s: float) -> _Request:
        timing = self._running[request] = self._waiting.pop(request)
        self._windows["queued_s"].add(at_s - timing.arrived_s, self._now_s)
        return timing

    def _clock(self, at_s: float | None) -> float:
        """Return the time that is meant; windows go by the latest one ever told."""
        if at_s is None or not math.isfinite(at_s):
            at_s = clock.now()
        self._now_s = max(self._now_s, at_s)
        if self._began_s is None:
            self._began_s = at_s
        return at_s
