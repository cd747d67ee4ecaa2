"""Steps of an instance whose stages are on devices that other models compute on, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from elastic.engines.core.step import Step, StepResult
from elastic.planning.estimate.performance import InstanceCost
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.executor import LocalExecutor, chunks_of
from elastic.sim.core.host import SharedDevices
from elastic.sim.core.step_seconds import StepNoise
from elastic.sim.core.stretch import Stretch


@dataclass(frozen=True)
class StagedSeconds:
    """Seconds of a batch that passes all stages of an instance, nothing else being at their devices."""

    instance: InstanceCost

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch; 0.0 for none."""
        return self.instance.pass_s(chunks)


class StagedExecutor(LocalExecutor):
    """Steps that pass stages one after another, each of which keeps its devices for its own seconds."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: StagedSeconds,
        noise: StepNoise,
        answers: Mapping[str, int],
        stages: Sequence[SharedDevices],
    ) -> None:
        """`stages`: where each stage of the instance computes."""
        super().__init__(clock, cost, noise, answers, stages[0])
        self.stage_busy_s = [0.0] * len(stages)
        """For how long each stage has computed."""
        self.on_wanted: Callable[[], object] = lambda: None
        """Told when others ask for the devices during a stretch, which is to end then with the step in flight."""
        self._instance, self._stages = cost.instance, stages

    @property
    def undisturbed(self) -> bool:
        """Whether it has one stage, whose devices have nothing else to do."""
        return len(self._stages) == 1 and self._stages[0].idle

    def stretch(self, decoding: list[Chunk], steps: int) -> Stretch:
        """Begin so many decode steps, during which it keeps the devices unless others want them."""
        self._stages[0].hold(self.on_wanted)
        return super().stretch(decoding, steps)

    def note(self, seconds: float, steps: int = 1) -> None:
        """Note a stretch, and let others compute: it has ended."""
        super().note(seconds, steps)
        self.stage_busy_s[0] += seconds
        self._stages[0].give_back()

    def execute(self, step: Step) -> Future[StepResult]:
        """Have a step be computed by all stages."""
        self.answers.note(step.added, step.removed)
        future: Future[StepResult] = Future()
        chunks = chunks_of(step)
        seconds = [self._instance.stage_s(stage, chunks) for stage in range(len(self._stages))]
        factor = self.noise(sum(seconds), 1)
        tokens = sum(chunk.tokens for chunk in chunks)
        hop_s = self._instance.hop(self._instance.token_bytes * tokens) if len(seconds) > 1 else 0.0
        seconds = [factor * each for each in seconds]
        self._begin(0, seconds, hop_s, lambda: future.set_result(self.answers.result(step)))
        return future

    def _begin(self, stage: int, seconds: Sequence[float], hop_s: float, done: Callable[[], object]) -> None:
        self._stages[stage].compute(seconds[stage], partial(self._end, stage, seconds, hop_s, done))

    def _end(self, stage: int, seconds: Sequence[float], hop_s: float, done: Callable[[], object]) -> None:
        """Go on to the next stage; behind the last one, tokens go back to the first."""
        self.stage_busy_s[stage] += seconds[stage]
        self.busy_s += seconds[stage]
        last = stage + 1 == len(self._stages)
        then = done if last else partial(self._begin, stage + 1, seconds, hop_s, done)
        self._clock.after(hop_s, then) if hop_s else then()
