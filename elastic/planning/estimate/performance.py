"""Latency and throughput of an instance, from the seconds of its batches. (iServe, section 5.3)

Where equation 1 has latency = TTFT + tokens · TPOT, the first token's time is in TTFT alone here: n tokens take
TTFT + (n - 1) · TPOT. TPOT depends on the batch and on the context, and on prompts that are computed in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elastic.errors import ConfigError, is_integer, is_number
from elastic.planning.estimate.roofline import BatchCost
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import Chunk

NO_LINK = LinearLatency(0.0, 0.0)


@dataclass(frozen=True)
class Handovers:
    """Seconds of a rank's processor that the engine takes, besides computing and what a link takes."""

    stage_s: float = 0.0
    """For each batch of a stage, of several: to take it, and to hand it on."""
    exchange_s: float = 0.0
    """For each exchange of ranks that share a layer."""
    step_s: float = 0.0
    """For each batch of an instance: to choose it, and to send its tokens to the fleet."""


NO_HANDOVERS = Handovers()


@dataclass(frozen=True)
class Load:
    """Requests that are all alike."""

    prompt: int
    """Tokens."""
    new: int
    """Tokens generated."""
    rate: float = 0.0
    """Requests a second; 0: one request at a time."""

    def __post_init__(self) -> None:
        whole = all(is_integer(tokens) and tokens >= 1 for tokens in (self.prompt, self.new))
        if not whole or not is_number(self.rate) or self.rate < 0:
            raise ConfigError(f"{self} cannot be; give prompts and outputs of 1 token or more, and a rate of 0 or more")

    @property
    def tokens(self) -> int:
        """What a request has in the cache when it ends, at most."""
        return self.prompt + self.new

    def shared(self, replicas: int) -> Load:
        """Return what each of so many replicas gets of it."""
        return replace(self, rate=self.rate / replicas)

    def decoding(self, requests: int) -> list[Chunk]:
        """Return a step of so many requests, each in the middle of its output."""
        return [Chunk(str(number), self.prompt + self.new // 2, 1) for number in range(requests)]


USUAL_LOAD = Load(512, 128)
"""Where nobody says another one."""


@dataclass(frozen=True)
class InstanceCost:
    """Seconds of the parts of an instance."""

    stages: tuple[tuple[tuple[BatchCost, int], ...], ...]
    """For each stage, costs of kinds of layers and how many there are; of the last, of what is around them too."""
    sums: tuple[int, ...] = ()
    """For each stage, how many times its ranks exchange what they have computed."""
    all_reduce: LinearLatency = NO_LINK
    """Seconds of such an exchange, for so many bytes."""
    hop: LinearLatency = NO_LINK
    """Seconds from one stage to the next, for so many bytes."""
    token_bytes: int = 0
    """The hidden state of one token."""
    step_tokens: int = 512
    """The most new tokens of one batch."""
    together: tuple[tuple[tuple[BatchCost, int], ...], ...] = ()
    """As `stages`, while all stages compute at the same time; (): they do not slow each other down."""
    handovers: Handovers = NO_HANDOVERS

    def stage_s(self, stage: int, chunks: Sequence[Chunk], *, together: bool = False) -> float:
        """Return the seconds that a batch keeps one stage busy, while others are idle or, `together`, compute too."""
        if not chunks:
            return 0.0
        nbytes = self.token_bytes * sum(chunk.tokens for chunk in chunks)
        each_s = self.all_reduce(nbytes) + self.handovers.exchange_s
        around = self.sums[stage] * each_s if self.sums else 0.0
        around += self.handovers.stage_s if len(self.stages) > 1 else 0.0
        around += self.handovers.step_s if stage == len(self.stages) - 1 else 0.0
        parts = self.together[stage] if together and self.together else self.stages[stage]
        return math.fsum(count * cost.batch(chunks) for cost, count in parts) + around

    def stages_s(self, chunks: Sequence[Chunk], *, together: bool = False) -> tuple[float, ...]:
        """Return what `stage_s` does for each stage; those that are alike are costed once."""
        seconds = {stage: self.stage_s(stage, chunks, together=together) for stage in set(self._alike)}
        return tuple(seconds[stage] for stage in self._alike)

    @cached_property
    def _alike(self) -> tuple[int, ...]:
        """For each stage, the first one that takes as long as it with any batch."""
        last = len(self.stages) - 1
        keys = [(self.stages[s], self.together[s : s + 1], self.sums[s : s + 1], s == last) for s in range(last + 1)]
        firsts = {key: stage for stage, key in reversed(list(enumerate(keys)))}
        return tuple(firsts[key] for key in keys)

    def pass_s(self, chunks: Sequence[Chunk], *, together: bool = False) -> float:
        """Return the seconds of a batch through all stages, its tokens back at the first one."""
        nbytes = self.token_bytes * sum(chunk.tokens for chunk in chunks)
        hops = len(self.stages) * self.hop(nbytes) if len(self.stages) > 1 else 0.0
        return math.fsum(self.stages_s(chunks, together=together)) + hops

    def prompts(self, load: Load, running: int = 0) -> list[list[Chunk]]:
        """Return the batches of a prompt while so many requests run: of a long one each has a chunk.

        Short ones are computed together: as many as come from token to token, by Little's law, and a batch may have.
        """
        together = max(1, min(running // load.new, self.step_tokens // load.prompt))
        starts = range(0, load.prompt, self.step_tokens)
        sizes = [(start, min(self.step_tokens, load.prompt - start)) for start in starts]
        return [[Chunk(f"prompt {number}", *size) for number in range(together)] for size in sizes]

    def prompt_s(self, load: Load, running: int = 0) -> tuple[float, ...]:
        """Return for how long a prompt keeps each stage from other work, while so many requests run."""
        batches = self.prompts(load, running)
        return tuple(math.fsum(each) / len(batches[0]) for each in zip(*map(self.stages_s, batches), strict=True))

    def ttft_s(self, load: Load, running: int = 0) -> float:
        """Return the seconds to the first token of a request that waits for none, beside so many that are decoding."""
        beside = load.decoding(running)
        return math.fsum(self.pass_s([*chunks, *beside]) for chunks in self.prompts(load, running))

    def round_s(self, load: Load, running: int) -> float:
        """Return the seconds in which every one of so many requests gets a token; each stage has a batch of its own."""
        cohorts = self.cohorts(running)
        several = sum(cohorts.values()) > 1
        passes = (self.pass_s(load.decoding(requests), together=several) for requests in cohorts)
        return max(*self.round_busy_s(load, cohorts), *passes)

    def cohorts(self, running: int) -> Mapping[int, int]:
        """Return the steps of a round of so many requests: how many there are of each number of requests.

        One for each stage, of fewer requests one for each.
        """
        each, more = divmod(running, len(self.stages))
        return {count: steps for count, steps in ((each + 1, more), (each, len(self.stages) - more)) if count and steps}

    def round_busy_s(self, load: Load, cohorts: Mapping[int, int]) -> tuple[float, ...]:
        """Return for how long each stage computes in a round: each of its steps reads the weights again."""
        several = sum(cohorts.values()) > 1
        steps = [self.stages_s(load.decoding(requests), together=several) for requests in cohorts]
        return tuple(
            math.fsum(map(math.prod, zip(cohorts.values(), each, strict=True))) for each in zip(*steps, strict=True)
        )

    def tpot_s(self, load: Load, running: int) -> float:
        """Return the seconds from token to token, with prompts at the load's rate in between; inf: they take it all."""
        left = 1 - load.rate * max(self.prompt_s(load, running))
        return self.round_s(load, running) / left if left > 0 else math.inf

    def most_rate(self, load: Load, running: int) -> float:
        """Return how many requests a second it serves with so many running at a time at most.

        Fewer that the stages divide evenly may be served faster.
        """
        even = running - running % len(self.stages)
        seconds = min(self.round_s(load, count) / count for count in range(max(1, even), running + 1))
        return 1 / (load.new * seconds + max(self.prompt_s(load, running)))

    def busy(self, load: Load, running: int) -> tuple[float, ...]:
        """Return for each stage the share of time that it computes at the load's rate, so many running at a time."""
        rounds_s, rounds = self.round_busy_s(load, self.cohorts(running)), (load.new - 1) / running
        prompt_s = self.prompt_s(load, running)
        return tuple(load.rate * (own_s + rounds * each_s) for own_s, each_s in zip(prompt_s, rounds_s, strict=True))

    def alone_s(self, load: Load) -> tuple[float, ...]:
        """Return for how long each stage computes one request that is alone, with the hops that follow it."""
        steps = load.new - 1
        sent = [(self.token_bytes * chunk.tokens, 1) for [chunk] in self.prompts(load)] + [(self.token_bytes, steps)]
        hops = math.fsum(count * self.hop(nbytes) for nbytes, count in sent) if len(self.stages) > 1 else 0.0
        each = zip(self.prompt_s(load), self.stages_s(load.decoding(1)), strict=True)
        return tuple(prompt_s + steps * step_s + hops for prompt_s, step_s in each)

    def running(self, load: Load, most: int) -> int | None:
        """Return how many requests run at a time at the load's rate, of `most`; None: more would have to.

        By Little's law: as many as arrive while one generates, which takes no less time with more beside it, unless
        more prompts are computed together then. So the fewest that suffice are found from below.
        """
        running, wanted = 0, 1.0
        while wanted > running:
            short = running < self.step_tokens // load.prompt * load.new  # of as many, more prompts may be together
            following = running - running % load.new + load.new if short else math.inf
            if min(wanted, following) > most:
                return None
            running = math.ceil(min(wanted, following))
            wanted = load.rate * load.new * self.tpot_s(load, running) if load.rate else 1.0
        return running
