"""Requests as they come in simulated time: from traces, or drawn one after another."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elastic.bench.traces.generator import ArrivalProcess, LengthDistribution, thinned
from elastic.bench.traces.trace import Trace
from elastic.engines.base import Request
from elastic.errors import ConfigError
from elastic.sim.core.clock import random_stream
from elastic.sim.core.executor import STOP, TOKEN

MOST_TOKENS = 10_000_000
"""Of one request, and its answer."""
_DIGIT_BITS = 8
_DIGITS = 4


class RequestArrival(NamedTuple):
    """A request to come."""

    at_s: float
    prompt: int
    """Tokens."""
    answer: int
    """Tokens that it gets."""
    most: int
    """Tokens that it asks for, at least `answer`."""
    shared: int
    """Of its prompt, the first tokens, which all of its source have."""
    source: str


@dataclass(frozen=True)
class RequestSource:
    """One kind of requests."""

    name: str
    arrivals: ArrivalProcess | None
    """None: those of the trace."""
    lengths: LengthDistribution | None
    trace: Trace | None = None
    ask: float = 1.0
    """What requests ask for, of the tokens that they get."""
    most_tokens: int | None = None
    """Prompt and answer together have no more: a longer one is shortened."""
    shared_prefix: int = 0
    model: str = ""
    """To which they are."""

    def jobs(self, seed: int, until_s: float) -> Iterator[RequestArrival]:
        """Yield the requests that come before then, in order."""
        for at_s, prompt, answer in self._rows(seed, until_s):
            if self.most_tokens is not None and prompt + answer > self.most_tokens:
                answer = min(self.most_tokens - 1, max(1, answer * self.most_tokens // (prompt + answer)))
                prompt = self.most_tokens - answer
            most = max(answer, round(self.ask * answer))
            if prompt + most > MOST_TOKENS:
                raise ConfigError(
                    f"requests {self.name!r}: one has {prompt:,} tokens and asks for {most:,}; {MOST_TOKENS:,} are the "
                    "most: give shorter lengths, or most_tokens"
                )
            yield RequestArrival(at_s, prompt, answer, most, min(self.shared_prefix, prompt - 1), self.name)

    def _rows(self, seed: int, until_s: float) -> Iterator[tuple[float, int, int]]:
        if self.arrivals is None or self.lengths is None:
            assert self.trace is not None
            rows = ((r.arrival_s, r.prompt_tokens, r.output_tokens) for r in self.trace.requests)
            yield from itertools.takewhile(lambda row: row[0] < until_s, rows)
            return
        lengths = random_stream(seed, f"lengths {self.name}")
        for at_s in self.arrivals.times(random_stream(seed, f"arrivals {self.name}"), until_s):
            yield (at_s, *self.lengths.draw(lengths))


@dataclass(frozen=True)
class Rates:
    """Poisson arrivals at a rate that goes in straight lines from one value to the next, and begins anew."""

    rates: tuple[float, ...]
    """Requests a second, `every_s` apart."""
    every_s: float

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) < 0 or not 0 < max(self.rates) < 1e6 or not self.every_s > 0:
            raise ConfigError(
                f"rates {self.rates} every {self.every_s} s: give rates of 0 or more, one above 0, and seconds above 0"
            )

    def rate(self, at_s: float) -> float:
        """Return the rate at a time."""
        number, share = divmod(at_s / self.every_s, 1.0)
        first = int(number) % len(self.rates)
        before, after = self.rates[first], self.rates[(first + 1) % len(self.rates)]
        return before + share * (after - before)

    def times(self, rng: random.Random, until_s: float) -> Iterator[float]:
        """Yield Poisson arrivals at the rate of each moment."""
        return thinned(rng, max(self.rates), self.rate, until_s)


@dataclass(frozen=True)
class Bursts:
    """Poisson arrivals at a rate, and at others within windows."""

    rate: float
    windows: tuple[tuple[float, float, float], ...]
    """(from, until, requests a second), in order, one not within another."""

    def __post_init__(self) -> None:
        if not self.windows:
            raise ConfigError("bursts without windows are none; give [[requests.bursts]], or arrivals = 'poisson'")
        edges = [edge for begin, end, _ in self.windows for edge in (begin, end)]
        if self.rate < 0 or edges != sorted(edges) or any(rate < 0 for _, _, rate in self.windows):
            raise ConfigError(f"bursts {self.windows}: give (from, until, rate) in order, and rates of 0 or more")
        if not max([self.rate, *(rate for _, _, rate in self.windows)]) > 0:
            raise ConfigError("bursts without a rate above 0 bring no request")

    def times(self, rng: random.Random, until_s: float) -> Iterator[float]:
        """Yield Poisson arrivals at the rate of each moment."""
        starts = [begin for begin, _, _ in self.windows]

        def rate(at_s: float) -> float:
            number = bisect_right(starts, at_s) - 1
            if number >= 0 and at_s < self.windows[number][1]:
                return self.windows[number][2]
            return self.rate

        return thinned(rng, max([self.rate, *(rate for _, _, rate in self.windows)]), rate, until_s)


def request_of(job: RequestArrival, number: int) -> Request:
    """Return the request of a job. No two prompts are alike behind what a source shares."""
    digits = tuple((number >> (_DIGIT_BITS * digit)) & 0xFF for digit in range(_DIGITS))
    own = job.prompt - job.shared
    prompt = (*itertools.repeat(TOKEN, job.shared), *digits[:own], *itertools.repeat(TOKEN, own - _DIGITS))
    return Request(prompt, job.most, stop_tokens=(STOP,), ignore_eos=True, id=f"{job.source}-{number}")
