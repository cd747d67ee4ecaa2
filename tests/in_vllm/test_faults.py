"""Pages that cannot be had, requests that end while their blocks move: the engine goes on, with the right tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import elastic.vllm
from elastic import CapacityError
from elastic.engines.vllm.kv import worker_channel
from support.vllm_engine.engine import (
    TEXTS,
    coordinator,
    counted_preemptions,
    elastic_engine,
    expected,
    run,
    scheduler,
    sector_bytes,
)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with elastic_engine("20MiB") as llm:
        yield llm


@contextmanager
def faulty_creation(llm: Any, after: int) -> Iterator[list[int]]:
    """Fail when pages are created, from one call on."""
    backend = scheduler(llm).connector.scheduler._local.sectors.kv.pool.backend
    original: Callable[[list[int]], None] = backend.create
    calls: list[int] = []

    def create(pages: list[int]) -> None:
        calls.append(len(pages))
        if len(calls) > after:
            raise CapacityError("injected", requested_bytes=1, free_bytes=0, total_bytes=0)
        original(pages)

    backend.create = create
    try:
        yield calls
    finally:
        backend.create = original


@pytest.mark.parametrize("after", range(5))
def test_creation_fails_at_any_sector(
    llm: Any, reference: list[list[int]], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_channel, "RETRY_S", 0.05)
    rt, lengths = elastic.vllm.runtime(llm), [100] * 8
    rt.kv.resize(2 * sector_bytes(llm))
    run(llm, [4])
    scheduler(llm).connector.scheduler._local.sectors.kv.pool.trim()
    with counted_preemptions(llm) as preempted, faulty_creation(llm, after) as calls:
        tokens = run(llm, lengths, each_step=lambda step: rt.kv.resize("max") if step == 5 else rt.check())
    assert tokens == expected(reference, lengths)
    assert preempted == []
    assert len(calls) > after
    assert run(llm, lengths) == expected(reference, lengths)
    assert coordinator(llm).mapped == 10, "the pages came, once they could be had"


def test_requests_are_aborted_while_their_blocks_move(llm: Any, reference: list[list[int]]) -> None:
    from vllm import SamplingParams

    rt, engine = elastic.vllm.runtime(llm), llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for number in range(7):
        engine.add_request(f"a{number}", {"prompt": TEXTS[number]}, sampling)
    tokens, moved = {}, coordinator(llm).moved_blocks
    for step in range(400):
        if step % 25 == 10:
            rt.kv.resize((10 if step % 50 == 10 else 8) * sector_bytes(llm))
        if step in (11, 37, 62):
            engine.abort_request([f"a{step % 4}"])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason == "length":
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        coordinator(llm).capacity.check()
    rt.kv.resize("max")
    rt.check()
    assert len(tokens) >= 4
    assert all(tokens[name] == reference[int(name[1:])][:100] for name in tokens)
    assert coordinator(llm).moved_blocks > moved


def test_a_request_longer_than_the_limit_gets_what_it_needs(llm: Any, reference: list[list[int]]) -> None:
    rt = elastic.vllm.runtime(llm)
    rt.kv.resize(sector_bytes(llm))
    assert run(llm, [200, 200]) == expected(reference, [200, 200]), "one after the other"
    assert coordinator(llm).mapped <= 2
    rt.kv.resize("max")
    rt.check()
