"""What goes into a step, in which order, and what is told of it. The machine in `tests/laws` holds the rest."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

from elastic.engines.base import Request, SampledToken, TokenLogprobs
from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.scheduler import Scheduler
from elastic.engines.core.sequence import Produced
from elastic.engines.core.step import SequenceState, Step, StepResult
from elastic.engines.core.step_budget import short_step
from support.serving.simulated_executor import SimulatedExecutor, SimulatedMemory


class Serving:
    """A scheduler over a simulated executor, in blocks of 4 tokens, two to a sector."""

    def __init__(self, *, sectors: int = 50, share: bool = True, **options: Any) -> None:
        self.now = 0.0
        memory = functools.partial(SimulatedMemory, sectors, (2,))
        self.blocks = BlockManager(memory, (None,), 4, share)
        options = {"max_requests": 8, "max_batch_tokens": 16, **options}
        self.scheduler = Scheduler(self.blocks, clock=lambda: self.now, **options)
        self.executor = SimulatedExecutor((None,), 4)

    def add(self, name: str, prompt: int, max_tokens: int = 4, **options: Any) -> None:
        """Queue a request whose prompt no other has; its answers are `name/0` and so on."""
        tokens = tuple(ord(name[0]) + i for i in range(prompt))
        request = Request(tokens, max_tokens, id=name, **options)
        self.scheduler.add([SequenceState(f"{name}/{i}", request, i, i) for i in range(request.n)])

    def schedule(self) -> Step | None:
        """Begin a step."""
        step = self.scheduler.schedule()
        if step is not None:
            self.executor.execute(step)
        return step

    def step(self) -> tuple[dict[str, int], list[Produced]]:
        """Compute one step: how many tokens of which sequence, and what came of it."""
        step = self.schedule()
        assert step is not None
        _, result = self.executor.compute()
        assert result is not None
        self.blocks.check()
        return shape(step), self.scheduler.update(step, result)


def shape(step: Step) -> dict[str, int]:
    """The tokens of each sequence in a step."""
    return {chunk.sequence: len(chunk.tokens) for chunk in step.chunks}


def test_prompts_fill_what_decoding_leaves_of_a_step() -> None:
    serving = Serving()
    serving.add("a", 6)
    assert serving.step()[0] == {"a/0": 6}
    serving.add("b", 20)
    serving.add("c", 10)
    assert serving.step()[0] == {"a/0": 1, "b/0": 15}
    assert serving.step()[0] == {"a/0": 1, "b/0": 5, "c/0": 10}
    assert serving.step()[0] == {"a/0": 1, "b/0": 1, "c/0": 1}


def test_steps_whose_end_is_waited_for_have_fewer_tokens_of_prompts() -> None:
    serving = Serving(max_batch_tokens=512, sectors=400)
    serving.add("a", 8)
    serving.step()
    serving.add("b", 1200)
    serving.scheduler.short_until_s = 1.0
    assert serving.step()[0] == {"a/0": 1, "b/0": 127}
    serving.now = 1.0
    assert serving.step()[0] == {"a/0": 1, "b/0": 511}


def test_short_steps_compute_all_that_decode_and_so_many_tokens_of_prompts_as_are_no_dearer_by_themselves() -> None:
    assert [short_step(tokens, 10) for tokens in (5, 10, 50, 74, 100, 512)] == [5, 10, 50, 74, 74, 135]


def test_what_comes_back_with_the_blocks_that_all_others_lack_takes_the_place_of_one_of_them() -> None:
    """As after a move that failed: it is none of the most that may live, and the only one that can end."""
    serving = Serving(sectors=2, max_requests=1)
    serving.add("b", 1, 3)
    serving.step()
    held = serving.scheduler.hold(["b/0"])
    serving.add("a", 8, 8)
    while serving.schedule() is not None:
        serving.scheduler.update(*serving.executor.compute())  # type: ignore[arg-type]
    assert (serving.scheduler.stalled, len(serving.scheduler.sequences["a/0"].tokens)) == (1, 13)
    serving.scheduler.resume(held)
    ended = list[str]()
    while serving.scheduler.has_work:
        ended += [produced.sequence.id for produced in serving.step()[1] if produced.finish]
    assert ended == ["b/0", "a/0"]


def test_at_most_so_many_live_and_the_others_come_in_order() -> None:
    serving = Serving(max_requests=2)
    for name in "abc":
        serving.add(name, 3, 1 if name == "b" else 3)
    assert serving.step()[0] == {"a/0": 3, "b/0": 3}
    assert serving.step()[0] == {"a/0": 1, "c/0": 3}


def test_a_token_says_why_it_is_the_last() -> None:
    serving = Serving()
    serving.add("a", 3, 2)
    assert [produced.finish for produced in serving.step()[1]] == [None]
    assert [produced.finish for produced in serving.step()[1]] == ["length"]
    serving.add("b", 3, 5, stop_tokens=tuple(range(7)))
    assert [produced.finish for produced in serving.step()[1]] == ["stop"]
    assert not serving.scheduler.has_work
    assert serving.scheduler.take_removed() == ("b/0",), "the other one went with a step"
    assert serving.scheduler.take_removed() == ()


def test_an_answer_that_cannot_go_on_ends_alone() -> None:
    serving = Serving()
    serving.add("a", 3)
    serving.add("b", 3)
    step = serving.schedule()
    assert step is not None
    result = StepResult((SampledToken(0, error="no token is allowed"), SampledToken(1)))
    failed, other = serving.scheduler.update(step, result)
    assert (failed.sequence.id, failed.finish) == ("a/0", "failed")
    assert len(failed.sequence.tokens) == 3
    assert (other.sequence.id, other.finish) == ("b/0", None)
    assert serving.scheduler.sequences.keys() == {"b/0"}


def test_answers_of_one_request_compute_its_prompt_once() -> None:
    serving = Serving()
    serving.add("a", 11, n=3)
    serving.add("b", 4)
    assert serving.step()[0] == {"a/0": 11, "b/0": 4}
    chunks, _ = serving.step()
    assert list(chunks.items()) == [("a/0", 1), ("b/0", 1), ("a/1", 3), ("a/2", 3)]
    cached = {name: sequence.cached_tokens for name, sequence in serving.scheduler.sequences.items()}
    assert cached == {"a/0": 0, "a/1": 8, "a/2": 8, "b/0": 0}
    tables = [serving.blocks.tables[f"a/{i}"].blocks[0] for i in range(3)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3


def test_answers_do_not_wait_for_one_that_comes_with_all_but_the_last_token_of_their_prompt() -> None:
    serving = Serving()
    tokens = tuple(range(11))
    table, _ = serving.blocks.reserve(15, tokens, 10)
    serving.blocks.attach("a/0", table)
    request = Request(tokens, 4, id="a", n=3)
    serving.scheduler.add([SequenceState(f"a/{i}", request, i, i) for i in range(3)], {"a/0": 10})
    step = serving.scheduler.schedule()
    assert step is not None
    assert set(shape(step)) == {"a/0", "a/1", "a/2"}


def test_answers_compute_the_prompt_themselves_where_nothing_is_shared() -> None:
    serving = Serving(share=False, max_batch_tokens=40)
    serving.add("a", 11, n=3)
    assert serving.step()[0] == {"a/0": 11, "a/1": 11, "a/2": 11}


def test_the_next_answer_computes_the_prompt_if_the_first_is_cancelled() -> None:
    serving = Serving()
    serving.add("a", 20, n=3)
    serving.add("b", 4)
    assert serving.step()[0] == {"a/0": 16}
    assert serving.scheduler.cancel("a/0") is not None
    assert serving.step()[0] == {"a/1": 4, "b/0": 4}, "of the 20 tokens 16 are there already"
    assert serving.scheduler.cancel("a/2") is not None
    assert serving.step()[0] == {"a/1": 1, "b/0": 1}


def test_cancelling_answers_costs_as_much_for_each_however_many_there_are() -> None:
    def operations(answers: int) -> int:
        """Bytecodes of the scheduler's own file."""
        serving, count = Serving(), 0
        serving.add("a", 20, n=answers)

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal count
            if not frame.f_code.co_filename.endswith("scheduler.py"):
                return None
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for answer in range(answers):
                serving.scheduler.cancel(f"a/{answer}")
        finally:
            sys.settrace(before)
        assert not serving.scheduler.sequences
        return count

    assert operations(320) < 20 * operations(32)


def test_a_cancelled_sequence_gives_its_blocks_back_when_its_step_is_over() -> None:
    serving = Serving()
    serving.add("a", 8)
    step = serving.schedule()
    assert step is not None
    cancelled = serving.scheduler.cancel("a/0")
    assert cancelled is not None
    assert serving.blocks.memory.used_sectors == 1, "the step writes into them"
    assert serving.scheduler.cancel("a/0") is None
    _, result = serving.executor.compute()
    assert result is not None
    assert serving.scheduler.update(step, result) == []
    assert serving.blocks.memory.used_sectors == 0
    assert not serving.scheduler.has_work


def test_a_step_that_fails_ends_the_sequences_in_it_and_no_other() -> None:
    serving = Serving(max_batch_tokens=8)
    serving.add("a", 8)
    serving.add("b", 8)
    step = serving.schedule()
    assert step is not None
    serving.executor.compute(fail=True)
    assert [sequence.id for sequence in serving.scheduler.fail(step)] == ["a/0"]
    assert serving.step()[0] == {"b/0": 8}


def test_what_has_left_goes_on_elsewhere_with_the_same_tokens() -> None:
    here, there = Serving(), Serving(max_batch_tokens=5)
    here.add("a", 9, 6)
    tokens = [produced.sampled.token for _ in range(3) for produced in here.step()[1]]
    state = here.scheduler.export("a/0")
    assert state is not None
    assert state.generated == tuple(tokens)
    assert here.scheduler.export("a/0") is None
    there.scheduler.add([state])
    while there.scheduler.has_work:
        tokens += [produced.sampled.token for produced in there.step()[1]]
    alone = Serving()
    alone.add("a", 9, 6)
    assert tokens == [produced.sampled.token for _ in range(6) for produced in alone.step()[1]]


def test_cohorts_are_in_flight_at_the_same_time_and_have_as_many_sequences_each() -> None:
    serving = Serving(cohorts=2, max_batch_tokens=64)
    for name in "abcd":
        serving.add(name, 3)
    steps = [serving.schedule(), serving.schedule()]
    assert serving.schedule() is None
    assert [step and step.cohort for step in steps] == [0, 1]
    assert [len(step.chunks) for step in steps if step] == [2, 2]
    for step in steps:
        _, result = serving.executor.compute()
        assert step is not None
        assert result is not None
        assert len(serving.scheduler.update(step, result)) == 2
    assert serving.step()[0] == {"a/0": 1, "b/0": 1}


def test_waiting_for_blocks_is_told_from_waiting_for_a_turn() -> None:
    serving = Serving(sectors=2)
    serving.add("a", 5, 10)
    serving.step()
    serving.add("b", 5, 10)
    for _ in range(3):
        serving.now += 1.0
        assert serving.step()[0] == {"a/0": 1}
    assert serving.scheduler.stalled == 0, "it does not live yet"
    assert serving.scheduler.short_of_kv_s == 2.0, "since the first step that had no room for it"
    serving.scheduler.cancel("a/0")
    serving.now += 1.0
    step = serving.schedule()
    assert step is not None
    sequence = serving.scheduler.sequences["b/0"]
    assert sequence.scheduled_s == serving.now
    assert sequence.waited_for_kv_s == 3.0


def test_live_sequences_that_find_no_block_are_counted_and_let_nobody_in() -> None:
    serving = Serving(sectors=3, max_batch_tokens=8)
    serving.add("a", 4, 16)
    serving.add("b", 4, 16)
    serving.add("c", 3, 1)
    stalled = 0
    while serving.scheduler.has_work:
        step = serving.schedule()
        assert step is not None
        if serving.scheduler.stalled:
            stalled += 1
            assert not step.added
        _, result = serving.executor.compute()
        assert result is not None
        serving.scheduler.update(step, result)
    assert stalled


def test_what_is_cancelled_behind_a_request_that_waits_is_kept_no_longer() -> None:
    serving = Serving(max_requests=1)
    serving.add("a", 4, 40)
    serving.step()
    references = []
    for number in range(500):
        serving.add(f"b{number}", 4)
        references.append(weakref.ref(serving.scheduler.sequences[f"b{number}/0"].request))
        if number % 100:
            serving.scheduler.cancel(f"b{number}/0")
    assert sum(reference() is not None for reference in references) <= 5 + 2 * (1 + 5) + 64
    order = list[str]()
    while serving.scheduler.has_work:
        order += [produced.sequence.id for produced in serving.step()[1] if produced.finish]
    assert order == ["a/0", *(f"b{number}/0" for number in range(0, 500, 100))]


def test_log_probabilities_of_a_prompt_are_gathered_over_its_chunks_and_need_all_of_it() -> None:
    serving = Serving(max_batch_tokens=8)
    serving.add("a", 12)
    while serving.scheduler.has_work:
        serving.step()
    request = Request(tuple(ord("a") + i for i in range(12)), 2, prompt_logprobs=0)
    serving.scheduler.add([SequenceState("b", request, 0, 0)])
    produced: list[Produced] = []
    while not produced:
        step = serving.schedule()
        assert step is not None
        (chunk,) = step.chunks
        logprobs = tuple(TokenLogprobs(token, 0.0, 1) if token > ord("a") else None for token in chunk.tokens)
        sampled = (SampledToken(1),) if chunk.samples else ()
        produced = serving.scheduler.update(step, StepResult(sampled, {"b": logprobs}))
    found = produced[0].sequence.prompt_logprobs
    assert found is not None
    assert [logprob and logprob.token for logprob in found] == [None, *request.prompt[1:]]
