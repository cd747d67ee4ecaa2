"""Blocks are shared by the weights that computed them: the same tokens by others are something else."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from elastic.engines.base import Request, SampledToken
from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.restart import RestartingScheduler
from elastic.engines.core.step import ScheduledChunk, SequenceState, Step
from elastic.errors import Overloaded
from support.serving.simulated_executor import SimulatedExecutor, SimulatedMemory

SIZE = 2
FULL = b""
ELSEWHERE = b"weights of another rank"


class Weights(SimulatedExecutor):
    """An executor that notes by which weights each slot was computed, and looks what a sequence finds as it begins."""

    def __init__(self) -> None:
        super().__init__((None,), SIZE)
        self.present = 0, FULL
        self.written: dict[int, bytes] = {}
        self.planned: deque[bytes] = deque()  # the weights that were known as a step was
        self.received: set[str] = set()

    def use(self, form: bytes) -> None:
        if form != self.present[1]:
            self.present = self.present[0] + 1, form

    def compute(self, *, fail: bool = False) -> Any:
        self._form = self.planned.popleft()
        return super().compute(fail=fail)

    def _compute(self, chunk: ScheduledChunk, *, fail: bool) -> SampledToken | None:
        sequence, first = self.running[chunk.sequence], not self.running[chunk.sequence].computed
        token = super()._compute(chunk, fail=fail)
        slots = [sequence.blocks[0][i // SIZE] * SIZE + i % SIZE for i in range(sequence.computed)]
        if first and chunk.sequence not in self.received:
            found = [self.written[slot] for slot in slots[: chunk.start]]
            behind = list(itertools.dropwhile(lambda form: form == FULL, found))
            assert behind == [self._form] * len(behind), "others have computed what it shares"
        for slot in slots[chunk.start :]:
            self.written[slot] = self.present[1]
        return token


class Serving(RuleBasedStateMachine):
    """Requests of few different beginnings come and end, while the weights change at any moment."""

    @initialize(cohorts=st.integers(1, 2))
    def begin(self, cohorts: int) -> None:
        self.blocks = BlockManager(functools.partial(SimulatedMemory, 40, (2,)), (None,), SIZE)
        self.scheduler = RestartingScheduler(
            self.blocks, max_requests=4, max_batch_tokens=7, cohorts=cohorts, clock=lambda: 0.0
        )
        self.executor = Weights()
        self.scheduler.weights = lambda: self.executor.present
        self.names = map(str, itertools.count())
        self.computed: deque[tuple[Step, Any]] = deque()
        self.held: list[Any] = []

    @rule(form=st.sampled_from([FULL, FULL, b"int4", b"2:4"]))
    def change(self, form: bytes) -> None:
        self.executor.use(form)

    @rule(prompt=st.integers(1, 12), most=st.integers(1, 8), n=st.integers(1, 2), kind=st.integers(0, 1))
    def submit(self, prompt: int, most: int, n: int, kind: int) -> None:
        self.scheduler.add(self.states(prompt, most, n, kind))

    def states(self, prompt: int, most: int, n: int = 1, kind: int = 0) -> list[SequenceState]:
        request = Request((0,) * 4 + (kind,) * prompt, most, n=n, id=next(self.names))
        return [SequenceState(f"{request.id}/{i}", request, i, 0) for i in range(n)]

    @rule(prompt=st.integers(1, 12), share=st.floats(0, 1), exact=st.booleans())
    def receive(self, prompt: int, share: float, exact: bool) -> None:
        """Have a sequence come with what another rank has computed of it."""
        (state,) = self.states(prompt, 4)
        tokens = state.request.prompt
        computed = max(1, int(share * (len(tokens) - 1)))
        try:
            table, shared = self.blocks.reserve(len(tokens) + 4, tokens, computed)
        except Overloaded:
            return
        computed = max(computed, shared)
        for i in range(shared, computed):
            slot = table.blocks[0][i // SIZE] * SIZE + i % SIZE
            self.executor.written[slot] = FULL if exact else ELSEWHERE
            self.executor._content[0, *divmod(slot, SIZE)] = i, hash(tokens[: i + 1])
        table.private = not exact
        self.executor.received.add(state.id)
        self.blocks.attach(state.id, table)
        self.scheduler.add([state], {state.id: computed})

    @rule(steps=st.sampled_from([1, 1, 8]))
    def plan(self, steps: int) -> None:
        for _ in range(steps):
            self.plan_step()
            if steps > 1:
                self.compute_all()
                self.note_all()

    def plan_step(self) -> None:
        step = self.scheduler.schedule()
        if step is not None:
            self.executor.planned.append(self.executor.present[1])
            self.executor.execute(step)

    @rule()
    def compute_all(self) -> None:
        while self.executor._queue:
            self.computed.append(self.executor.compute())

    @precondition(lambda self: self.computed)
    @rule()
    def note_all(self) -> None:
        while self.computed:
            self.scheduler.update(*self.computed.popleft())
        self.blocks.check()

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        request = data.draw(st.sampled_from(sorted({name.split("/")[0] for name in self.scheduler.sequences})))
        answers = [name for name in self.scheduler.sequences if name.split("/")[0] == request]
        if not any(self.scheduler.sequences[name].in_flight for name in answers):
            self.held.append(self.scheduler.hold(answers))

    @precondition(lambda self: self.held)
    @rule()
    def resume(self) -> None:
        self.scheduler.resume(self.held.pop())

    @precondition(lambda self: self.scheduler.sequences)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.scheduler.cancel(data.draw(st.sampled_from(list(self.scheduler.sequences))))

    def serve(self, prompt: int) -> int:
        """Serve a request alone; return how many of its tokens were there."""
        states = self.states(prompt, 1)
        self.scheduler.add(states)
        sequence = self.scheduler.sequences[states[0].id]
        while states[0].id in self.scheduler.sequences:
            self.plan_step()
            self.compute_all()
            self.note_all()
        return sequence.cached_tokens


class TestServing(Serving.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.long
class TestServingLong(Serving.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=4000, stateful_step_count=60)


@pytest.fixture
def serving() -> Serving:
    serving = Serving()
    serving.begin(1)
    return serving


def test_a_beginning_is_shared_under_the_same_weights_and_by_all_others_where_the_full_ones_computed_it(
    serving: Serving,
) -> None:
    found = []
    for form in (b"int4", b"int4", FULL, FULL, b"2:4", b"int4"):
        serving.change(form)
        found.append(serving.serve(8))
    assert found == [0, 10, 0, 10, 10, 10]


def test_what_follows_exact_blocks_is_shared_by_those_under_the_same_weights(serving: Serving) -> None:
    serving.serve(4)
    found = []
    for form in (b"int4", b"int4", b"2:4", FULL, b"int4"):
        serving.change(form)
        found.append(serving.serve(10))
    assert found == [8, 12, 8, 8, 12]


def test_weights_that_change_in_the_middle_of_a_sequence_leave_what_it_had(serving: Serving) -> None:
    serving.scheduler.add(serving.states(12, 8))
    serving.plan_step()  # 7 of its tokens
    serving.compute_all()
    serving.note_all()
    serving.change(b"int4")
    serving.plan(8)
    serving.change(FULL)
    assert serving.serve(12) == 6
    assert serving.serve(12) == 14


def test_what_a_step_computed_by_other_weights_than_it_was_planned_for_is_nobody_elses(
    serving: Serving,
) -> None:
    serving.scheduler.add(serving.states(12, 1))
    serving.plan_step()
    serving.change(b"int4")
    serving.compute_all()
    serving.note_all()
    serving.plan(8)
    serving.change(FULL)
    assert serving.serve(12) == 0


def test_a_sequence_that_was_handed_over_and_comes_back_knows_what_changed_meanwhile(serving: Serving) -> None:
    states = serving.states(12, 8)
    serving.scheduler.add(states)
    serving.plan_step()
    serving.compute_all()
    serving.note_all()
    held = serving.scheduler.hold([states[0].id])
    serving.change(b"int4")
    assert serving.scheduler.schedule() is None
    serving.change(FULL)
    assert serving.scheduler.schedule() is None
    serving.scheduler.resume(held)
    assert held[0].table.private or held[0].table.form
