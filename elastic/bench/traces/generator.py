"""Generated traces: seeded arrival processes and lengths."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from elastic.bench.traces.trace import MOST_REQUESTS, Trace, TraceRequest, require_positive
from elastic.errors import ConfigError

HIGHEST_RATE = 1e6
"""The highest rate, in requests per second."""
LEAST_BURSTINESS = 1e-3


class ArrivalProcess(Protocol):
    """An arrival process."""

    def times(self, rng: random.Random, until_s: float) -> Iterator[float]:
        """Yield arrival times in seconds, ascending, of those before `until_s`."""


class LengthDistribution(Protocol):
    """A distribution of lengths."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Draw the tokens of a prompt and of its output, each at least 1."""


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals at a rate."""

    rate: float
    """Requests per second."""

    def __post_init__(self) -> None:
        _require_rate("the rate of Poisson arrivals", self.rate)

    def times(self, rng: random.Random, until_s: float) -> Iterator[float]:
        """Yield sums of exponential gaps."""
        return _before(until_s, (rng.expovariate(self.rate) for _ in itertools.count()))


@dataclass(frozen=True)
class Gamma:
    """Gaps from a gamma distribution of shape `burstiness`, as in `vllm bench serve`."""

    rate: float
    """Requests per second."""
    burstiness: float = 1.0
    """1: Poisson; below 1: burstier; above 1: more even. The gaps' coefficient of variation is 1 / sqrt(burstiness)."""

    def __post_init__(self) -> None:
        _require_rate("the rate of gamma arrivals", self.rate)
        require_positive(f"burstiness, {self.burstiness},", self.burstiness)
        if self.burstiness < LEAST_BURSTINESS:
            raise ConfigError(f"burstiness {self.burstiness} must be at least {LEAST_BURSTINESS:g}")

    def times(self, rng: random.Random, until_s: float) -> Iterator[float]:
        """Yield sums of gamma-distributed gaps."""
        scale = 1 / (self.rate * self.burstiness)
        return _before(until_s, (rng.gammavariate(self.burstiness, scale) for _ in itertools.count()))


@dataclass(frozen=True)
class OnOff:
    """Bursts of `on_s` seconds at one rate, with `off_s` at another between them; Poisson in each. It begins on."""

    on_rate: float
    """Requests per second in a burst."""
    off_rate: float
    """Requests per second between bursts; may be 0."""
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _require_rate("on_rate of on/off arrivals", self.on_rate)
        for name in ("on_s", "off_s"):
            value = getattr(self, name)
            require_positive(f"{name} of on/off arrivals, {value},", value)
        if self.off_rate:
            _require_rate("off_rate of on/off arrivals", self.off_rate)

    def times(self, rng: random.Random, until_s: float) -> Iterator[float]:
        """Yield Poisson arrivals at the rate of each moment."""
        cycle_s, highest = self.on_s + self.off_s, max(self.on_rate, self.off_rate)
        return thinned(
            rng, highest, lambda at_s: self.on_rate if at_s % cycle_s < self.on_s else self.off_rate, until_s
        )


@dataclass(frozen=True)
class Ramp:
    """A rate that changes linearly from one to another over `over_s` seconds, and stays there; Poisson."""

    first_rate: float
    last_rate: float
    over_s: float

    def __post_init__(self) -> None:
        if not (min(self.first_rate, self.last_rate) >= 0 and max(self.first_rate, self.last_rate) > 0):
            raise ConfigError(f"rates of a ramp, {self.first_rate} and {self.last_rate}: at least 0, and one above")
        if self.last_rate == 0:
            raise ConfigError("a ramp cannot end at rate 0: requests would end too")
        _require_rate("the highest rate of a ramp", max(self.first_rate, self.last_rate))
        require_positive(f"the length of a ramp, {self.over_s},", self.over_s)

    def times(self, rng: random.Random, until_s: float) -> Iterator[float]:
        """Yield Poisson arrivals at the rate of each moment."""
        change, highest = self.last_rate - self.first_rate, max(self.first_rate, self.last_rate)
        return thinned(rng, highest, lambda at_s: self.first_rate + change * min(1.0, at_s / self.over_s), until_s)


@dataclass(frozen=True)
class Fixed:
    """The same lengths for all requests."""

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return the lengths."""
        return self.prompt_tokens, self.output_tokens


@dataclass(frozen=True)
class Lognormal:
    """Prompt and output drawn separately, each lognormal: a median, and the sigma of the logarithm."""

    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float

    def __post_init__(self) -> None:
        for name in ("prompt_median", "output_median"):
            value = getattr(self, name)
            require_positive(f"{name} of lognormal lengths, {value},", value)
        if not (0 <= self.prompt_sigma < 10 and 0 <= self.output_sigma < 10):
            raise ConfigError(f"sigmas of lognormal lengths, {self.prompt_sigma}, {self.output_sigma}: from 0 to 10")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Draw both lengths, each at least 1."""
        prompt = rng.lognormvariate(math.log(self.prompt_median), self.prompt_sigma)
        output = rng.lognormvariate(math.log(self.output_median), self.output_sigma)
        return max(1, round(prompt)), max(1, round(output))


@dataclass(frozen=True)
class LikeTrace:
    """Prompt and output of the same request of a trace, drawn with replacement."""

    trace: Trace

    def __post_init__(self) -> None:
        if not self.trace.requests:
            raise ConfigError(f"lengths cannot be drawn from {self.trace.source}: it has no requests")

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Draw a request and return its lengths."""
        request = rng.choice(self.trace.requests)
        return request.prompt_tokens, request.output_tokens

    def __repr__(self) -> str:
        return f"LikeTrace({self.trace.source})"


def generate(arrivals: ArrivalProcess, lengths: LengthDistribution, duration_s: float, *, seed: int = 0) -> Trace:
    """Generate the requests of an arrival process in [0, `duration_s`). The same seed gives the same trace.

    Arrivals and lengths have generators of their own, so that other lengths leave the arrivals as they are. Raises
    `ConfigError` for a duration that no request arrives in.
    """
    require_positive(f"the duration of a generated trace, {duration_s},", duration_s)
    of_arrivals, of_lengths = random.Random(f"arrivals {seed}"), random.Random(f"lengths {seed}")
    times = list(itertools.islice(arrivals.times(of_arrivals, duration_s), MOST_REQUESTS))
    if len(times) == MOST_REQUESTS:
        raise ConfigError(f"{arrivals} brings {MOST_REQUESTS:,} requests and more within {duration_s:g} s; take less")
    requests = tuple(TraceRequest(t, *lengths.draw(of_lengths)) for t in times)
    if not requests:
        raise ConfigError(f"{arrivals} brings no request within {duration_s:g} s with seed {seed}; take longer")
    return Trace(requests, f"{arrivals} {lengths}", window=(0.0, duration_s), seed=seed)


def thinned(rng: random.Random, highest: float, rate: Callable[[float], float], until_s: float) -> Iterator[float]:
    """Yield Poisson arrivals at a rate that changes with time: those at the highest rate, each kept with its share."""
    return (t for t in Poisson(highest).times(rng, until_s) if rng.random() * highest < rate(t))


def _before(until_s: float, gaps: Iterator[float]) -> Iterator[float]:
    """Yield the sums of gaps that are before then."""
    return itertools.takewhile(lambda at_s: at_s < until_s, itertools.accumulate(gaps))


def _require_rate(name: str, value: float) -> None:
    """Raise `ConfigError` for a rate that is not positive or too high."""
    require_positive(f"{name}, {value},", value)
    if value > HIGHEST_RATE:
        raise ConfigError(f"{name}, {value:g}, must be at most {HIGHEST_RATE:,.0f} requests per second")
