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


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with elastic_engine("20MiB") as llm:
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
    rt, lengths, steps = elastic.vllm.runtime(llm), [120, 30, 60, 90] * 4, list[int]()
    waiting: list[int] = []
    moved = coordinator(llm).moved_blocks

    def shrink(step: int) -> None:
        books = coordinator(llm)
        if waiting and books.mapped <= waiting[1]:
            steps.append(step - waiting[0])
            waiting.clear()
        if step % 20 == 0:
            rt.kv.resize(10 * sector_bytes(llm))
            waiting.clear()
        if step % 20 == 10:
            sectors = max(2, -(-(books.promises.total + 1) // books.blocks_per_sector))
            if sectors < books.mapped:
                rt.kv.resize(sectors * sector_bytes(llm))
                waiting[:] = [step, sectors]

    assert run(llm, lengths, each_step=shrink) == expected(reference, lengths)
    rt.kv.resize("max")
    assert len(steps) >= 3
    assert max(steps) <= 5
    assert coordinator(llm).moved_blocks > moved
    rt.check()
