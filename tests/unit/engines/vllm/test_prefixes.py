"""What is in the hashes of requests, so that they share what the present weights computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.engines.vllm.kv.capacity import BlockCapacity
from elastic.engines.vllm.kv.prefixes import PrefixSharing
from support.vllm_engine.blocks import StubBlockPool

FULL = (0, b"")
PACKED = (1, b"\x01")
AGAIN = (2, b"")


@dataclass
class StubRequest:
    """Two full blocks, whose hashes are what they are made of."""

    request_id: str
    cache_salt: str | None = None
    block_hashes: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.extend((self.cache_salt, number) for number in range(len(self.block_hashes), 2))


def arrive(sharing: PrefixSharing, name: str, salt: str | None = None) -> StubRequest:
    request = StubRequest(name, salt)
    sharing.arrive(request)
    return request


def test_hashes_are_vllms_while_all_weights_are_full() -> None:
    sharing = PrefixSharing()
    assert not sharing.change([FULL, FULL])
    assert arrive(sharing, "a", "mine").block_hashes == StubRequest("b", "mine").block_hashes
    assert sharing.may_look_up("a")


def test_requests_under_the_same_variants_share_and_keep_their_own_salt() -> None:
    sharing = PrefixSharing()
    sharing.change([FULL])
    assert sharing.change([PACKED])
    a, b, other = arrive(sharing, "a"), arrive(sharing, "b"), arrive(sharing, "c", "mine")
    assert a.block_hashes == b.block_hashes
    assert a.block_hashes[0] not in (other.block_hashes[0], StubRequest("d").block_hashes[0])
    assert sharing.change([AGAIN])
    assert arrive(sharing, "e").block_hashes == StubRequest("f").block_hashes


def test_weights_that_were_others_for_a_while_have_changed() -> None:
    sharing = PrefixSharing()
    sharing.change([FULL, FULL])
    assert sharing.change([FULL, AGAIN])
    assert not sharing.change([FULL, AGAIN])


def test_one_that_waited_looks_again_and_one_that_lives_shares_with_nobody() -> None:
    sharing = PrefixSharing()
    sharing.change([FULL])
    waiting, living = arrive(sharing, "waiting"), arrive(sharing, "living")
    sharing.enter("living")
    sharing.change([PACKED])
    assert not sharing.may_look_up("waiting")
    assert sharing.may_look_up("waiting")
    assert waiting.block_hashes == arrive(sharing, "new").block_hashes
    assert living.block_hashes[0] not in (waiting.block_hashes[0], StubRequest("full").block_hashes[0])
    assert not sharing.may_look_up("living"), "it was preempted, and is computed anew"
    assert living.block_hashes == waiting.block_hashes
    sharing.leave("living")
    sharing.leave("living")


def test_blocks_are_found_no_more_though_requests_hold_them() -> None:
    pool = StubBlockPool(8)
    capacity = BlockCapacity(pool)
    capacity.set_limit(8)
    held, freed = pool.get_new_blocks(2)
    pool.set_hash(held, "held")
    pool.set_hash(freed, "freed")
    pool.free_blocks([freed])
    capacity.forget_contents()
    assert [block.block_hash for block in pool.blocks] == [None] * 8
    assert held.ref_cnt == 1
    capacity.check()
