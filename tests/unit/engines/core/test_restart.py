"""Steps that are lost on their way, and sequences that are computed anew."""

from __future__ import annotations

import functools
from typing import Any

from elastic.engines.base import Request
from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.prefix_cache import block_hash
from elastic.engines.core.restart import RestartingScheduler
from elastic.engines.core.step import SequenceState, Step
from support.serving.simulated_executor import SimulatedExecutor, SimulatedMemory


class Serving:
    """A scheduler over a simulated executor, in blocks of 4 tokens, two to a sector."""

    def __init__(self, windows: tuple[int | None, ...] = (None,), **options: Any) -> None:
        self.blocks = BlockManager(functools.partial(SimulatedMemory, 50, (2,) * len(windows)), windows, 4)
        options = {"max_requests": 8, "max_batch_tokens": 16, **options}
        self.scheduler = RestartingScheduler(self.blocks, clock=lambda: 0.0, **options)
        self.executor = SimulatedExecutor(windows, 4)

    def add(self, name: str, prompt: int, max_tokens: int = 4, **options: Any) -> None:
        request = Request(tuple(ord(name[0]) + i for i in range(prompt)), max_tokens, id=name, **options)
        self.scheduler.add([SequenceState(f"{name}/{i}", request, i, i) for i in range(request.n)])

    def schedule(self) -> Step:
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def step(self) -> dict[str, int]:
        """Compute one step; return how many tokens of which sequence."""
        step = self.schedule()
        self.executor.execute(step)
        _, result = self.executor.compute()
        assert result is not None
        self.scheduler.update(step, result)
        self.blocks.check()
        return {chunk.sequence: len(chunk.tokens) for chunk in step.chunks}

    def tokens(self) -> dict[str, list[int]]:
        return {name: list(sequence.tokens) for name, sequence in self.scheduler.sequences.items()}


def test_a_void_step_leaves_its_sequences_where_they_were() -> None:
    serving = Serving()
    serving.add("a", 6)
    serving.add("b", 20)
    serving.step()
    before, computed = serving.tokens(), {n: s.computed for n, s in serving.scheduler.sequences.items()}
    step = serving.schedule()
    serving.scheduler.cancel("b/0")
    serving.scheduler.void(step)
    assert serving.tokens() == {"a/0": before["a/0"]}
    assert serving.scheduler.sequences["a/0"].computed == computed["a/0"] == 6
    assert serving.scheduler.take_removed() == ("b/0",)
    serving.blocks.check()


def test_what_is_restarted_is_computed_anew_before_others_and_shares_nothing_of_before() -> None:
    serving = Serving(max_requests=2)
    for name in "abc":
        serving.add(name, 8)
    assert serving.step() == {"a/0": 8, "b/0": 8}
    assert serving.step() == {"a/0": 1, "b/0": 1}
    before = serving.tokens()
    serving.scheduler.void(serving.schedule())
    assert serving.scheduler.restart() == 18
    assert len(serving.blocks.live) == 0
    assert serving.blocks.reusable_sectors() == 0
    assert serving.tokens() == before
    step = serving.schedule()
    assert step.removed == ("a/0", "b/0")
    assert [(chunk.sequence, chunk.start, len(chunk.tokens)) for chunk in step.chunks] == [
        ("a/0", 0, 10),
        ("b/0", 0, 6),
    ]
    assert [(state.id, len(state.generated)) for state in step.added] == [("a/0", 2), ("b/0", 2)]
    serving.blocks.check()


def test_a_restarted_prompt_begins_its_log_probabilities_anew_unless_they_were_told() -> None:
    serving = Serving()
    serving.add("a", 40, prompt_logprobs=0)
    serving.step()
    sequence = serving.scheduler.sequences["a/0"]
    assert sequence.prompt_logprobs is not None
    sequence.prompt_logprobs.append(None)
    serving.scheduler.restart()
    assert sequence.prompt_logprobs == []
    while len(sequence.tokens) == 40:
        serving.step()
    sequence.prompt_logprobs.append(None)
    serving.scheduler.restart()
    assert sequence.prompt_logprobs == [None]


def test_answers_that_wait_for_a_prompt_wait_on_when_it_is_restarted() -> None:
    serving = Serving()
    serving.add("a", 20, n=3)
    assert serving.step() == {"a/0": 16}
    assert serving.scheduler.restart() == 16
    assert serving.step() == {"a/0": 16}
    assert serving.step() == {"a/0": 4}
    assert serving.step() == {"a/0": 1, "a/1": 4, "a/2": 4}


def test_other_cohorts_share_the_live_sequences_out_anew() -> None:
    serving = Serving()
    for name in "abcd":
        serving.add(name, 4)
    serving.step()
    serving.scheduler.set_cohorts(2)
    steps = [serving.schedule(), serving.schedule()]
    assert [step.cohort for step in steps] == [0, 1]
    assert [len(step.chunks) for step in steps] == [2, 2]
    assert serving.scheduler.schedule() is None
    for step in steps:
        serving.scheduler.void(step)
    serving.scheduler.set_cohorts(1)
    assert len(serving.schedule().chunks) == 4


def test_it_is_told_what_each_step_has_written_when_it_is_over() -> None:
    serving = Serving()
    written: list[tuple[int, int, int, int]] = []
    serving.scheduler.written = lambda blocks, start, stop, copy: written.append((len(blocks[0]), start, stop, copy))
    serving.add("a", 6)
    step = serving.schedule()
    assert written == []
    serving.scheduler.cancel("a/0")
    serving.executor.execute(step)
    serving.scheduler.fail(step)
    assert written == [(2, 0, 6, 0)]


def test_what_is_kept_goes_on_from_where_it_was_and_what_cannot_is_told() -> None:
    serving = Serving()
    serving.add("a", 6)
    serving.add("b", 20)
    serving.add("c", 3, prompt_logprobs=0)
    while len(serving.tokens()["b/0"]) == 20:
        serving.step()
    serving.add("d", 9)
    step = serving.schedule()
    assert {chunk.sequence for chunk in step.chunks} >= {"a/0", "b/0", "d/0"}
    before, computed = serving.tokens(), {chunk.sequence: chunk.start for chunk in step.chunks}
    serving.scheduler.void(step)
    (unkeepable,) = serving.scheduler.unkeepable()
    assert unkeepable.id == "d/0"
    assert serving.scheduler.restart([unkeepable]) == 0
    serving.scheduler.keep()
    serving.blocks.check()
    assert serving.tokens() == before
    step = serving.schedule()
    assert set(step.removed) == computed.keys()
    assert {chunk.sequence: chunk.start for chunk in step.chunks} == computed
    assert {state.id for state in step.added} == computed.keys()
    tables = {name: sequence.table for name, sequence in serving.scheduler.sequences.items()}
    assert all(chunk.blocks == tuple(map(tuple, tables[chunk.sequence].blocks)) for chunk in step.chunks)


def test_a_void_step_over_the_place_of_older_tokens_leaves_too_little() -> None:
    serving = Serving(windows=(None, 8))
    serving.add("a", 30)
    serving.step()
    serving.scheduler.void(serving.schedule())
    assert [sequence.id for sequence in serving.scheduler.unkeepable()] == ["a/0"]
    assert serving.scheduler.restart(serving.scheduler.unkeepable()) == 16
    assert serving.scheduler.unkeepable() == []
    while len(serving.tokens()["a/0"]) == 30:
        serving.step()
    step = serving.schedule()
    assert [len(chunk.tokens) for chunk in step.chunks] == [1]
    serving.scheduler.void(step)
    assert serving.scheduler.unkeepable() == []


def test_what_was_held_while_layers_got_copies_shares_with_its_own_copy_alone() -> None:
    serving = Serving()
    serving.add("a", 8, 20)
    serving.step()
    held = serving.scheduler.hold(["a/0"])
    serving.scheduler.set_copies(2, 2)
    serving.add("b", 4, 20)
    serving.step()
    serving.scheduler.resume(held)
    for _ in range(10):
        steps = [serving.schedule(), serving.schedule()]
        for step in steps:
            serving.executor.execute(step)
        for step in steps:
            _, result = serving.executor.compute()
            assert result is not None
            serving.scheduler.update(step, result)
    (a,) = held
    assert a.cohort.copy == 1
    assert a.table.shared > 2
    name = b""  # as the first copy has them
    for i in range(a.table.shared):
        name = block_hash(name, a.tokens[i * 4 : (i + 1) * 4])
        assert name not in serving.blocks.pools[0].prefixes.blocks
