"""Heads of shards: each is attended for once, by a shard that has its keys and values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.planning.sharding.heads import heads_of, kv_parts, kv_shards

SHARDS = st.sampled_from([1, 2, 4, 8])
KV_HEADS = st.integers(1, 12)
EACH = st.integers(1, 8)  # query heads of a KV head


@given(shards=SHARDS, kv_heads=KV_HEADS, each=EACH)
def test_every_query_head_is_of_one_shard_which_needs_the_part_with_its_kv_head(
    shards: int, kv_heads: int, each: int
) -> None:
    parts = kv_shards(shards, kv_heads)
    inside = kv_heads // parts
    assert inside * parts == kv_heads
    attended = []
    for shard in range(shards):
        (part,) = kv_parts([shard], shards, parts)
        heads = heads_of([shard], shards, kv_heads * each)
        assert {head // each // inside for head in heads} <= {part}
        attended += heads
    assert attended == list(range(kv_heads * each))


@given(shards=SHARDS, kv_heads=KV_HEADS, layer=st.integers(0, 9), chosen=st.sets(st.integers(0, 7), min_size=1))
def test_parts_of_all_layers_are_counted_as_those_of_one(
    shards: int, kv_heads: int, layer: int, chosen: set[int]
) -> None:
    chosen = {shard % shards for shard in chosen}
    parts = kv_shards(shards, kv_heads)
    inside = kv_parts(chosen, shards, parts)
    assert inside == tuple(sorted(set(inside)))
    assert kv_parts((layer * shards + shard for shard in chosen), shards, parts) == tuple(
        layer * parts + part for part in inside
    )


def test_shards_share_a_part_where_there_are_fewer_kv_heads() -> None:
    assert kv_shards(4, 2) == 2
    assert kv_parts(range(4, 8), 4, 2) == (2, 3)
    assert [heads_of([shard], 4, 8) for shard in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert heads_of([3, 0], 4, 8) == [0, 1, 6, 7]
    assert [heads_of([shard], 4, 3) for shard in range(4)] == [[], [0], [1], [2]]
