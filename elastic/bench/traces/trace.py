"""Traces: arrival times and lengths of requests, cut and scaled to a machine."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from elastic.errors import ConfigError

RateMethod = Literal["thin", "upscale", "stretch"]
RATE_METHODS: tuple[RateMethod, ...] = ("thin", "upscale", "stretch")
NEAREST = 16
"""Requests of which one gives a copy its lengths."""
MOST_REQUESTS = 10_000_000
HIGHEST_TOKEN_SCALE = 1e6


@dataclass(frozen=True)
class TraceRequest:
    """One request: its arrival, in seconds since the trace began, its prompt and its output in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Scaling:
    """The changes to a trace after it was read."""

    kept: float = 1.0
    """The share of the requests that thinning kept; above 1: how many upscaling made of each, in the mean."""
    pace: float = 1.0
    """Seconds of the source that go by in one."""
    tokens: float = 1.0
    """Prompt and output lengths, relative to the source's."""
    most_tokens: int | None = None
    """The most that prompt and output have together."""
    clipped: int = 0
    """The number of requests that were longer, and were shortened."""
    seed: int = 0
    """The seed of the choices that thinning or upscaling made."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival, and their source."""

    requests: tuple[TraceRequest, ...]
    source: str
    """The name of a file, or the words of a generator."""
    sha256: str | None = None
    """The digest of the whole file; None for a generated trace."""
    window: tuple[float, float] | None = None
    """[start, stop) in seconds of the source; None: all of it."""
    dropped: int = 0
    """The number of rows of the file without prompt or output tokens: requests that had failed."""
    seed: int = 0
    """The seed of the reader's or the generator's choices."""
    scaling: Scaling = Scaling()
    offset_s: float = 0.0
    """Seconds of the source before the first request, which were left out."""

    @property
    def duration_s(self) -> float:
        """The seconds in which requests are offered: the window as replayed; without one, until the last arrival."""
        if self.window is None:
            return self.requests[-1].arrival_s if self.requests else 0.0
        return (self.window[1] - self.window[0]) / self.scaling.pace

    def cut(self, start_s: float, stop_s: float) -> Trace:
        """Keep the requests that arrive in [start, stop), with `start` as their new zero. Raises `ConfigError`."""
        if self.window is not None or self.scaling != Scaling():
            raise ConfigError("a trace is cut once, before it is scaled")
        if not 0 <= start_s < stop_s:
            raise ConfigError(f"window [{start_s:g}, {stop_s:g}) is empty or begins before the trace does")
        inside = tuple(r for r in self.requests if start_s <= r.arrival_s < stop_s)
        if not inside:
            last = self.requests[-1].arrival_s if self.requests else 0.0
            raise ConfigError(
                f"no request of {self.source} arrives in [{start_s:g}, {stop_s:g}); the last at {last:g} s"
            )
        moved = tuple(replace(r, arrival_s=r.arrival_s - start_s) for r in inside)
        return replace(self, requests=moved, window=(start_s, stop_s))

    def from_first_arrival(self) -> Trace:
        """Move the first request to zero; a trace with a window begins where that does."""
        first_s = self.requests[0].arrival_s if self.requests and self.window is None else 0.0
        if first_s == 0:
            return self
        moved = tuple(replace(r, arrival_s=r.arrival_s - first_s) for r in self.requests)
        return replace(self, requests=moved, offset_s=self.offset_s + first_s * self.scaling.pace)

    def with_rate(self, scale: float, method: RateMethod = "thin", *, seed: int = 0) -> Trace:
        """Scale the requests per second.

        `thin` keeps `scale` of the requests, a seeded choice without replacement, at their times: bursts stay as steep
        as they were. `upscale` adds copies up to `scale` times as many, each at a time before the next request: bursts
        and calms stay where they were, as long as they were. (TraceUpscaler, EuroSys 2024) `stretch` keeps all and
        divides the times by `scale`: everything gets slower or faster. It may follow one of the others, or come first.
        """
        require_positive(f"rate scale {scale}", scale)
        if method not in RATE_METHODS:
            raise ConfigError(f"rate method {method!r} is not known; choose one of {RATE_METHODS}")
        if method == "stretch":
            requests = tuple(replace(r, arrival_s=r.arrival_s / scale) for r in self.requests)
            return replace(self, requests=requests, scaling=replace(self.scaling, pace=self.scaling.pace * scale))
        if self.scaling.kept != 1:
            raise ConfigError("this trace was thinned or upscaled already")
        scaling = replace(self.scaling, kept=scale, seed=seed)
        if method == "thin":
            return replace(self, requests=_thin(self.requests, scale, seed), scaling=scaling)
        return replace(self, requests=_upscale(self.requests, scale, seed, self.duration_s), scaling=scaling)

    def with_tokens(self, scale: float = 1.0, *, most: int | None = None) -> Trace:
        """Scale the tokens of prompts and outputs, to at least one of each.

        With `most`, a request that has more than that in prompt and output together is shortened in both, in
        proportion, so that it fits a context.
        """
        require_positive(f"token scale {scale}", scale)
        if scale > HIGHEST_TOKEN_SCALE:
            raise ConfigError(f"token scale {scale:g} must be at most {HIGHEST_TOKEN_SCALE:,.0f}")
        if most is not None and most < 2:
            raise ConfigError(f"most tokens {most} leaves no room for a prompt and an output; at least 2 are needed")
        scaled = [
            TraceRequest(r.arrival_s, max(1, round(r.prompt_tokens * scale)), max(1, round(r.output_tokens * scale)))
            for r in self.requests
        ]
        fitted = tuple(_fit(r, most) for r in scaled)
        clipped = sum(a != b for a, b in zip(scaled, fitted, strict=True))
        before = self.scaling
        changed = replace(before, tokens=before.tokens * scale, most_tokens=most, clipped=before.clipped + clipped)
        return replace(self, requests=fitted, scaling=changed)

    def densest(self, length_s: float) -> tuple[float, float]:
        """Return the window of this length, beginning at an arrival, with the most requests; the first of several."""
        require_positive(f"window length {length_s}", length_s)
        times = [r.arrival_s for r in self.requests]
        best, most, last = 0.0, 0, 0
        for first, start in enumerate(times):
            while last < len(times) and times[last] < start + length_s:
                last += 1
            if last - first > most:
                best, most = start, last - first
        return best, best + length_s

    def described(self) -> dict[str, Any]:
        """Describe the trace for result files, as JSON."""
        return {
            "file": self.source,
            "sha256": self.sha256,
            "window": list(self.window) if self.window else None,
            "offset_s": self.offset_s,
            "rate_scale": self.scaling.kept * self.scaling.pace,
            "kept": self.scaling.kept,
            "pace": self.scaling.pace,
            "token_scale": self.scaling.tokens,
            "most_tokens": self.scaling.most_tokens,
            "clipped_requests": self.scaling.clipped,
            "dropped_rows": self.dropped,
            "seed": self.seed,
            "rate_seed": self.scaling.seed,
            "requests": len(self.requests),
            "duration_s": self.duration_s,
            "workload_sha256": self.digest(),
        }

    def digest(self) -> str:
        """Return the SHA-256 of arrivals and lengths: two runs with the same one were offered the same."""
        rows = "\n".join(f"{r.arrival_s!r} {r.prompt_tokens} {r.output_tokens}" for r in self.requests)
        return hashlib.sha256(rows.encode()).hexdigest()


def require_positive(subject: str, value: float) -> None:
    """Raise `ConfigError` about a subject, such as "scale 0", whose value is not above zero and finite."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"{subject} must be above 0 and finite")


def _thin(requests: tuple[TraceRequest, ...], scale: float, seed: int) -> tuple[TraceRequest, ...]:
    if scale > 1:
        raise ConfigError(
            f"rate scale {scale:g}: thinning only takes requests away; use the method 'upscale' or 'stretch' above 1"
        )
    kept = max(1, round(len(requests) * scale)) if requests else 0
    chosen = sorted(random.Random(seed).sample(range(len(requests)), kept))
    return tuple(requests[i] for i in chosen)


def _upscale(
    requests: tuple[TraceRequest, ...], scale: float, seed: int, duration_s: float
) -> tuple[TraceRequest, ...]:
    """Add copies in the gaps behind requests, as many behind one as another but for a seeded choice."""
    if scale < 1:
        raise ConfigError(f"rate scale {scale:g}: upscaling only adds requests; use the method 'thin' below 1")
    choose, count = random.Random(seed), len(requests)
    if count * scale > MOST_REQUESTS:
        raise ConfigError(f"rate scale {scale:g} makes {count * scale:.3g} requests; at most {MOST_REQUESTS:,} can be")
    added = round(count * scale) - count
    each, rest = divmod(added, max(1, count))
    more = set(choose.sample(range(count), rest))
    upscaled = list(requests)
    for i, request in enumerate(requests):
        until_s = requests[i + 1].arrival_s if i + 1 < count else duration_s
        near = requests[max(0, i - NEAREST // 2) : i + NEAREST // 2 + 1]
        for _ in range(each + (i in more)):
            at_s = request.arrival_s + choose.random() * (until_s - request.arrival_s)
            upscaled.append(replace(choose.choice(near), arrival_s=at_s))
    return tuple(sorted(upscaled, key=lambda request: request.arrival_s))


def _fit(request: TraceRequest, most: int | None) -> TraceRequest:
    total = request.prompt_tokens + request.output_tokens
    if most is None or total <= most:
        return request
    output = min(most - 1, max(1, request.output_tokens * most // total))
    return replace(request, prompt_tokens=most - output, output_tokens=output)
