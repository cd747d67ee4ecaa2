"""A state machine of the scheduler on a simulated executor: whatever happens, every sequence ends as it would alone."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic.engines.base import Request
from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.scheduler import Scheduler
from elastic.engines.core.sequence import Sequence
from elastic.engines.core.step import SequenceState, Step
from elastic.engines.core.step_budget import CostBudget
from elastic.errors import CapacityError, Overloaded
from elastic.kvcache.storage.budget import WeightsShare
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.sector_space import BlockGroup
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.page_pool import PagePool
from elastic.planning.pipeline.chunk_cost import ChunkCost
from support.serving.simulated_executor import SimulatedExecutor, SimulatedMemory, next_token

SECTORS = 16
PAGE = 3 * 4096  # a sector; it holds 2, 3 or 4 blocks
MAX_REQUESTS = 6
MAX_BATCH_TOKENS = 16
LAYOUTS: dict[str, tuple[tuple[int | None, ...], tuple[int, ...]]] = {  # windows and blocks in a sector, by group
    "full": ((None,), (3,)),
    "sliding": ((8, None), (4, 2)),
    "two shapes": ((None, None), (2, 3)),
}


def alone(state: SequenceState) -> list[int]:
    """The tokens that a sequence gets from the simulated model, with nothing else there."""
    request, tokens = state.request, [*state.request.prompt, *state.generated]
    generated = list(state.generated)
    while len(generated) < request.max_tokens and not (generated and generated[-1] in request.stop_tokens):
        generated.append(next_token(state.seed, tokens))
        tokens.append(generated[-1])
    return generated


class PagedMemory(BlockMemory):
    """Block memory on the CPU, with what the machine does to a `SimulatedMemory`."""

    def __init__(self, sectors: int, blocks_per_sector: tuple[int, ...], **asks: Any) -> None:
        total = sectors * PAGE
        self.pages = PagePool("cpu#test", MemfdBackend(PAGE), total, ready_pages=0)
        kv = KVPool(self.pages, total, idle_share=1.0, ready_share=0)
        self.share = WeightsShare(kv)
        self.reserved = 0
        groups = [BlockGroup((layer,), PAGE // n) for layer, n in enumerate(blocks_per_sector)]
        super().__init__(kv, groups, **asks)
        assert tuple(map(self.blocks_per_sector, range(len(groups)))) == blocks_per_sector

    @property
    def maximum(self) -> int:
        return self.kv.limits.maximum

    @property
    def limit(self) -> int:
        return self.kv.limits.limit

    @limit.setter
    def limit(self, sectors: int) -> None:
        self.kv.resize(min(sectors, self.maximum) * self.sector_pages * self.kv.pool.page_bytes)

    def take(self, sectors: int) -> bool:
        if not self.share.take_from_cache(sectors):
            return False
        self.pages.reserve("layer", sectors)
        self.reserved += sectors
        return True

    def give(self, sectors: int) -> None:
        self.pages.unreserve("layer", sectors)
        self.reserved -= sectors
        self.share.give_to_cache(sectors)

    def check(self) -> None:
        super().check()
        with self.lock:
            self.kv.retire_ended()
            self.pages.check()

    def close(self) -> None:
        super().close()
        self.kv.trim()
        assert self.pages.free_pages + self.reserved == self.pages.budget_pages


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go, fail and move between engines, while weights take memory and limits change."""

    layout = "full"
    share = True

    @initialize(cohorts=st.integers(1, 3), even=st.booleans())
    def begin(self, cohorts: int, even: bool) -> None:
        windows, sizes = LAYOUTS[self.layout]
        self.now = 0.0
        self.blocks = BlockManager(functools.partial(self.open_memory, sizes), windows, 4, self.share)
        self.memory: Any = self.blocks.memory
        self.scheduler = Scheduler(
            self.blocks,
            max_requests=MAX_REQUESTS,
            max_batch_tokens=MAX_BATCH_TOKENS,
            cohorts=cohorts,
            clock=lambda: self.now,
        )
        if even:  # steps of equal cost
            self.scheduler.budget = CostBudget(ChunkCost(1.0, 1.0, 2.0, 4.0, 2.0), 3, MAX_BATCH_TOKENS)
        self.executor = SimulatedExecutor(windows, 4)
        self.names = itertools.count()
        self.states: dict[str, SequenceState] = {}  # as they came here
        self.expected: dict[str, list[int]] = {}
        self.heard: dict[str, list[int]] = {}
        self.live: set[str] = set()
        self.arrived: list[str] = []  # in this order
        self.waiting: set[str] = set()
        self.in_flight: list[Step] = []
        self.taken: list[int] = []
        self.away: list[tuple[SequenceState, ...]] = []
        self.held: list[list[Sequence]] = []

    def open_memory(self, blocks_per_sector: tuple[int, ...], **asks: Any) -> Any:
        return SimulatedMemory(SECTORS, blocks_per_sector, **asks)

    # -- what happens

    @rule(
        prompts=st.lists(st.sampled_from([1, 3, 4, 8, 9, 13, 17, 24]), min_size=1, max_size=4),
        tokens=st.integers(1, 14),
        alphabet=st.integers(1, 2),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        stops=st.booleans(),
    )
    def arrive(self, prompts: list[int], tokens: int, alphabet: int, n: int, stops: bool) -> None:
        for prompt in prompts:
            ids = tuple(i % alphabet for i in range(prompt))  # few different prompts, so that beginnings are shared
            request = Request(ids, tokens, n=n, stop_tokens=(0,) if stops else (), id=f"r{next(self.names)}")
            self.add(tuple(SequenceState(f"{request.id}/{i}", request, i, i) for i in range(n)))

    def add(self, states: tuple[SequenceState, ...]) -> None:
        request = states[0].request
        tokens = len(request.prompt) + request.max_tokens
        needed = self.blocks._sectors_for(tokens)
        try:
            self.scheduler.add(states)
        except CapacityError:
            assert needed > self.memory.maximum
        except Overloaded:
            assert self.memory.limit < needed <= self.memory.maximum
        else:
            for state in states:
                self.states[state.id] = state
                self.expected[state.id] = alone(state)
                self.heard[state.id] = list(state.generated)
                self.live.add(state.id)
                self.waiting.add(state.id)
                self.arrived = [name for name in self.arrived if name != state.id] + [state.id]

    @rule(count=st.sampled_from([1, 3, 10, 30]))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.begin_step()
            if self.in_flight:
                self.end_step(fail=False)

    @rule()
    def schedule(self) -> None:
        self.begin_step()

    @precondition(lambda self: self.in_flight)
    @rule(fail=st.sampled_from([False] * 9 + [True]))
    def compute(self, fail: bool) -> None:
        self.end_step(fail=fail)

    def begin_step(self) -> bool:
        self.now += 1.0
        short_before = self.scheduler.short_of_kv_s
        step = self.scheduler.schedule()
        assert self.scheduler.short_of_kv_s - short_before in (0.0, 1.0)
        if step is None:
            return False
        assert sum(len(chunk.tokens) for chunk in step.chunks) <= MAX_BATCH_TOKENS
        assert step.cohort not in {other.cohort for other in self.in_flight}
        if self.scheduler.stalled:
            assert not step.added, "a newcomer took room while a live sequence found none"
        busy = {chunk.sequence for other in self.in_flight for chunk in other.chunks}
        assert not busy & {chunk.sequence for chunk in step.chunks}
        for state in step.added:
            assert self.scheduler.sequences[state.id].scheduled_s == self.now
            self.waiting.remove(state.id)
            last = self.arrived.index(state.id)
            overtaken = [name for name in self.arrived[:last] if name in self.waiting & self.live]
            assert not any(self.states[name].index == 0 for name in overtaken), "later answers alone may wait longer"
        self.in_flight.append(step)
        self.executor.execute(step)
        return True

    def end_step(self, *, fail: bool) -> None:
        step, result = self.executor.compute(fail=fail)
        self.in_flight.remove(step)
        if result is None:
            failed = {sequence.id for sequence in self.scheduler.fail(step)}
            assert failed == {chunk.sequence for chunk in step.chunks} & (self.live - self.waiting)
            self.live -= failed
            return
        for sequence, sampled, finish in self.scheduler.update(step, result):
            tokens = self.heard[sequence.id]
            tokens.append(sampled.token)
            assert tokens == self.expected[sequence.id][: len(tokens)]
            assert (finish is not None) is (tokens == self.expected[sequence.id])
            if finish is not None:
                self.live.remove(sequence.id)
                assert finish == ("stop" if tokens[-1] in sequence.request.stop_tokens else "length")

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.cancel(name) is not None
        assert self.scheduler.cancel(name) is None
        self.live.remove(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        """A request goes to another engine, all of its answers that have not ended."""
        request = self.states[data.draw(st.sampled_from(sorted(self.live)))].request
        states = []
        for name in sorted(name for name in self.live if self.states[name].request == request):
            state = self.scheduler.export(name)
            assert state is not None
            assert list(state.generated) == self.heard[name]
            states.append(state)
            self.live.remove(name)
        self.away.append(tuple(states))

    @precondition(lambda self: self.away)
    @rule()
    def come_back(self) -> None:
        self.add(self.away.pop(0))

    @precondition(lambda self: self.live and not self.in_flight)
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        """A request stops, with its blocks."""
        request = self.states[data.draw(st.sampled_from(sorted(self.live)))].request
        names = sorted(name for name in self.live if self.states[name].request == request)
        held = self.scheduler.hold(names)
        assert [sequence.id for sequence in held] == names
        self.held.append(held)
        self.live -= set(names)

    @precondition(lambda self: self.held)
    @rule()
    def resume(self) -> None:
        held = self.held.pop(0)
        self.scheduler.resume(held)
        names = [sequence.id for sequence in held]
        self.live |= set(names)
        begun = {self.states[name].request.id for name in self.live - self.waiting}
        others = [name for name in self.arrived if name not in names]
        follow = [name for name in others if name in self.waiting and self.states[name].request.id in begun]
        # they are the first again, behind the answers of requests that have begun
        self.arrived = [*follow, *names, *(name for name in others if name not in follow)]

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        for sequence in self.held.pop(0):
            self.scheduler.release(sequence)

    @rule(sectors=st.integers(1, 3))
    def weights_come(self, sectors: int) -> None:
        if self.memory.take(sectors):
            self.taken.append(sectors)

    @precondition(lambda self: self.taken)
    @rule()
    def weights_leave(self) -> None:
        self.memory.give(self.taken.pop())

    @rule(limit=st.sampled_from([0, 4, 8, SECTORS, SECTORS, SECTORS]))
    def resize(self, limit: int) -> None:
        self.memory.limit = limit

    # -- what always holds

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check()
        self.memory.check()
        assert self.memory.used_sectors + self.blocks.promised_sectors() <= self.memory.maximum, "not all could end"

    @invariant()
    def nothing_is_computed_twice(self) -> None:
        if not hasattr(self, "executor"):
            return
        for name in self.live - self.waiting:
            assert self.executor.computed.get(name, 0) <= len(self.states[name].request.prompt) + len(self.heard[name])

    def teardown(self) -> None:
        """With all the memory there is, everything ends."""
        if not hasattr(self, "blocks"):
            return
        self.memory.limit = SECTORS
        while self.held:
            self.resume()
        for _ in range(5000):
            went_on = self.begin_step()
            if self.in_flight:
                self.end_step(fail=False)
            elif not went_on:
                break
        assert not self.live, f"nothing goes on, and {sorted(self.live)} have not ended"
        assert not self.scheduler.has_work
        assert self.memory.used_sectors == 0
        self.blocks_are_conserved()
        self.executor.remove(self.scheduler.take_removed())
        assert not self.executor.running, "the executor was not told to forget them"
        self.memory.close()


class UnsharedMachine(SchedulerMachine):
    """The same where every sequence computes all of its prompt."""

    share = False


class SlidingMachine(SchedulerMachine):
    """The same with layers that see a window beside others."""

    layout = "sliding"


class TwoShapesMachine(SchedulerMachine):
    """The same with two groups of layers whose blocks are of different sizes."""

    layout = "two shapes"


class PagedMachine(SchedulerMachine):
    """The same over pages: `BlockMemory` beside weights that take and give memory."""

    def open_memory(self, blocks_per_sector: tuple[int, ...], **asks: Any) -> Any:
        return PagedMemory(SECTORS, blocks_per_sector, **asks)

    @rule()
    def trim(self) -> None:
        self.memory.kv.trim()
