"""Whether an instance can hold a request: exactly if all that it has could still end, one after another."""

from __future__ import annotations

import time
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.cluster.fleet.instance import all_blocks, blocks_of, can_all_end
from elastic.cluster.fleet.records.requests import RequestRecord, new_record
from elastic.engines.base import Output, Request
from elastic.engines.core.kv_state import KVFormat

KV = KVFormat(4, "head_centric", "float32", 2, 8, (((0, 1), None),))
SLIDING = KVFormat(4, "head_centric", "float32", 2, 8, (((0,), None), ((1,), 8)))


def record(prompt: int, most: int, tokens: int, n: int = 1) -> RequestRecord:
    made = new_record(Request((1,) * prompt, most, n=n), lambda _: None, time.perf_counter())
    if tokens:
        made.take(Output(made.request.id, (1,) * tokens), 0)
    return made


def all_end(demands: list[tuple[int, int]], total: int) -> bool:
    """Whether there is an order in which each has all that it needs, if those before it have given theirs back."""

    def ends(order: tuple[tuple[int, int], ...]) -> bool:
        free = total - sum(held for held, _ in order)
        for held, needed in order:
            if free < needed:
                return False
            free += held
        return free >= 0

    return sum(held for held, _ in demands) <= total and any(map(ends, permutations(demands)))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(2, 20), st.integers(0, 1)), max_size=4), st.integers(0, 25))
def test_a_request_is_given_just_if_all_can_end(sizes: list[tuple[int, int, int]], total: int) -> None:
    records = [record(*size) for size in sizes]
    demands = []
    for prompt, most, tokens in sizes:
        held = -(-(prompt + tokens + 1) // 4)
        demands.append((held, -(-(prompt + most) // 4) - held))
    assert can_all_end(KV, records, total) == all_end(demands, total)


def test_blocks_are_those_of_all_groups_of_layers() -> None:
    assert blocks_of(KV, 17) == 5
    assert blocks_of(SLIDING, 17) == 5 + 2
    assert blocks_of(SLIDING, 5) == 2 + 2


def test_a_block_of_a_group_with_fewer_layers_is_a_part_of_one_as_loads_count_them() -> None:
    groups = ((0, 1, 2, 3), 8), ((4, 5), None)
    of_six = KVFormat(4, "head_centric", "float32", 2, 8, groups)
    assert blocks_of(of_six, 80) == 2 + 20 // 2
    assert of_six.group_block_bytes == 4 * of_six.block_bytes
    assert blocks_of(of_six, 80) * of_six.group_block_bytes == (4 * 2 + 2 * 20) * of_six.block_bytes
    turned = KVFormat(4, "head_centric", "float32", 2, 8, groups[::-1])
    assert blocks_of(turned, 80) == 20 + 2 * 2


def test_answers_of_one_request_share_the_blocks_of_its_prompt() -> None:
    assert all_blocks(KV, record(9, 7, 0)) == 4
    assert all_blocks(KV, record(9, 7, 0, n=3)) == 2 + 3 * 2
