"""Steps of an instance of which several ranks compute layers, one after another or, by shards, together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from elastic.engines.core.step import Step, StepResult
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import RankLost
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.executor import AnswerEnds
from elastic.sim.core.step_seconds import Noise
from elastic.sim.mechanisms.model import LayeredModel
from elastic.sim.mechanisms.wires import Wires


class ComputeTurn:
    """A rank computes one thing at a time, in the order in which it is asked."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._free_s = clock, 0.0
        self.busy_s = 0.0
        self.hangs = False

    def compute(self, seconds: float, done: Callable[[], object]) -> None:
        """Have something computed; one that hangs never does."""
        if not self.hangs:
            self._free_s = max(self._clock.now, self._free_s) + seconds
            self.busy_s += seconds
            self._clock.at(self._free_s, done)


@dataclass(frozen=True)
class Leg:
    """What is computed before hidden states go on."""

    seconds: dict[str, float] = field(hash=False)
    """Of each rank that has a part in it."""
    layers: int = 0
    """That the ranks share, if they are several."""


def legs_of(path: LayerPath, layer_s: float, rest_s: float, factor: Callable[[str, int], float]) -> list[Leg]:
    """Return the legs of a step; `factor` is that of a rank's seconds in a layer, as of one in a variant.

    Embedding and head are at home, and count behind the last layer.
    """
    legs = []
    for holders, layers in path.runs():
        shares = {
            rank: sum(path.ranks_of(layer).count(rank) * factor(rank, layer) for layer in layers) for rank in holders
        }
        legs.append(Leg({rank: layer_s * share / path.shards for rank, share in shares.items()}, len(layers)))
    if set(legs[-1].seconds) == {path.home}:
        legs[-1] = Leg({path.home: legs[-1].seconds[path.home] + rest_s}, legs[-1].layers)
    else:
        legs.append(Leg({path.home: rest_s}))
    return legs


class PathExecutor:
    """An `Executor` of an instance in a group. Other instances' steps are computed at the same ranks."""

    def __init__(
        self,
        clock: VirtualClock,
        model: LayeredModel,
        wires: Wires,
        turns: dict[str, ComputeTurn],
        answers: AnswerEnds,
        noise: Noise,
        factor: Callable[[str, int], float],
        path: LayerPath,
    ) -> None:
        self.path = path
        self._clock, self._model, self._wires, self._turns = clock, model, wires, turns
        self._answers, self._noise, self._factor = answers, noise, factor
        self._in_flight: dict[Future[StepResult], None] = {}
        self._arrived_s: dict[tuple[str, ...], float] = {}

    def execute(self, step: Step) -> Future[StepResult]:
        """Have a step go by the path as it is now."""
        self._answers.note(step.added, step.removed)
        future: Future[StepResult] = Future()
        self._in_flight[future] = None
        chunks = [Chunk(chunk.sequence, chunk.start, len(chunk.tokens)) for chunk in step.chunks]
        factor = self._noise()
        layer_s, rest_s = (seconds * factor for seconds in self._model.parts_s(chunks))
        nbytes = self._model.token_bytes * sum(chunk.tokens for chunk in chunks)
        legs = legs_of(self.path, layer_s, rest_s, self._factor)
        self._go(step, future, legs, (self.path.home,), nbytes)
        return future

    def remove(self, sequences: tuple[str, ...]) -> None:
        """Forget sequences."""
        self._answers.note((), sequences)

    def lose(self, rank: str) -> None:
        """Have all steps in flight be lost with a rank."""
        lost, self._in_flight = self._in_flight, {}
        for future in lost:
            future.set_exception(RankLost(f"rank {rank!r} was lost", rank=rank))

    def _go(
        self, step: Step, future: Future[StepResult], legs: list[Leg], before: tuple[str, ...], nbytes: int
    ) -> None:
        """Compute the first leg, when hidden states have come to all of its ranks."""
        if future not in self._in_flight:
            return
        leg = legs[0]
        new = [rank for rank in leg.seconds if rank not in before]
        waiting = Counting(len(leg.seconds), partial(self._done, step, future, legs, nbytes))
        begin = partial(self._compute, leg, waiting)
        if new:
            ends = before[0], *new
            at_s = self._clock.now + self._wires.hidden_s(ends, nbytes * len(new))
            self._arrived_s[ends] = max(at_s, self._arrived_s.get(ends, 0.0))  # they do not overtake each other
            self._clock.at(self._arrived_s[ends], begin)
        else:
            begin()

    def _compute(self, leg: Leg, waiting: Counting) -> None:
        for rank, seconds in leg.seconds.items():
            self._turns[rank].compute(seconds, waiting)

    def _done(self, step: Step, future: Future[StepResult], legs: list[Leg], nbytes: int) -> None:
        if future not in self._in_flight:
            return
        leg = legs[0]
        ranks, seconds = tuple(leg.seconds), 0.0
        if len(ranks) > 1:  # twice in each layer: heads of the others, and what their parts of the network give
            once = self._wires.hidden_s(ranks, nbytes * (len(ranks) - 1))
            seconds = 2 * leg.layers * once
        self._clock.after(seconds, partial(self._next, step, future, legs[1:], ranks, nbytes))

    def _next(
        self, step: Step, future: Future[StepResult], legs: list[Leg], before: tuple[str, ...], nbytes: int
    ) -> None:
        if future not in self._in_flight:
            return
        if legs:
            self._go(step, future, legs, before, nbytes)
        else:
            del self._in_flight[future]
            future.set_result(self._answers.result(step))


class Counting:
    """Calls something when it was called so many times."""

    def __init__(self, count: int, done: Callable[[], object]) -> None:
        self._left, self._done = count, done

    def __call__(self) -> None:
        """Count."""
        self._left -= 1
        if not self._left:
            self._done()
