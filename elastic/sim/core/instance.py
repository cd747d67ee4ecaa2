"""One rank in simulated time: the engine's own scheduler and blocks, and an executor that only takes time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic.cluster.control.messages import Beat, Cancel, Hello, ModelFacts, News, Refused, Submit
from elastic.engines.base import Output, SampledToken
from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.core.load import EngineLoad
from elastic.engines.core.sequence import Produced, Sequence
from elastic.engines.core.step import Executor, Step, StepResult
from elastic.errors import CapacityError, Overloaded, RankLost, StateError
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.clock import ScheduledEvent, VirtualClock
from elastic.sim.core.evicting import SCHEDULERS, OptimisticBlocks
from elastic.sim.core.executor import TOKEN, LocalExecutor
from elastic.sim.core.pages import SimulatedMemory
from elastic.sim.core.stretch import Stretch

FACTS = ModelFacts((), 0, 1 << 20, None, (), ())


@dataclass(frozen=True)
class EngineOptions:
    """What `ContinuousEngine` is told."""

    block_tokens: int = 32
    max_requests: int = 64
    max_batch_tokens: int = 512
    share_prefixes: bool = False
    eviction: str = "none"
    """Or "recompute", "swap": baselines, which begin more than can end (`evicting`)."""
    swap_token_s: float = 0.0
    """For the keys and values of a token to go to the host, or to come back; the step waits for it."""


@dataclass(frozen=True)
class PlacePages:
    """The memory of a rank."""

    budget: int
    """Pages of its place."""
    weights: int
    """Of these, what is not for keys and values."""
    sector: int
    """Pages of a sector in all layers."""
    blocks_per_sector: int = 1
    layers: int = 1
    layer_weights: int = 0
    """Of `weights`, the pages of one layer."""


class SimulatedInstance:
    """A rank that serves: to the dispatcher it is a `RankClient`.

    It tells nothing before `listen`. Steps that only decode, and are alike but for one more token each, are one event
    as long as nothing comes, at most `stretch_s` seconds of them; 0: each is one by itself.
    """

    heard_all = behind = False

    def __init__(
        self,
        clock: VirtualClock,
        name: str,
        options: EngineOptions,
        pages: PlacePages,
        executor: LocalExecutor,
        stretch_s: float = 0.0,
        message_s: float = 0.0,
    ) -> None:
        self.clock, self.name, self.options, self.pages = clock, name, options, pages
        self.memory: SimulatedMemory
        manager = BlockManager if options.eviction == "none" else OptimisticBlocks
        self.blocks = manager(self._open_memory, [None], options.block_tokens, options.share_prefixes)
        self.scheduler = SCHEDULERS[options.eviction](
            self.blocks,
            max_requests=options.max_requests,
            max_batch_tokens=options.max_batch_tokens,
            clock=clock,
        )
        self.executor: Executor = executor
        """Computes its steps; another one while other ranks compute layers of it."""
        self.local = executor
        """The one by which it computes all layers itself."""
        self.batches: Callable[[], int] = lambda: 1
        """Says how many steps may be in flight at the same time, ahead of each."""
        self.paused = False
        """Whether no step is begun, since somebody wishes so; `wake` it afterwards."""
        self.whole = True
        """Whether all of its keys and values are here: what ends is free when that was told, as of a `KVJournal`."""
        self.lost = False
        self.stalls = 0
        """Times that a live sequence was left out of a step for want of blocks."""
        kv = KVFormat(options.block_tokens, "head_centric", "float16", 1, 1, (((0,), None),))
        shares = self.blocks.shares
        self.hello = Hello(name, 1, "here", FACTS, kv, options.max_requests, None, self.load(), shares_prefixes=shares)
        self._in_flight, self._cohorts = 0, 1
        self._resumed: set[str] = set()  # sequences that go on here, of which nothing was told yet
        self._between: list[Callable[[], object]] = []  # what is to be done between two steps
        self._stretch_s, self._message_s = stretch_s, message_s
        self._stretch: Stretch | None = None
        self._stretch_end: ScheduledEvent | None = None
        self._on_message: Callable[[News | Refused | Beat], None] = lambda _: None
        self._on_lost: Callable[[str], None] = lambda _: None

    # -- as a RankClient

    def listen(self, on_message: Callable[[News | Refused | Beat], None], on_lost: Callable[[str], None]) -> None:
        """Tell what happens from now on."""
        self._on_message, self._on_lost = on_message, on_lost

    def send(self, message: Any) -> None:
        """Take a message, not before what is happening is over: the sender holds a lock."""
        self.clock.after(self._message_s, partial(self._take, message))

    def ask(self, question: Any) -> Future[Any]:
        """Refuse a question: it computes its layers by itself."""
        answer: Future[Any] = Future()
        answer.set_exception(StateError(f"a simulated rank does not know {type(question).__name__}"))
        return answer

    def kill(self, why: str = "killed by the fleet") -> None:
        """End it at once; what it had is lost."""
        if not self.lost:
            self.lost = True
            self._on_lost(why)

    def close(self, *, drain: bool = False, timeout_s: float = 5.0) -> None:
        """End it."""
        self.kill("it was asked to")

    # -- steps

    def wake(self) -> None:
        """Begin what steps can be. Called by whoever changes what its scheduler may do."""
        if self._stretch is not None:
            self._shorten(self._stretch)
            return
        while self._between and not self._in_flight:  # what is done may have a step begin
            self._between.pop(0)()
        if not self._in_flight and self._cohorts != self.batches() and not self.lost:
            self._cohorts = self.batches()
            self.scheduler.set_cohorts(self._cohorts)
        if self._between or self._cohorts != self.batches():
            return
        if not self.lost and not self.paused and not self._in_flight and self._begin_stretch():
            return
        while not self.lost and not self.paused and self._in_flight < self._cohorts:
            step = self.scheduler.schedule()
            self.stalls += self.scheduler.stalled
            if step is None:
                break
            self._in_flight += 1
            self.local.owed_s += self.scheduler.copied * self.options.swap_token_s
            self.scheduler.copied = 0
            self.executor.execute(step).add_done_callback(partial(self._computed, step))

    def between_steps(self, action: Callable[[], object]) -> None:
        """Do something as soon as no step is in flight, and begin none before."""
        self._between.append(action)
        self.wake()

    def beat(self) -> None:
        """Say that it is alive, and what room it has."""
        if not self.lost:
            self._on_message(Beat(self.load()))

    def load(self) -> EngineLoad:
        """Say what it has to do, and its room."""
        memory, blocks = self.memory, self.blocks
        total, uncapped = (sectors * memory.blocks_per_sector(0) for sectors in (memory.capacity, memory.sectors))
        running, waiting, free = len(blocks.live), len(blocks.waiting), blocks.free_blocks()
        return EngineLoad(running, waiting, free, total, self.scheduler.steps, uncapped_blocks=uncapped)

    def tell(self, outputs: list[Output], starts: list[int]) -> None:
        """Tell the fleet; then what ended is free."""
        if not self.lost:
            self._on_message(News(tuple(outputs), tuple(starts), self.load()))
        self.scheduler.let_go()

    def tell_room(self) -> None:
        """Say what came free behind what was told, if no step follows with which that could be told."""
        if self.whole and not self.scheduler.has_work:
            self.beat()

    # -- inside

    def _open_memory(self, **answers: Any) -> SimulatedMemory:
        pages = self.pages
        self.memory = SimulatedMemory(pages.budget, pages.weights, pages.sector, pages.blocks_per_sector, **answers)
        return self.memory

    def _take(self, message: Any) -> None:
        if self.lost:
            return
        if isinstance(message, Submit):
            request = message.states[0].request
            try:
                self.scheduler.add(message.states)
            except (CapacityError, Overloaded) as error:
                self._on_message(Refused(request.id, error))
                return
        elif isinstance(message, Cancel):
            ended = [
                cancelled
                for name, sequence in list(self.scheduler.sequences.items())
                if sequence.request.id == message.request and message.index in (None, sequence.index)
                if (cancelled := self.scheduler.cancel(name)) is not None
            ]
            outputs = [Output(s.request.id, (), "cancelled", at_s=self.clock.now, index=s.index) for s in ended]
            self.tell(outputs, [len(s.tokens) - len(s.request.prompt) for s in ended])
        self.wake()

    def _begin_stretch(self) -> bool:
        """Begin decode steps that are alike; return whether there are some."""
        if not self._stretch_s or self.executor is not self.local or not self.local.undisturbed:
            return False
        steps = self.scheduler.alike_steps(self.local.answers.ends)
        if steps < 2:
            return False
        decoding = [Chunk("", sequence.computed, 1) for sequence in self.scheduler.cohorts[0].decoding]
        steps = min(steps, int(self._stretch_s / self.local.cost.batch(decoding)))
        if steps < 2:
            return False
        self._in_flight += 1
        self._stretch = self.local.stretch(decoding, steps)
        self._stretch_end = self.clock.at(self._stretch.end_s, self._end_stretch)
        return True

    def _shorten(self, stretch: Stretch) -> None:
        """Have a stretch end with the step that is in flight now."""
        shorter = stretch.until(self.clock.now)
        if shorter.steps < stretch.steps and self._stretch_end is not None:
            self._stretch_end.cancel()
            self._stretch = shorter
            self._stretch_end = self.clock.at(max(self.clock.now, shorter.end_s), self._end_stretch)

    def _end_stretch(self) -> None:
        stretch, self._stretch, self._stretch_end = self._stretch, None, None
        assert stretch is not None
        self._in_flight -= 1
        self.local.note(self.clock.now - stretch.begin_s, stretch.steps)
        if self.lost:
            return
        tokens = (TOKEN,) * stretch.steps
        got = self.scheduler.skip(stretch.steps, TOKEN)
        outputs = [Output(s.request.id, tokens, at_s=self.clock.now, index=s.index) for s, _ in got]
        self.tell(outputs, [start for _, start in got])
        self.wake()

    def _computed(self, step: Step, done: Future[StepResult]) -> None:
        """Go on with a step as the next event: what a future's callback raises is lost."""
        self.clock.after(0.0, partial(self._finish, step, done))

    def _finish(self, step: Step, done: Future[StepResult]) -> None:
        self._in_flight -= 1
        if self.lost:
            return
        error = done.exception()
        if isinstance(error, RankLost):
            self.scheduler.void(step)
        elif error is not None:
            raise error
        else:
            if self.whole and self.scheduler.journal is None:
                self.scheduler.retain()
            produced = self.scheduler.update(step, done.result())
            self._hand_on(produced)
            if any(each.finish for each in produced):
                self.tell_room()
        self.wake()

    def _hand_on(self, produced: list[Produced]) -> None:
        outputs, starts, now = [], [], self.clock.now
        for sequence, sampled, finish in produced:
            start = len(sequence.tokens) - len(sequence.request.prompt) - 1
            if not start or sequence.id in self._resumed:
                self._resumed.discard(sequence.id)
                outputs.append(_first(sequence, sampled, finish, now))
            else:
                outputs.append(
                    Output(sequence.request.id, (sampled.token,), finish, None, now, 0, index=sequence.index)
                )
            starts.append(start)
        self.tell(outputs, starts)


def _first(sequence: Sequence, sampled: SampledToken, finish: Any, now: float) -> Output:
    """Return the first output of an answer."""
    return Output(
        sequence.request.id,
        (sampled.token,),
        finish,
        at_s=now,
        scheduled_s=sequence.scheduled_s,
        waited_for_kv_s=sequence.waited_for_kv_s,
        index=sequence.index,
        cached_tokens=sequence.cached_tokens,
    )
