"""Steps of an instance of which several ranks compute layers, one after another or, by shards, together."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from elastic.engines.core.step import Step, StepResult
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import RankLost
from elastic.planning.estimate.performance import Handovers
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.executor import AnswerEnds, ColdCaches, chunks_of
from elastic.sim.core.host import Countdown
from elastic.sim.core.step_seconds import StepNoise
from elastic.sim.mechanisms.model import LayeredModel, StepParts
from elastic.sim.mechanisms.stage_turn import StageTurn
from elastic.sim.mechanisms.wires import Wires

MOST_LEGS = 16
"""Of a run of layers that ranks share: more exchanges than these are taken together."""


@dataclass(frozen=True)
class Leg:
    """What is computed before hidden states, or parts of them, go on."""

    seconds: dict[str, float] = field(hash=False)
    """Of each rank that has a part in it."""
    exchanges: int = 0
    """That its ranks have behind it, if they are several."""
    kind: Literal["compute", "exchange", "engine"] = "compute"
    """What its ranks do; the latter two beside their turns."""


def legs_of(path: LayerPath, parts: StepParts, factor: Callable[[str, int], float], handovers: Handovers) -> list[Leg]:
    """Return the legs of a step; `factor` is that of a rank's seconds in a layer, as of one in a variant.

    `handovers` are what stages and exchanges take of each of their ranks' own time.

    Embedding and head are at home, and count behind the last layer. Ranks that share layers exchange twice in each:
    heads, and what their parts of the network give. They send and receive beside their turns, while others compute;
    of a run of many layers several exchanges are one. What shards do not divide each of them computes.
    """
    legs: list[Leg] = []
    stage_s = handovers.stage_s if len({path.home, *path.ranks}) > 1 else 0.0
    for holders, layers in path.runs:
        seconds = {
            rank: math.fsum(
                (parts.whole_s + parts.cut_s * path.ranks_of(layer).count(rank) / path.shards) * factor(rank, layer)
                for layer in layers
            )
            for rank in holders
        }
        if len(holders) == 1:
            legs.append(Leg({rank: each + stage_s for rank, each in seconds.items()}))
            continue
        exchanges = 2 * len(layers)
        count = min(exchanges, MOST_LEGS)
        leg = {rank: each / count for rank, each in seconds.items()}
        for number in range(count):
            times = exchanges * (number + 1) // count - exchanges * number // count
            exchange = Leg(dict.fromkeys(holders, times * handovers.exchange_s), times, "exchange")
            legs += [Leg(leg), exchange] if handovers.exchange_s else [Leg(leg, times)]
    if set(legs[-1].seconds) == {path.home}:
        legs[-1] = Leg({path.home: legs[-1].seconds[path.home] + parts.rest_s})
    else:
        legs.append(Leg({path.home: parts.rest_s}))
    return [*legs, Leg({path.home: parts.beside_s}, kind="engine")] if parts.beside_s else legs


class PathExecutor:
    """An `Executor` of an instance in a group. Other instances' steps are computed at the same ranks."""

    def __init__(
        self,
        clock: VirtualClock,
        model: LayeredModel,
        wires: Wires,
        turns: dict[str, StageTurn],
        answers: AnswerEnds,
        noise: StepNoise,
        factor: Callable[[str, int], float],
        path: LayerPath,
    ) -> None:
        self.path, self.remove = path, partial(answers.note, ())
        self._clock, self._model, self._wires, self._turns = clock, model, wires, turns
        self._answers, self._noise, self._factor = answers, noise, factor
        self._handovers = Handovers(model.links.stage_s, model.links.core_s)
        self._cold = ColdCaches(model.rank.behind_prompt)
        self._in_flight: dict[Future[StepResult], tuple[str, ...]] = {}  # and the ranks that have a part in it
        self._arrived_s: dict[tuple[str, ...], float] = {}

    def execute(self, step: Step) -> Future[StepResult]:
        """Have a step go by the path as it is now."""
        self._answers.note(step.added, step.removed)
        future: Future[StepResult] = Future()
        ranks = self._in_flight[future] = tuple({self.path.home, *self.path.ranks})
        for rank in ranks:
            self._turns[rank].expect(1)
        chunks = chunks_of(step)
        parts = self._model.parts(chunks)
        parts = parts._replace(whole_s=parts.whole_s + self._cold.more_s(chunks) / self._model.layers)
        factor = self._noise(parts.alone_s(self._model.layers), 1)
        parts = StepParts(*(factor * seconds for seconds in parts))
        nbytes = self._model.token_bytes * sum(chunk.tokens for chunk in chunks)
        legs = legs_of(self.path, parts, self._factor, self._handovers)
        self._go(step, future, legs, (self.path.home,), nbytes)
        return future

    def lose(self, rank: str) -> None:
        """Have all steps in flight be lost with a rank."""
        for future in list(self._in_flight):
            self._end(future)
            future.set_exception(RankLost(f"rank {rank!r} was lost", rank=rank))

    def _go(
        self, step: Step, future: Future[StepResult], legs: list[Leg], before: tuple[str, ...], nbytes: int
    ) -> None:
        """Compute the first leg, when hidden states have come to all of its ranks; without one, the step is done."""
        if future not in self._in_flight:
            return
        if not legs:
            self._end(future)
            future.set_result(self._answers.result(step))
            return
        leg = legs[0]
        new = [rank for rank in leg.seconds if rank not in before]
        waiting = Countdown(len(leg.seconds), partial(self._done, step, future, legs, nbytes))
        begin = partial(self._compute, leg, waiting)
        if new:
            ends = before[0], *new
            at_s = self._clock.now + self._wires.hidden_s(ends, nbytes * len(new))
            self._arrived_s[ends] = max(at_s, self._arrived_s.get(ends, 0.0))  # they do not overtake each other
            self._clock.at(self._arrived_s[ends], begin)
        else:
            begin()

    def _compute(self, leg: Leg, waiting: Countdown) -> None:
        for rank, seconds in leg.seconds.items():
            turn = self._turns[rank]
            verbs = {"compute": turn.compute, "exchange": turn.exchange, "engine": turn.work_beside}
            verbs[leg.kind](seconds, waiting)

    def _done(self, step: Step, future: Future[StepResult], legs: list[Leg], nbytes: int) -> None:
        if future not in self._in_flight:
            return
        leg = legs[0]
        ranks, seconds = tuple(leg.seconds), 0.0
        if leg.exchanges:
            seconds = self._wires.hidden_s(ranks, nbytes * (len(ranks) - 1), leg.exchanges)
        self._clock.after(seconds, partial(self._go, step, future, legs[1:], ranks, nbytes))

    def _end(self, future: Future[StepResult]) -> None:
        """Have a step be in flight no more."""
        for rank in self._in_flight.pop(future):
            self._turns[rank].expect(-1)
