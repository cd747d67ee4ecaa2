"""Traces that are made up: arrival processes and lengths, seeded."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.errors import ConfigError

HIGHEST_RATE = 1e6
"""Requests per second."""
MOST_REQUESTS = 10_000_000
LEAST_BURSTINESS = 1e-3


class ArrivalProcess(Protocol):
    """An arrival process."""

    def times(self, rng: random.Random) -> Iterator[float]:
        """Arrival times in seconds, ascending, without end."""
        ...


class Lengths(Protocol):
    """How long requests are."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of a prompt and of its output, each at least 1."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Requests that know nothing of each other."""

    rate: float
    """Requests per second."""

    def __post_init__(self) -> None:
        _require_rate("the rate of Poisson arrivals", self.rate)

    def times(self, rng: random.Random) -> Iterator[float]:
        return itertools.accumulate(rng.expovariate(self.rate) for _ in itertools.count())


@dataclass(frozen=True)
class Gamma:
    """Gaps from a gamma distribution of shape `burstiness`, as in `vllm bench serve`."""

    rate: float
    """Requests per second."""
    burstiness: float = 1.0
    """1: Poisson; below 1: burstier; above 1: more even. The gaps' coefficient of variation is 1 / sqrt(burstiness)."""

    def __post_init__(self) -> None:
        _require_rate("the rate of gamma arrivals", self.rate)
        _require_above_zero("burstiness", self.burstiness)
        if self.burstiness < LEAST_BURSTINESS:
            raise ConfigError(f"burstiness {self.burstiness} must be at least {LEAST_BURSTINESS:g}")

    def times(self, rng: random.Random) -> Iterator[float]:
        scale = 1 / (self.rate * self.burstiness)
        return itertools.accumulate(rng.gammavariate(self.burstiness, scale) for _ in itertools.count())


@dataclass(frozen=True)
class OnOff:
    """Bursts: `on_s` seconds at one rate, `off_s` at another, again and again; Poisson inside each. It begins on."""

    on_rate: float
    """Requests per second in a burst."""
    off_rate: float
    """Requests per second between bursts; may be 0."""
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _require_rate("on_rate of on/off arrivals", self.on_rate)
        for name in ("on_s", "off_s"):
            _require_above_zero(f"{name} of on/off arrivals", getattr(self, name))
        if self.off_rate:
            _require_rate("off_rate of on/off arrivals", self.off_rate)

    def times(self, rng: random.Random) -> Iterator[float]:
        def rate(at_s: float) -> float:
            return self.on_rate if at_s % (self.on_s + self.off_s) < self.on_s else self.off_rate

        highest = max(self.on_rate, self.off_rate)
        return (t for t in Poisson(highest).times(rng) if rng.random() * highest < rate(t))


@dataclass(frozen=True)
class Ramp:
    """A rate that goes in a straight line from one to another in `over_s` seconds, and stays there; Poisson."""

    first_rate: float
    last_rate: float
    over_s: float

    def __post_init__(self) -> None:
        if not (min(self.first_rate, self.last_rate) >= 0 and max(self.first_rate, self.last_rate) > 0):
            raise ConfigError(f"rates of a ramp, {self.first_rate} and {self.last_rate}: at least 0, and one above")
        if self.last_rate == 0:
            raise ConfigError("a ramp cannot end at rate 0: requests would end too")
        _require_rate("the highest rate of a ramp", max(self.first_rate, self.last_rate))
        _require_above_zero("the length of a ramp", self.over_s)

    def times(self, rng: random.Random) -> Iterator[float]:
        def rate(at_s: float) -> float:
            return self.first_rate + (self.last_rate - self.first_rate) * min(1.0, at_s / self.over_s)

        highest = max(self.first_rate, self.last_rate)
        return (t for t in Poisson(highest).times(rng) if rng.random() * highest < rate(t))


@dataclass(frozen=True)
class Fixed:
    """All requests alike."""

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        _require_token("prompt_tokens", self.prompt_tokens)
        _require_token("output_tokens", self.output_tokens)

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self.prompt_tokens, self.output_tokens


@dataclass(frozen=True)
class Lognormal:
    """Prompt and output drawn apart, each lognormal: a median, and the sigma of the logarithm."""

    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float

    def __post_init__(self) -> None:
        for name in ("prompt_median", "output_median"):
            _require_above_zero(f"{name} of lognormal lengths", getattr(self, name))
        if not (0 <= self.prompt_sigma < 10 and 0 <= self.output_sigma < 10):
            raise ConfigError(f"sigmas of lognormal lengths, {self.prompt_sigma}, {self.output_sigma}: from 0 to 10")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        prompt = rng.lognormvariate(math.log(self.prompt_median), self.prompt_sigma)
        output = rng.lognormvariate(math.log(self.output_median), self.output_sigma)
        return max(1, round(prompt)), max(1, round(output))


@dataclass(frozen=True)
class LikeTrace:
    """Prompt and output together from a request of a trace, drawn with replacement."""

    trace: Trace

    def __post_init__(self) -> None:
        if not self.trace.requests:
            raise ConfigError(f"lengths cannot be drawn from {self.trace.source}: it has no requests")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        request = rng.choice(self.trace.requests)
        return request.prompt_tokens, request.output_tokens

    def __repr__(self) -> str:
        return f"LikeTrace({self.trace.source})"


def generate(arrivals: ArrivalProcess, lengths: Lengths, duration_s: float, *, seed: int = 0) -> Trace:
    """The requests of an arrival process in [0, `duration_s`). The same seed gives the same trace.

    Arrivals and lengths have generators of their own, so that other lengths leave the arrivals as they are. Raises
    `ConfigError` for a duration that no request arrives in.
    """
    _require_above_zero("the duration of a generated trace", duration_s)
    when, how_long = random.Random(f"arrivals {seed}"), random.Random(f"lengths {seed}")
    times = list(itertools.islice(itertools.takewhile(lambda t: t < duration_s, arrivals.times(when)), MOST_REQUESTS))
    if len(times) == MOST_REQUESTS:
        raise ConfigError(f"{arrivals} brings {MOST_REQUESTS:,} requests and more within {duration_s:g} s; take less")
    requests = tuple(TraceRequest(t, *lengths.draw(how_long)) for t in times)
    if not requests:
        raise ConfigError(f"{arrivals} brings no request within {duration_s:g} s with seed {seed}; take longer")
    return Trace(requests, f"{arrivals} {lengths}", window=(0.0, duration_s), seed=seed)


def _require_above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}, {value}, must be above 0 and finite")


def _require_rate(name: str, value: float) -> None:
    _require_above_zero(name, value)
    if value > HIGHEST_RATE:
        raise ConfigError(f"{name}, {value:g}, must be at most {HIGHEST_RATE:,.0f} requests per second")


def _require_token(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} {value} must be at least 1")
