"""KV blocks come and go under running requests; every token is plain vLLM's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import elastic.vllm
from support.vllm_engine.engine import (
    coordinator,
    counted_preemptions,
    elastic_engine,
    expected,
    run,
    sector_bytes,
)


@pytest.fixture(scope="module", params=[False, True], ids=["", "prefixes"])
def llm(request: pytest.FixtureRequest, reference: list[list[int]]) -> Iterator[Any]:
    with elastic_engine("20MiB", enable_prefix_caching=request.param) as llm:
        yield llm


def test_capacity_follows_the_limit_every_five_steps(llm: Any, reference: list[list[int]]) -> None:
    rt, chance, lengths = elastic.vllm.runtime(llm), random.Random(0), [128] * 16

    def resize(step: int) -> None:
        if step % 5 == 0:
            rt.kv.resize(chance.choice([2, 3, 5, 8, 10]) * sector_bytes(llm))
        rt.check()
        coordinator(llm).capacity.check()

    with counted_preemptions(llm) as preempted:
        assert run(llm, lengths, each_step=resize) == expected(reference, lengths)
    assert preempted == []
    assert coordinator(llm).sequence > 20


def test_blocks_in_the_way_of_a_shrink_are_moved_within_five_steps(llm: Any, reference: list[list[int]]) -> None:
    rt, books, lengths = elastic.vllm.runtime(llm), coordinator(llm), [120, 30, 60, 90] * 4
    ordered, ended, moved = list[tuple[int, int]](), list[int](), books.moved_blocks  # steps and sectors; steps

    def shrink(step: int) -> None:
        if len(ended) < len(ordered) and books.mapped <= ordered[-1][1]:
            ended.append(step)
        if step % 20 == 0:
            assert len(ended) == len(ordered), "the last one did not end"
            rt.kv.resize("max")
        if step % 20 == 10:
            sectors = max(2, -(-(books.promises.total + 1) // books.blocks_per_sector))
            if sectors < books.mapped:
                ordered.append((step, sectors))
                rt.kv.resize(sectors * sector_bytes(llm))

    assert run(llm, lengths, each_step=shrink) == expected(reference, lengths)
    rt.kv.resize("max")
    assert len(ended) >= len(ordered) - 1 >= 2, "requests may end in the midst of one"
    assert all(end - begin <= 5 for (begin, _), end in zip(ordered, ended, strict=False))
    assert books.moved_blocks > moved
    rt.check()
