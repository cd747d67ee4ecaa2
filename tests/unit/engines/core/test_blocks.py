"""Tables over sectors: what is free is taken first where it costs no memory, what is shared lies there once."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.prefix_cache import block_hash
from elastic.errors import CapacityError, Overloaded
from support.serving.simulated_executor import SimulatedMemory


def blocks_of(
    *windows: int | None, sectors: int = 8, size: int = 4, share: bool = True
) -> tuple[BlockManager, SimulatedMemory]:
    """A manager of blocks of 4 tokens, and its memory."""
    memory = functools.partial(SimulatedMemory, sectors, (size,) * len(windows))
    manager = BlockManager(memory, windows, 4, share)
    made: Any = manager.memory
    return manager, made


def admit(manager: BlockManager, name: str, tokens: list[int], most: int = 100) -> int | None:
    """Announce a sequence that comes to hold 4 tokens more, and give it blocks; return how many were there."""
    manager.expect([name], len(tokens) + 4)
    cached = manager.admit(name, tokens, most, share=True)
    manager.check()
    return cached


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    manager, _ = blocks_of(None)
    tokens = list(range(12))
    assert admit(manager, "a", tokens) == 0
    manager.share_computed(manager.tables["a"], tokens, 12)
    assert admit(manager, "b", tokens) == 8
    assert admit(manager, "c", [*tokens, 99]) == 12
    assert admit(manager, "d", [*tokens[:6], 99, 99, 99]) == 4


def test_blocks_are_kept_for_reuse_when_no_sequence_has_them_and_until_they_are_given_up() -> None:
    manager, _ = blocks_of(None, None, size=4, share=True)
    tokens = list(range(20))
    admit(manager, "a", tokens)
    admit(manager, "b", [99] * 5)
    manager.share_computed(manager.tables["a"], tokens, 12)
    assert [(pool.kept_blocks, pool.held) for pool in manager.pools] == [([], 7)] * 2
    kept = [set(manager.tables["a"].blocks[group][:3]) for group in (0, 1)]
    manager.forget("a")
    assert [(set(pool.kept_blocks), pool.held) for pool in manager.pools] == [(blocks, 5) for blocks in kept]
    manager.forget_kept()
    assert [(pool.kept_blocks, pool.held) for pool in manager.pools] == [([], 2)] * 2
    manager.check()


def test_shared_blocks_lie_there_once_and_until_the_last_user_ends() -> None:
    manager, memory = blocks_of(None, size=1)
    tokens = list(range(9))
    admit(manager, "a", tokens)
    manager.share_computed(manager.tables["a"], tokens, 9)
    before = memory.used_sectors
    admit(manager, "b", tokens)
    assert memory.used_sectors == before + 1, "the two blocks of the beginning are the same"
    assert manager.tables["a"].blocks[0][:2] == manager.tables["b"].blocks[0][:2]
    manager.forget("a")
    manager.check()
    assert memory.used_sectors == before
    manager.forget("b")
    assert memory.used_sectors == 0
    assert manager.reusable_sectors() == 2, "kept for the next"


def test_a_sequence_that_was_refused_is_admitted_when_there_is_room_beside_what_it_shares() -> None:
    manager, memory = blocks_of(None, sectors=8, size=1)
    tokens = list(range(13))
    admit(manager, "a", tokens)
    manager.share_computed(manager.tables["a"], tokens, 12)
    manager.forget("a")
    manager.announce(["b"], 20)  # five blocks, of which three are there
    memory.limit = 4
    assert manager.admit("b", tokens, 100, share=True) is None
    memory.limit = 6
    assert manager.admit("b", tokens, 100, share=True) == 12
    manager.check()


def test_blocks_kept_for_reuse_are_given_up_the_end_of_a_beginning_first() -> None:
    manager, memory = blocks_of(None, sectors=4, size=1)
    tokens = list(range(12))
    admit(manager, "a", tokens)
    manager.share_computed(manager.tables["a"], tokens, 12)
    manager.forget("a")
    assert manager.reusable_sectors() == 3
    assert admit(manager, "other", [77] * 4) == 0
    assert manager.reusable_sectors() == 2
    manager.forget("other")
    assert admit(manager, "again", tokens) == 8
    assert memory.used_sectors == 3


def test_what_sectors_in_use_have_is_taken_before_more_memory() -> None:
    manager, memory = blocks_of(None, size=4)
    tokens = list(range(8))
    admit(manager, "stays", [5])
    admit(manager, "goes", tokens)
    manager.share_computed(manager.tables["goes"], tokens, 8)
    manager.forget("goes")
    assert admit(manager, "next", [6] * 12) == 0
    assert memory.used_sectors == 1
    assert manager.reusable_sectors() == 0


@pytest.mark.parametrize("size", [1, 4])
def test_sectors_that_come_and_go_are_noted_once(size: int) -> None:
    manager, memory = blocks_of(None, size=size)
    admit(manager, "stays", [5])
    for number in range(100):
        admit(manager, str(number), [number] * 17)
        manager.forget(str(number))
    manager.check()
    (pool,) = manager.pools
    assert len(pool._open) <= memory.total


def test_what_is_kept_for_reuse_grows_to_its_limit_and_no_further() -> None:
    manager, memory = blocks_of(None, sectors=8, size=1)
    for name in range(6):
        tokens = [name] * 5
        admit(manager, str(name), tokens)
        manager.share_computed(manager.tables[str(name)], tokens, 4)
        manager.forget(str(name))
    assert manager.reusable_sectors() == memory.reusable_limit == 4
    assert sum(map(len, memory.allocated)) == 4
    assert admit(manager, "last", [5] * 5) == 4
    assert admit(manager, "first", [0] * 5) == 0


def test_memory_gets_back_so_many_reusable_sectors_as_it_asks_for_the_oldest_first() -> None:
    manager, memory = blocks_of(None, size=1)
    for name in ("old", "new"):
        tokens = [ord(letter) for letter in name * 3]
        admit(manager, name, tokens)
        manager.share_computed(manager.tables[name], tokens, 9)
        manager.forget(name)
    manager.give_up_reusable(2)
    manager.check()
    assert sum(map(len, memory.allocated)) == 2
    assert admit(manager, "new", [ord(letter) for letter in "new" * 3]) == 8
    assert admit(manager, "old", [ord(letter) for letter in "old" * 3]) == 0


def test_a_sliding_window_is_a_ring_of_blocks_and_shares_none() -> None:
    manager, _ = blocks_of(6, None)
    tokens = list(range(20))
    admit(manager, "a", tokens)
    assert [len(blocks) for blocks in manager.tables["a"].blocks] == [2, 5]
    manager.share_computed(manager.tables["a"], tokens, 0)
    assert not manager.shares
    assert manager.grow(manager.tables["a"], 24) == ((), (manager.tables["a"].blocks[1][-1],))
    assert admit(manager, "b", tokens) == 0


def test_a_prompt_shares_nothing_where_sharing_is_off() -> None:
    manager, _ = blocks_of(None, share=False)
    assert not manager.shares
    admit(manager, "a", list(range(9)))
    assert admit(manager, "b", list(range(9))) == 0


def test_who_would_keep_others_from_ending_waits_until_something_has_come_free() -> None:
    manager, _ = blocks_of(None, sectors=4, size=1)
    assert admit(manager, "a", [1] * 8) == 0
    assert admit(manager, "b", [2] * 8, most=4) == 0
    assert manager.grow(manager.tables["b"], 8) is None, "neither could end then: each lacks one more"
    assert manager.promised_sectors() == 1
    assert admit(manager, "c", [3]) is None
    assert manager.grow(manager.tables["a"], 12) is not None
    assert manager.grow(manager.tables["b"], 8) is None
    manager.forget("a")
    assert manager.grow(manager.tables["b"], 8) is not None
    assert manager.admit("c", [3], 1, share=True) == 0
    manager.check()


def test_a_larger_limit_lets_in_who_was_refused() -> None:
    manager, memory = blocks_of(None, sectors=4, size=1)
    manager.expect(["a", "b"], 8)
    memory.limit = 2
    assert manager.admit("a", [1] * 8, 8, share=True) == 0
    assert manager.admit("b", [2] * 8, 8, share=True) is None
    memory.limit = 4
    assert manager.admit("b", [2] * 8, 8, share=True) == 0


def test_sequences_that_cannot_fit_are_refused_at_once_and_not_noted() -> None:
    manager, memory = blocks_of(None, sectors=4, size=1)
    with pytest.raises(CapacityError, match="a request of 17 tokens never fits"):
        manager.expect(["a"], 17)
    memory.limit = 2
    with pytest.raises(Overloaded):
        manager.expect(["a"], 16)
    assert manager.promised_sectors() == 0
    memory.limit = 4
    manager.expect(["a", "b"], 16)
    assert manager.promised_sectors() == 4, "the room that the larger one needs alone"
    manager.forget("a")
    manager.forget("b")
    assert manager.promised_sectors() == 0


def test_memory_that_is_gone_when_it_is_asked_for_leaves_the_tables_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, memory = blocks_of(None, size=1)
    admit(manager, "a", [1] * 4)
    allocate, left = memory.allocate, [2]

    def fail_after_two(group: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise CapacityError("others were faster", requested_bytes=1, free_bytes=0, total_bytes=8)
        return allocate(group)

    manager.expect(["b"], 20)
    monkeypatch.setattr(memory, "allocate", fail_after_two)
    assert manager.admit("b", [2] * 16, 16, share=True) is None
    manager.check()
    assert memory.used_sectors == 1
    monkeypatch.undo()
    assert manager.admit("b", [2] * 16, 16, share=True) == 0, "it is asked again although nothing has ended"
    monkeypatch.setattr(memory, "allocate", fail_after_two)
    assert manager.grow(manager.tables["b"], 20) is None
    monkeypatch.undo()
    assert manager.grow(manager.tables["b"], 20) is not None
    manager.check()


def test_a_block_is_named_by_all_tokens_up_to_its_end() -> None:
    first, other = block_hash(b"", [1, 2]), block_hash(b"", [2, 1])
    assert first != other
    assert block_hash(first, [3, 4]) != block_hash(other, [3, 4])
    assert block_hash(first, [3, 4]) == block_hash(first, (3, 4))


@given(seed=st.integers(0, 10**6), windows=st.sampled_from([(None,), (None, None), (None, 8)]), moves=st.booleans())
def test_blocks_in_use_lie_in_as_few_sectors_as_hold_them_with_what_is_in_them(
    seed: int, windows: tuple[int | None, ...], moves: bool
) -> None:
    """What sequences share stays shared, and what is kept for reuse, and not moved over, is found."""
    choose = random.Random(seed)
    manager, _ = blocks_of(*windows, sectors=60)
    for number in range(choose.randrange(4, 14)):
        start = choose.choice([[], list(range(choose.choice([4, 8, 12])))])
        tokens = [*start, *(100 * number + i for i in range(choose.randrange(3, 30)))]
        admit(manager, str(number), tokens)
        if manager.shares:
            manager.share_computed(manager.tables[str(number)], tokens, len(tokens))
    for name in choose.sample(list(manager.tables), len(manager.tables) // 2):
        manager.forget(name)
    before = {name: [list(blocks) for blocks in table.blocks] for name, table in manager.tables.items()}
    users = [pool.in_use for pool in manager.pools]
    found = [dict(pool.prefixes.blocks) for pool in manager.pools]
    with manager.compaction() as compaction:
        if moves:
            compaction.move()
    manager.check()
    assert [pool.in_use for pool in manager.pools] == users
    for name, table in manager.tables.items():
        for group, blocks in enumerate(table.blocks):
            of = compaction.moves[group] if moves else {}
            assert blocks == [of.get(block, block) for block in before[name][group]]
    for group, pool in enumerate(manager.pools):
        of, held = compaction.moves[group], {b for table in manager.tables.values() for b in table.blocks[group]}
        assert {
            of.get(found[group][n], found[group][n]) if moves else found[group][n] for n in pool.prefixes.blocks
        } == {*pool.prefixes.blocks.values()}
        assert held.isdisjoint(set(of) if moves else set(of.values()))
        if moves:
            assert len({block // pool.size for block in held}) == -(-len(held) // pool.size)
    reserved = manager.owed_sectors()
    assert not moves or manager.memory.used_sectors + reserved == manager._ledger.compacted_sectors(users)
    while manager.tables:
        manager.forget(next(iter(manager.tables)))
    manager.check()
