"""Blocks are published when they are mapped and withdrawn before they are not, on a stub of vLLM's block pool."""

from __future__ import annotations

import pytest
from hypothesis import settings

from elastic import ConfigError, IntegrityError
from elastic.engines.vllm.kv.admission import GroupDemand, PromiseLedger
from elastic.engines.vllm.kv.capacity import BlockCapacity
from elastic.engines.vllm.kv.coordinator import CapacityCoordinator
from elastic.engines.vllm.kv.moves import move_blocks
from elastic.engines.vllm.kv.orders import Handshake, RankState, StepReport
from support.vllm_engine.blocks import PER_SECTOR, CapacityMachine, StubBlockPool, make_coordinator

TestCapacity = CapacityMachine.TestCase
TestCapacity.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def one_rank(mapped: int, *, promises: PromiseLedger | None = None, blocks: int = 32) -> CapacityCoordinator:
    coordinator = make_coordinator(blocks, promises)
    coordinator.connect([Handshake(0, RankState(0, mapped, mapped, 8), PER_SECTOR, mapped)])
    return coordinator


def test_nothing_is_usable_before_a_rank_has_mapped() -> None:
    capacity = BlockCapacity(StubBlockPool(16))
    assert capacity.usable == 0
    assert capacity.pool.num_gpu_blocks == 1


def test_growth_is_ordered_then_published() -> None:
    coordinator = one_rank(2)
    coordinator.receive(StepReport({0: RankState(0, 2, 5, 8)}))
    orders = coordinator.next_orders()
    assert (orders.sequence, orders.sectors) == (1, 5)
    assert coordinator.capacity.usable == 2 * PER_SECTOR - 1
    coordinator.receive(StepReport({0: RankState(1, 5, 5, 8)}))
    assert coordinator.capacity.usable == 5 * PER_SECTOR - 1


def test_a_shrink_waits_for_the_last_block_in_its_way() -> None:
    coordinator = one_rank(3)
    held = coordinator.capacity.pool.get_new_blocks(9)
    coordinator.receive(StepReport({0: RankState(0, 3, 1, 8)}))
    assert coordinator.next_orders().sectors == 3
    coordinator.capacity.pool.free_blocks([held.pop()])
    assert coordinator.next_orders().sectors == 3, "block 8 was held, 9 free"
    coordinator.capacity.pool.free_blocks([held.pop()])
    assert coordinator.next_orders().sectors == 2


def test_what_waits_for_blocks_that_requests_have_needs_no_steps_until_these_run() -> None:
    coordinator = one_rank(3)
    held = coordinator.capacity.pool.get_new_blocks(9)
    coordinator.receive(StepReport({0: RankState(0, 3, 1, 8, unsettled=True)}))
    assert not coordinator.busy
    coordinator.capacity.pool.free_blocks([held.pop(), held.pop()])
    coordinator.capacity.withdraw_freed()
    assert coordinator.busy, "a sector can be unmapped"
    coordinator.receive(StepReport({0: RankState(0, 3, 3, 8, unsettled=True, working=True)}))
    assert coordinator.busy, "ranks may have to agree"
    coordinator.capacity.pool.free_blocks(held)
    coordinator.receive(StepReport({0: RankState(0, 3, 3, 8, unsettled=True)}))
    assert coordinator.busy, "no request has blocks"


def test_what_one_rank_cannot_map_no_rank_keeps() -> None:
    coordinator = make_coordinator(32)
    state = RankState(0, 1, 4, 8)
    coordinator.connect([Handshake(rank, state, PER_SECTOR, 1) for rank in range(2)])
    assert coordinator.next_orders().sectors == 4
    coordinator.receive(StepReport({0: RankState(1, 4, 4, 8), 1: RankState(1, 2, 2, 2)}))
    assert coordinator.capacity.usable == 2 * PER_SECTOR - 1
    orders = coordinator.next_orders()
    assert (orders.sequence, orders.sectors) == (2, 2)


def test_a_report_that_comes_late_does_not_count() -> None:
    coordinator = one_rank(2)
    coordinator.receive(StepReport({0: RankState(0, 2, 5, 8, number=2)}))
    coordinator.receive(StepReport({0: RankState(0, 2, 3, 8, number=1)}))
    assert coordinator.next_orders().sectors == 5


def test_shared_and_cached_blocks_move_with_their_contents() -> None:
    pool = StubBlockPool(32)
    capacity = BlockCapacity(pool)
    capacity.set_limit(16)
    blocks = pool.get_new_blocks(15)
    shared, cached = blocks[12], blocks[13]
    pool.touch([shared])
    pool.set_hash(shared, "shared")
    pool.set_hash(cached, "cached")
    pool.free_blocks([cached, *blocks[:12], blocks[14]])
    capacity.set_limit(8, evict=False)
    tables = [{"a": [shared], "b": [shared]}]
    assert move_blocks(capacity, tables, {"a"}).copies[0][0] == cached.block_id, "b does not step: the shared one stays"
    assert next(block.block_id for block in pool.blocks if block.block_hash == "cached") < 8
    moves = move_blocks(capacity, tables, {"a", "b"})
    assert moves.requests == {"a", "b"}
    assert tables[0]["a"][0] is tables[0]["b"][0]
    assert (tables[0]["a"][0].ref_cnt, tables[0]["a"][0].block_hash) == (2, "shared")
    assert capacity.end == 8
    capacity.check()


def test_the_prefixes_that_were_used_last_stay_in_the_order_of_their_use() -> None:
    pool = StubBlockPool(12)
    capacity = BlockCapacity(pool)
    capacity.set_limit(12)
    blocks = pool.get_new_blocks(11)
    used = [9, 2, 4, 10, 1, 3, 6, 5, 8, 0, 7]  # the first longest ago; ids are one more
    for index in used:
        pool.set_hash(blocks[index], str(index))
    pool.free_blocks([blocks[index] for index in used])
    capacity.set_limit(8, evict=False)
    assert len(move_blocks(capacity, [], set()).copies) == 2
    assert [block.block_hash for block in pool.free_block_queue.get_all_free_blocks()] == list(map(str, used[4:]))
    assert {block.block_id for block in pool.free_block_queue.get_all_free_blocks()} == set(range(1, 8))
    capacity.check()


@pytest.mark.parametrize("binding", [True, False])
def test_a_budget_that_a_longest_request_does_not_fit_is_refused(binding: bool) -> None:
    promises = PromiseLedger([GroupDemand(32)], longest=512, binding=binding)
    with pytest.raises(ConfigError, match="lower max_model_len or raise the budget"):
        one_rank(3, promises=promises)


def test_without_promises_a_limit_leaves_one_request_what_it_needs() -> None:
    ledger = PromiseLedger([GroupDemand(1)], longest=7, binding=False)
    coordinator = one_rank(2, promises=ledger)
    ledger.enter("a", 7)
    ledger.enter("b", 7)
    coordinator.receive(StepReport({0: RankState(0, 2, 1, 8)}))
    assert coordinator.next_orders().sectors == 2
    ledger.leave("a")
    ledger.leave("b")
    assert coordinator.next_orders().sectors == 1


def test_a_rank_whose_pages_cannot_be_had_is_refused_with_the_reason() -> None:
    coordinator = make_coordinator(32, PromiseLedger([GroupDemand(1)], longest=5))
    with pytest.raises(ConfigError, match=r"memory for 3 blocks .* no mappings are left"):
        coordinator.connect([Handshake(0, RankState(0, 1, 8, 8), PER_SECTOR, 8, "no mappings are left")])
    coordinator.connect([Handshake(0, RankState(0, 2, 8, 8), PER_SECTOR, 8, "no mappings are left")])


def test_ranks_with_other_sectors_are_refused() -> None:
    coordinator = make_coordinator(32)
    state = RankState(0, 1, 1, 1)
    with pytest.raises(ConfigError, match="same page size"):
        coordinator.connect([Handshake(0, state, 4, 1), Handshake(1, state, 8, 1)])


def test_a_lost_block_is_noticed() -> None:
    coordinator = one_rank(2)
    coordinator.capacity.pool.free_block_queue.blocks.pop()
    with pytest.raises(IntegrityError, match="lost"):
        coordinator.capacity.check()
