"""An executor that computes nothing: its results come when they are due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from elastic.controller.sensors.sliding_window import moving_average
from elastic.engines.base import SampledToken
from elastic.engines.core.step import SequenceState, Step, StepResult
from elastic.engines.pipeline.turn import WEIGHT
from elastic.planning.estimate.roofline import BatchCost
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.host import Computer, SharedHost
from elastic.sim.core.step_seconds import WARM, BehindPrompt, StepNoise
from elastic.sim.core.stretch import Stretch

TOKEN, STOP = 1, 2
"""Tokens of answers mean nothing, but for the one that ends an answer before its `max_tokens`."""
WARM_AFTER = 32
"""Steps behind a prompt, after which nothing is left of it."""
_TOKEN, _STOP = SampledToken(TOKEN), SampledToken(STOP)


def chunks_of(step: Step) -> list[Chunk]:
    """Return a step as costs see it."""
    return [Chunk(chunk.sequence, chunk.start, len(chunk.tokens)) for chunk in step.chunks]


class AnswerEnds:
    """Where sequences end that an executor computes, if that is before their `max_tokens`."""

    def __init__(self, answers: Mapping[str, int]) -> None:
        """Take the tokens of answers, by request; of others it is `max_tokens`."""
        self._answers = answers
        self.ends: dict[str, int] = {}
        """Sequence -> the tokens of its prompt and its answer."""

    def note(self, added: Iterable[SequenceState], removed: Iterable[str]) -> None:
        """Have sequences come and go."""
        for name in removed:
            self.ends.pop(name, None)
        for state in added:
            tokens = self._answers.get(state.request.id)
            if tokens is not None and tokens < state.request.max_tokens:
                self.ends[state.id] = len(state.request.prompt) + tokens

    def result(self, step: Step) -> StepResult:
        """Return what comes of a step."""
        if not self.ends:
            return StepResult((_TOKEN,) * sum(chunk.samples for chunk in step.chunks))
        ends = self.ends
        return StepResult(
            tuple(
                _STOP if ends.get(chunk.sequence) == chunk.start + len(chunk.tokens) + 1 else _TOKEN
                for chunk in step.chunks
                if chunk.samples
            )
        )


@dataclass
class ColdCaches:
    """What steps of a rank take longer since it computed a prompt."""

    behind_prompt: BehindPrompt
    steps: int = WARM_AFTER
    """Of single tokens, since then: from `WARM_AFTER` on they take no longer, or too little to count."""

    def more_s(self, chunks: Sequence[Chunk]) -> float:
        """Take the next step; return what it takes longer."""
        if not self.behind_prompt.first_s:
            return 0.0
        if any(chunk.tokens > 1 for chunk in chunks):
            self.steps = 0
            return 0.0
        self.steps += 1
        return self.behind_prompt.more_s(self.steps - 1) if self.steps <= WARM_AFTER else 0.0


class LocalExecutor:
    """Steps of one rank that computes all of its layers itself, one step at a time."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: BatchCost,
        noise: StepNoise,
        answers: Mapping[str, int],
        host: Computer | None = None,
        behind_prompt: BehindPrompt = WARM,
    ) -> None:
        """`host`: where others compute beside it, in which it may be slower; None: it has one for itself."""
        self.cost, self.noise, self.host = cost, noise, host or SharedHost(clock)
        self.cold = ColdCaches(behind_prompt)
        self.answers = AnswerEnds(answers)
        self.remove = partial(self.answers.note, ())
        self.busy_s = 0.0
        """Seconds of all steps so far, by itself."""
        self.owed_s = 0.0
        """Seconds that the next step takes besides."""
        self.step_s = 0.0
        """Seconds of a step in the mean of the last; 0.0: there was none."""
        self._clock = clock

    def execute(self, step: Step) -> Future[StepResult]:
        """Have a step be computed when its seconds have passed."""
        self.answers.note(step.added, step.removed)
        future: Future[StepResult] = Future()
        seconds, self.owed_s = self.seconds(step) + self.owed_s, 0.0
        self.note(seconds)
        self.host.compute(seconds, lambda: future.set_result(self.answers.result(step)))
        return future

    def seconds(self, step: Step) -> float:
        """Draw the seconds of a step, while others are idle."""
        chunks = chunks_of(step)
        seconds = self.cost.batch(chunks) + self.cold.more_s(chunks)
        return seconds * self.noise(seconds, 1)

    @property
    def undisturbed(self) -> bool:
        """Whether decode steps take as long as they say, so that several can be taken together."""
        return not self.host.shared and self.cold.steps >= WARM_AFTER

    def stretch(self, decoding: list[Chunk], steps: int) -> Stretch:
        """Begin so many decode steps; their seconds are a straight line between the first and the last."""
        last = [Chunk("", start + steps - 1, 1) for _, start, _ in decoding]
        cost_s = self.cost.batch(decoding)
        factor = self.noise(cost_s, steps)
        first_s = cost_s * factor
        more_s = (self.cost.batch(last) * factor - first_s) / (steps - 1) if steps > 1 else 0.0
        return Stretch(self._clock.now, steps, first_s, more_s)

    def note(self, seconds: float, steps: int = 1) -> None:
        """Note that so many steps take, or took, so long together."""
        self.busy_s += seconds
        each_s = seconds / steps
        self.step_s = moving_average(self.step_s or each_s, each_s, 1 - (1 - WEIGHT) ** steps)
