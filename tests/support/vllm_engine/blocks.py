"""The protocol of vLLM's block pool without vLLM, simulated ranks, and one machine for the stub and the real pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic.engines.vllm.kv.admission import GroupDemand, PromiseLedger
from elastic.engines.vllm.kv.capacity import BlockCapacity
from elastic.engines.vllm.kv.coordinator import CapacityCoordinator
from elastic.engines.vllm.kv.moves import move_blocks
from elastic.engines.vllm.kv.orders import Handshake, RankState, StepOrders, StepReport

BLOCKS = 32
PER_SECTOR = 4
SECTORS = BLOCKS // PER_SECTOR


@dataclass(eq=False)
class StubBlock:
    """A block of the stub pool."""

    block_id: int
    ref_cnt: int = 0
    block_hash: str | None = None


class StubQueue:
    """Free blocks, the first to be taken first."""

    def __init__(self, blocks: list[StubBlock]) -> None:
        self.blocks = blocks

    def remove(self, block: StubBlock) -> None:
        self.blocks.remove(block)

    def prepend_n(self, blocks: list[StubBlock]) -> None:
        self.blocks[:0] = blocks

    def append(self, block: StubBlock) -> None:
        self.blocks.append(block)

    def get_all_free_blocks(self) -> list[StubBlock]:
        return list(self.blocks)


class StubBlockPool:
    """What is used of vLLM's `BlockPool`, in its order: blocks without a cached prefix are taken first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [StubBlock(number) for number in range(blocks)]
        self.free_block_queue = StubQueue(self.blocks[1:])
        self.num_gpu_blocks = blocks

    def get_num_free_blocks(self) -> int:
        return len(self.free_block_queue.blocks)

    def get_new_blocks(self, count: int) -> list[StubBlock]:
        taken = [self.free_block_queue.blocks.pop(0) for _ in range(count)]
        for block in taken:
            block.ref_cnt, block.block_hash = 1, None
        return taken

    def free_blocks(self, blocks: list[StubBlock]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.block_hash is None:
                self.free_block_queue.prepend_n([block])
            elif block.ref_cnt == 0:
                self.free_block_queue.append(block)

    def touch(self, blocks: list[StubBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def move_block_hashes(self, source: StubBlock, target: StubBlock) -> None:
        source.block_hash, target.block_hash = None, source.block_hash

    def _maybe_evict_cached_block(self, block: StubBlock) -> bool:
        block.block_hash = None
        return True

    def set_hash(self, block: StubBlock, key: str) -> None:
        """Have a block be found as a cached prefix."""
        block.block_hash = key


def make_coordinator(blocks: int, ledger: PromiseLedger | None = None) -> CapacityCoordinator:
    """Make one over a stub pool; without a ledger, admission is left to vLLM, and no request is known."""
    ledger = ledger or PromiseLedger([], longest=0, binding=False)
    return CapacityCoordinator(BlockCapacity(StubBlockPool(blocks)), ledger)


@dataclass
class SimulatedRank:
    """A worker that maps what it is told, now or one step later, unless pages fail."""

    target: int = 3
    most: int = SECTORS
    mapped: int = 3
    sequence: int = 0
    broken: bool = False
    waiting: StepOrders | None = None

    def state(self) -> RankState:
        limit = self.mapped if self.broken else SECTORS
        most = max(self.mapped, self.most)
        return RankState(self.sequence, self.mapped, min(self.target, limit), min(most, limit))

    def before_step(self, orders: StepOrders, *, late: bool) -> None:
        self.finish()
        if orders.sequence == self.sequence:
            return
        self.mapped = min(self.mapped, orders.sectors)
        self.waiting = orders
        if not late:
            self.finish()

    def finish(self) -> None:
        """End what was begun beside a step."""
        if self.waiting is not None:
            self.sequence = self.waiting.sequence
            self.mapped = self.mapped if self.broken else self.waiting.sectors
            self.waiting = None


@dataclass
class SimulatedRequest:
    """A request that may come to have `promised` blocks."""

    promised: int
    blocks: list[Any] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    """What is in them."""


class CapacityMachine(RuleBasedStateMachine):
    """Requests, ranks and limits in any order: nothing that is used is unmapped, and what was promised is there."""

    make_pool: Callable[[int], Any] = StubBlockPool

    def __init__(self) -> None:
        super().__init__()
        self.pool: Any = type(self).make_pool(BLOCKS)
        self.ranks = [SimulatedRank(), SimulatedRank()]
        self.requests: dict[str, SimulatedRequest] = {}
        self.contents: dict[int, str] = {}  # block -> what was written last
        self.numbers = iter(range(10**6))
        ledger = PromiseLedger([GroupDemand(1)], longest=2 * PER_SECTOR, lookahead=0)
        self.coordinator = CapacityCoordinator(BlockCapacity(self.pool), ledger)
        self.coordinator.connect(
            Handshake(number, rank.state(), PER_SECTOR, 3) for number, rank in enumerate(self.ranks)
        )

    @initialize(moving=st.booleans())
    def choose(self, moving: bool) -> None:
        self.coordinator.moving = moving

    @rule(rank=st.integers(0, 1), limit=st.integers(1, SECTORS))
    def set_limit(self, rank: int, limit: int) -> None:
        self.ranks[rank].target = limit

    @rule(rank=st.integers(0, 1), broken=st.booleans())
    def break_pages(self, rank: int, broken: bool) -> None:
        self.ranks[rank].broken = broken

    @rule(tokens=st.integers(1, 2 * PER_SECTOR))
    def enter(self, tokens: int) -> None:
        name, promises = f"r{next(self.numbers)}", self.coordinator.promises
        assert promises is not None
        if promises.may_enter(name, tokens, self.coordinator.room):
            promises.enter(name, tokens)
            self.requests[name] = SimulatedRequest(promises.demand(tokens))
            self.grow(name)
        else:
            promises.leave(name)  # it is aborted

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        self.grow(data.draw(st.sampled_from(sorted(self.requests))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Have a request begin with the cached prefix of another."""
        giver = data.draw(st.sampled_from(sorted(self.requests)))
        name, promises, first = f"r{next(self.numbers)}", self.coordinator.promises, self.requests[giver].blocks[0]
        assert promises is not None
        if promises.may_enter(name, 2, self.coordinator.room):
            promises.enter(name, 2)
            self.pool.touch([first])
            self.requests[name] = SimulatedRequest(2, [first], [self.contents[first.block_id]])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), cache=st.booleans())
    def end(self, data: st.DataObject, cache: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests.pop(name)
        assert self.coordinator.promises is not None
        self.coordinator.promises.leave(name)
        for block in request.blocks:
            if cache and block.ref_cnt == 1 and block.block_hash is None:
                self.pool.set_hash(block, self.contents[block.block_id])
        self.pool.free_blocks(request.blocks[::-1])

    @rule(late=st.booleans(), away=st.booleans())
    def step(self, late: bool, away: bool) -> None:
        """Step; `away`: one request is not in this step."""
        orders = self.coordinator.next_orders()
        scheduled = set(self.requests) - ({min(self.requests)} if away and self.requests else set())
        tables = [{name: request.blocks for name, request in self.requests.items()}]
        moves = move_blocks(self.coordinator.capacity, tables, scheduled) if self.coordinator.moving else None
        for rank in self.ranks:
            rank.before_step(orders, late=late)
        if moves:
            for source, target in moves.copies:
                self.require_mapped(source)
                self.require_mapped(target)
                self.contents[target] = self.contents[source]
        self.coordinator.receive(
            StepReport({0: self.ranks[0].state()}).aggregate(StepReport({1: self.ranks[1].state()}))
        )

    def grow(self, name: str) -> None:
        request = self.requests[name]
        if len(request.blocks) == request.promised:
            return
        assert self.pool.get_num_free_blocks(), "a promise was not kept"
        (block,) = self.pool.get_new_blocks(1)
        request.blocks.append(block)
        self.contents[block.block_id] = f"{next(self.numbers)}"
        request.written.append(self.contents[block.block_id])

    def require_mapped(self, block: int) -> None:
        for rank in self.ranks:
            assert block < rank.mapped * PER_SECTOR, f"block {block} is not mapped"

    @invariant()
    def books_balance(self) -> None:
        self.coordinator.capacity.check()
        for block in self.pool.free_block_queue.get_all_free_blocks():
            self.require_mapped(block.block_id)
        for request in self.requests.values():
            for block in request.blocks:
                self.require_mapped(block.block_id)
            assert [self.contents[block.block_id] for block in request.blocks] == request.written

    def teardown(self) -> None:
        for name in list(self.requests):
            self.pool.free_blocks(self.requests.pop(name).blocks[::-1])
            assert self.coordinator.promises is not None
            self.coordinator.promises.leave(name)
        for rank in self.ranks:
            rank.broken = False
        for _ in range(12):
            self.step(late=False, away=False)
        assert {rank.mapped for rank in self.ranks} == {min(rank.target for rank in self.ranks)}
        assert not self.coordinator.busy
        assert self.coordinator.capacity.usable == self.ranks[0].mapped * PER_SECTOR - 1
