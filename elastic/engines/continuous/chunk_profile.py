"""A measurement of what chunks of prompts cost in an engine, behind prefixes of any length, to fit `ChunkCost` to.

Batches run as the engine would run them, over its cache in blocks; a prefix is not computed, only its blocks are read.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elastic.engines.base import Request
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.core.step import Chunk, SequenceState, Step
from elastic.errors import ConfigError, StateError
from elastic.planning.pipeline.chunk_cost import ChunkProfile, Sample
from elastic.weights.decoder import find_decoder

Mix = tuple[tuple[int, int], ...]
"""(earlier tokens, new tokens) of each chunk of a batch."""


def profile_chunks(engine: ContinuousEngine, mixes: Sequence[Mix], rounds: int = 7, seed: int = 0) -> ChunkProfile:
    """Run batches of these chunks, and return the median of `rounds` of each: of a decoder layer, and of the rest.

    All run in turn, round after round, so that a disturbance does not tell on one of them alone. The engine has not
    been started. Raises `StateError` if it has, `ConfigError` for batches that its cache has no room for.
    """
    if engine.serving:
        raise StateError("the engine is serving; profile it before it is started")
    stopwatch = _Stopwatch(engine)
    order = list(range(len(mixes)))
    choose = random.Random(seed)
    taken: list[list[tuple[float, float]]] = [[] for _ in mixes]
    with stopwatch.attached():
        for _ in range(rounds):
            choose.shuffle(order)
            for number in order:
                taken[number].append(stopwatch.run(mixes[number]))
    layer, rest = [], []
    for mix, pairs in zip(mixes, taken, strict=True):
        layer.append(Sample(mix, statistics.median(of_layer for of_layer, _ in pairs)))
        rest.append(Sample(mix, statistics.median(around for _, around in pairs)))
    return ChunkProfile(tuple(layer), tuple(rest), stopwatch.layers)


class _Stopwatch:
    """Runs batches, and takes the time at which their layers begin and end."""

    def __init__(self, engine: ContinuousEngine) -> None:
        self._blocks, self._runner, self._device = engine._blocks, engine._runner, engine._model.device
        self._decoder = find_decoder(engine._model)
        self.layers = len(self._decoder.layers)
        self._began = self._ended = 0.0
        self._steps = 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the first and the last decoder layer."""
        first, last = self._decoder.layers[0], self._decoder.layers[-1]
        hooks = first.register_forward_pre_hook(self._begin, prepend=True), last.register_forward_hook(self._end)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def run(self, mix: Mix) -> tuple[float, float]:
        """Return the seconds of one decoder layer, and of all that is around them; the first run is not counted."""
        names = [f"profile {number}" for number in range(len(mix))]
        try:
            step = self._step(names, mix)
            self._execute(step)
            again = tuple(chunk._replace(blocks=self._blocks.no_blocks) for chunk in step.chunks)
            seconds = self._execute(Step(step.number + 1, 0, again))
        finally:
            self._runner.remove(tuple(names))
            for name in names:
                self._blocks.forget(name)
        within = self._ended - self._began
        return within / self.layers, seconds - within

    def _step(self, names: Sequence[str], mix: Mix) -> Step:
        """Give the chunks their blocks, those of their prefixes, too."""
        chunks, states = [], []
        for name, (start, count) in zip(names, mix, strict=True):
            tokens = [0] * (start + count)
            self._blocks.expect([name], len(tokens))
            if self._blocks.admit(name, tokens, len(tokens), share=False) is None:
                raise ConfigError(f"mixes: the cache has no room for the batch {mix[:9]}; give it more memory")
            blocks = tuple(map(tuple, self._blocks.table(name).blocks))
            chunks.append(Chunk(name, start, tuple(tokens[start:]), True, blocks))
            states.append(SequenceState(name, Request((0,), 1 << 30), 0, 0))
        self._steps += 2
        return Step(self._steps, 0, tuple(chunks), tuple(states))

    def _execute(self, step: Step) -> float:
        """Return the seconds of a step, kernels included."""
        self._finish()
        start = time.perf_counter()
        self._runner.execute(step).result()
        self._finish()
        return time.perf_counter() - start

    def _begin(self, *_: Any) -> None:
        self._finish()
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self._finish()
        self._ended = time.perf_counter()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
