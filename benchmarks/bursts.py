"""Arrivals that need more KV cache for a while than two instances have: drawn, or those of a recorded trace.

Both are set by what a system serves (`Rates`), so that they are alike on any machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from serving import prompt

from elastic.bench.traces.readers import read_trace
from elastic.bench.traces.trace import Trace
from elastic.engines.base import Request
from elastic.errors import ConfigError

CALM = 0.575
"""Need over capacity in a calm, and in the mean of a recorded trace."""
BURST, BURST_RATE = 2.0, 2.0
"""Requests of a burst, of those that there is room for; and how many come a second, of the most that `wait` serves."""
BEFORE, AFTER, LOW = 0.4, 0.6, 2.0
"""The calms before and after a burst, and one without, in times that a request lasts."""
LONGEST = 560
"""Tokens of a prompt and its answer."""
MOST_COPIES = 8
"""Of each request of a recorded trace, in the mean."""
TIMES, SIXTHS = 4.0, 6
"""The length of a recorded trace, in times that a request lasts, and in how many parts bursts are looked for."""


@dataclass(frozen=True)
class Arrival:
    """A request of the trace."""

    at_s: float
    part: str
    request: Request


def drawn(choose: random.Random) -> Request:
    """Draw a prompt of 24 to 384 tokens and an answer of 16 to 176, most of them short."""
    tokens = prompt(min(384, int(choose.lognormvariate(4.5, 0.6)) + 24), choose)
    return Request(tokens, min(176, int(choose.lognormvariate(4.3, 0.4)) + 16), ignore_eos=True)


def need(request: Request) -> int:
    return len(request.prompt) + request.max_tokens


@dataclass(frozen=True)
class Rates:
    """What `wait` serves on this machine."""

    capacity: int
    """Tokens of KV cache at both instances."""
    fit: float
    """Requests that they have room for."""
    calm: float
    """Requests a second while they need `CALM` of the capacity."""
    most: float
    compute: float
    """The same without want of memory."""
    lasts_s: float
    """A request, in the calm."""
    ttft_s: float
    """P50, in the calm."""

    def trace(self, seed: int, *, burst: bool = True, share: float = 1.0) -> list[Arrival]:
        """Draw arrivals, of a share of the times; `begun` are there from the start, with a rest of their answers."""
        choose = random.Random(seed)
        found, begin = self.begun(choose), 0.0
        burst_s = BURST * self.fit / (BURST_RATE * self.most)
        around = {"calm": BEFORE * self.lasts_s, "burst": burst_s, "after": AFTER * self.lasts_s}
        lengths = around if burst else {"calm": LOW * self.lasts_s}
        for part, whole_s in lengths.items():
            length_s = share * whole_s
            found += drawn_in(choose, part, begin, length_s, self.calm if part != "burst" else BURST_RATE * self.most)
            begin += length_s
        return found

    def work(self, arrival: Arrival) -> float:
        """Return to how many drawn requests one that comes is alike, of a recorded trace by its tokens."""
        if arrival.part == "trace":
            return need(arrival.request) * self.fit / self.capacity
        return float(arrival.part != "begun")

    def begun(self, choose: random.Random) -> list[Arrival]:
        """Draw as many requests as live in a calm, with a rest of their answers."""
        found = []
        for _ in range(round(CALM * self.fit)):
            request = drawn(choose)
            left = replace(request, max_tokens=1 + int(choose.random() * request.max_tokens))
            found.append(Arrival(0.0, "begun", left))
        return found


def drawn_in(choose: random.Random, part: str, begin_s: float, length_s: float, rate: float) -> list[Arrival]:
    """Draw a Poisson process that brings as many requests as it does on average."""
    times = sorted(begin_s + choose.random() * length_s for _ in range(round(rate * length_s)))
    return [Arrival(at_s, part, drawn(choose)) for at_s in times]


@dataclass(frozen=True)
class RecordedTrace:
    """A file of arrivals and lengths, scaled so that its mean need is `CALM` of what two instances have.

    Lengths are scaled to the mean need of drawn requests, at most `LONGEST`. Of the file a stretch is taken in which
    requests come as often as it takes when some are left out, by chance, or when copies of some come soon behind them;
    so bursts are as long, and as steep, as they were recorded. A request needs its memory while its answer is
    generated: whoever has short answers comes more often for the same mean need than drawn requests do. The stretch
    with the most requests at its densest, over its mean, is measured; the next one apart from it is for tuning.
    """

    path: Path

    def trace(self, rates: Rates, seed: int, *, tuning: bool = False, share: float = 1.0) -> list[Arrival]:
        """Return arrivals, behind those that have begun; `seed` chooses which are left out, and the prompts."""
        choose = random.Random(seed)
        length_s = share * TIMES * rates.lasts_s
        whole = read_trace(self.path)
        starts = burstiest(whole, length_s)
        if len(starts) < 2:
            raise ConfigError(f"{self.path} has no two stretches of {length_s:.0f} s; take another")
        start_s = starts[tuning]
        cut = with_mean_need(whole.cut(start_s, start_s + length_s), rates.capacity / rates.fit)
        held = sum((r.prompt_tokens + r.output_tokens) * r.output_tokens for r in cut.requests)
        scale = rates.calm * length_s * held_when_drawn() / held
        if scale > MOST_COPIES:
            raise ConfigError(f"{self.path} has {scale:.0f} times too few requests in {length_s:.0f} s; take another")
        scaled = cut.with_rate(scale, "thin" if scale <= 1 else "upscale", seed=seed)
        requests = ((r.arrival_s, prompt(r.prompt_tokens, choose), r.output_tokens) for r in scaled.requests)
        found = [Arrival(at_s, "trace", Request(tokens, most, ignore_eos=True)) for at_s, tokens, most in requests]
        return rates.begun(choose) + found


@cache
def held_when_drawn(count: int = 500) -> float:
    """Return the mean of what a drawn request needs times how many tokens it generates: how long it has that."""
    choose = random.Random(0)
    return sum(need(request) * request.max_tokens for request in (drawn(choose) for _ in range(count))) / count


def with_mean_need(trace: Trace, tokens: float) -> Trace:
    """Return a trace whose requests need so many tokens in the mean, none more than `LONGEST`."""
    scale = 1.0
    for _ in range(30):
        found = trace.with_tokens(scale, most=LONGEST)
        mean = sum(r.prompt_tokens + r.output_tokens for r in found.requests) / len(found.requests)
        scale *= tokens / mean
    return found


def burstiest(trace: Trace, length_s: float) -> list[float]:
    """Return where stretches of this length begin, those first whose densest sixth has the most of their requests.

    None of them overlap; one with fewer than half as many requests as the mean is none.
    """
    counts: dict[int, list[int]] = {}
    for request in trace.requests:
        number, within_s = divmod(request.arrival_s, length_s)
        counts.setdefault(int(number), [0] * SIXTHS)[int(SIXTHS * within_s / length_s)] += 1
    full = {number: parts for number, parts in counts.items() if (number + 1) * length_s <= trace.duration_s}
    least = 0.5 * sum(map(sum, full.values())) / max(1, len(full))
    dense = {number: max(parts) / sum(parts) for number, parts in full.items() if sum(parts) >= least}
    return [number * length_s for number in sorted(dense, key=lambda number: -dense[number])]
