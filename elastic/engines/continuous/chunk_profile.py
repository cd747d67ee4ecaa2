"""A measurement of what chunks of prompts cost in an engine, behind prefixes of any length, to fit `ChunkCost` to.

Batches run as the engine would run them, over its cache in blocks; a prefix is not computed, only its blocks are read.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from elastic.engines.base import Request
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.core.step import ScheduledChunk, SequenceState, Step
from elastic.errors import ConfigError, StateError
from elastic.memory.backends.streams import synchronize
from elastic.planning.pipeline.chunk_cost import BatchTiming, ChunkProfile, ModelCost
from elastic.weights.decoder import batch_context_length, find_decoder

Mix = tuple[tuple[int, int], ...]
"""(earlier tokens, new tokens) of each chunk of a batch."""
PROFILED_AFTER = 4
"""Passes of a size before a profile has it captured: kernels that are measured at first use are known by then."""
Pace = Callable[[float], object]
"""Called behind each batch with its seconds: it may wait, which is not counted, or raise, to measure no more."""


def profile_chunks(
    engine: ContinuousEngine,
    mixes: Sequence[Mix],
    rounds: int = 7,
    seed: int = 0,
    most_s: float = math.inf,
    pace: Pace | None = None,
) -> ChunkProfile:
    """Run batches of these chunks, and return the median of `rounds` of each: of a decoder layer, and of the rest.

    All run in turn, round after round, so that a disturbance does not tell on one of them alone; no round but the first
    begins after `most_s` seconds. The engine has not been started. Raises `StateError` if it has, `ConfigError` for
    batches that its cache has no room for.
    """
    stopwatch, began_s = _Stopwatch(engine, pace), time.perf_counter()
    order = list(range(len(mixes)))
    choose = random.Random(seed)
    taken: list[list[tuple[float, float]]] = [[] for _ in mixes]
    with stopwatch.attached():
        for number in range(rounds):
            if number and time.perf_counter() - began_s - stopwatch.paced_s > most_s:
                break
            choose.shuffle(order)
            for each in order:
                taken[each].append(stopwatch.run(mixes[each]))
    layer, rest = [], []
    for mix, pairs in zip(mixes, taken, strict=True):
        layer.append(BatchTiming(mix, statistics.median(of_layer for of_layer, _ in pairs)))
        rest.append(BatchTiming(mix, statistics.median(around for _, around in pairs)))
    return ChunkProfile(tuple(layer), tuple(rest), stopwatch.layers)


def profile_replays(
    engine: ContinuousEngine,
    mixes: Sequence[Mix],
    rounds: int = 7,
    most_s: float = math.inf,
    pace: Pace | None = None,
) -> list[float]:
    """Return how long decode steps of these sequences take that are replayed, as a share of those that are not.

    The median of `rounds` pairs of each, fewer once its part of `most_s` seconds is over; 1.0 where the engine replays
    none. Raises as `profile_chunks`.
    """
    stopwatch = _Stopwatch(engine, pace)
    return [stopwatch.replayed_share(mix, rounds, most_s / len(mixes)) for mix in mixes]


def fit_cost(engine: ContinuousEngine, most_tokens: int, most_s: float = 2.0) -> ModelCost:
    """Fit the cost of an engine's model to batches of up to so many tokens, in about `most_s` seconds.

    A slow model is measured in smaller batches. The engine has not been started; raises as `profile_chunks` does.
    """
    began_s = time.perf_counter()
    longest = engine.reports.load().total_blocks * engine.kv_format.block_tokens // _MOST_SEQUENCES
    longest = min(longest, batch_context_length(engine._config) or longest)
    tokens, limit, stopwatch = min(8, longest // 2), min(most_tokens, longest // 2), _Stopwatch(engine)
    if tokens < 1:
        raise ConfigError("the cost of chunks cannot be measured: the KV cache has room for no batch; give it more")
    with stopwatch.attached():
        while 2 * tokens <= limit and stopwatch.run_s(((0, tokens),)) < most_s / 50:
            tokens *= 2
    left_s = max(0.0, most_s - (time.perf_counter() - began_s))
    return profile_chunks(engine, _telling_mixes(longest, tokens), rounds=5, most_s=left_s).fit()


_MOST_SEQUENCES = 8


def _telling_mixes(longest: int, most: int) -> list[Mix]:
    """Return batches that tell what prefixes, tokens, chunks and batches cost; `longest`: of a sequence, in tokens."""
    half, sizes = longest // 2, dict.fromkeys((most, max(1, most // 2), max(1, most // 8)))
    alone: list[Mix] = [((start, size),) for size in sizes for start in (0, half // 2, half)]
    decodes: list[Mix] = [((half, 1),) * count for count in (1, 4, _MOST_SEQUENCES)]
    short: list[Mix] = [((half // 16, 1),) * count for count in (1, _MOST_SEQUENCES)]
    prompts: list[Mix] = [((0, max(1, most // count)),) * count for count in (2, _MOST_SEQUENCES)]
    return [*alone, *decodes, *short, *prompts, (*((half, 1),) * 4, (0, most // 2 or 1))]


class _Stopwatch:
    """Runs batches, and takes the time at which their layers begin and end."""

    def __init__(self, engine: ContinuousEngine, pace: Pace | None = None) -> None:
        if engine.serving:
            raise StateError("the engine is serving; profile it before it is started")
        self._blocks, self._runner, self._device = engine._blocks, engine._runner, engine._model.device
        self._decoder = find_decoder(engine._model)
        self.layers = len(self._decoder.layers)
        self._passed_s: list[float] = []  # when the first layer began, and the last one ended, of each pass
        self._steps = 0
        self._pace = pace
        self._tokens, self._choose = range(engine._config.vocab_size), random.Random(0)
        self.paced_s = 0.0
        """For how long it was waited between batches."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the first and the last decoder layer."""
        first, last = self._decoder.layers[0], self._decoder.layers[-1]
        hooks = (
            first.register_forward_pre_hook(self._note_time, prepend=True),
            last.register_forward_hook(self._note_time),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def run(self, mix: Mix) -> tuple[float, float]:
        """Return the seconds of one decoder layer, and of all that is around them; the first run is not counted."""
        with self._begun(mix) as step:
            seconds = self._execute(step)
        began_s, ended_s = self._passed_s[-2:]
        within = ended_s - began_s
        self._wait(2 * seconds)
        return within / self.layers, seconds - within

    def replayed_share(self, mix: Mix, rounds: int, most_s: float) -> float:
        """Return the seconds of a decode step without hooks, of those of one with them, which is not replayed."""
        graphs, shares = self._runner.graphs, []
        if graphs is None:
            return 1.0
        with ExitStack() as stack:
            stack.callback(setattr, graphs, "capture_after", graphs.capture_after)
            graphs.capture_after = PROFILED_AFTER
            step = stack.enter_context(self._begun(mix))
            began_s = time.perf_counter()
            first_s = [self._execute(step) for _ in range(PROFILED_AFTER + 2)]  # captured, and then checked
            for number in range(0 if graphs.refusal else rounds):
                if number and time.perf_counter() - began_s > most_s:
                    break
                with self.attached():
                    called_s = self._execute(step)
                shares.append(self._execute(step) / called_s)
        self._wait(math.fsum(first_s) + 2 * len(shares) * first_s[0])
        return statistics.median(shares or [1.0])

    @contextmanager
    def _begun(self, mix: Mix) -> Iterator[Step]:
        """Run a batch once; yield it as it can be run again, until its sequences are forgotten."""
        names = [f"profile {number}" for number in range(len(mix))]
        try:
            step = self._step(names, mix)
            self._execute(step)
            again = tuple(chunk._replace(blocks=self._blocks.no_blocks) for chunk in step.chunks)
            yield Step(step.number + 1, 0, again)
        finally:
            self._runner.remove(tuple(names))
            for name in names:
                self._blocks.forget(name)

    def run_s(self, mix: Mix) -> float:
        """Return the seconds of a batch."""
        layer_s, rest_s = self.run(mix)
        return self.layers * layer_s + rest_s

    def _wait(self, seconds: float) -> None:
        """Let others compute for as long as the pace says behind so many seconds of measuring."""
        if self._pace is not None:
            began_s = time.perf_counter()
            self._pace(seconds)
            self.paced_s += time.perf_counter() - began_s

    def _step(self, names: Sequence[str], mix: Mix) -> Step:
        """Give the chunks their blocks, those of their prefixes, too.

        Their tokens differ, as experts are chosen by them: those of a batch of equal ones would be as few as of one.
        """
        chunks, states = [], []
        for name, (start, count) in zip(names, mix, strict=True):
            tokens = self._choose.choices(self._tokens, k=start + count)
            self._blocks.expect([name], len(tokens))
            if self._blocks.admit(name, tokens, len(tokens), share=False) is None:
                raise ConfigError(f"mixes: the cache has no room for the batch {mix[:9]}; give it more memory")
            blocks = tuple(map(tuple, self._blocks.tables[name].blocks))
            chunks.append(ScheduledChunk(name, start, tuple(tokens[start:]), True, blocks))
            states.append(SequenceState(name, Request((0,), 1 << 30), 0, 0))
        self._steps += 2
        return Step(self._steps, 0, tuple(chunks), tuple(states))

    def _execute(self, step: Step) -> float:
        """Return the seconds of a step, kernels included."""
        synchronize(self._device)
        start = time.perf_counter()
        self._runner.execute(step).result()
        synchronize(self._device)
        return time.perf_counter() - start

    def _note_time(self, *_: Any) -> None:
        synchronize(self._device)
        self._passed_s.append(time.perf_counter())
