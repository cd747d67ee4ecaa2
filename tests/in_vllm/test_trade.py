"""Weights and KV cache trade pages at a tight budget, and what is deferred ends, also while the engine is idle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

import elastic.vllm
from support.vllm_engine.engine import (
    TEXTS,
    coordinator,
    counted_preemptions,
    elastic_engine,
    expected,
    run,
    sector_bytes,
    wait_for,
)


@pytest.mark.parametrize("why", ["asked", "not a CPU"])
def test_what_waits_ends_without_steps_where_no_blocks_are_moved(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "not a CPU":
        monkeypatch.setattr("elastic.engines.vllm.scheduler.current_platform", SimpleNamespace(is_cpu=lambda: False))
    with elastic_engine("16MiB", move_blocks=why != "asked") as llm:
        assert not coordinator(llm).moving
        abort_what_layers_wait_for(llm)


@pytest.fixture(scope="module")
def tight(reference: list[list[int]]) -> Iterator[Any]:
    with elastic_engine("16MiB") as llm:
        yield llm


@pytest.mark.parametrize("how", ["release", "int4"])
def test_weights_and_cache_trade_pages(tight: Any, reference: list[list[int]], how: str) -> None:
    rt, lengths = elastic.vllm.runtime(tight), [128] * 16
    most: list[int] = []

    def act(step: int) -> None:
        if step == 30:
            rt.release(range(6)) if how == "release" else rt.swap(range(8), "int4")
        if step == 150:
            assert rt.restore().status == "deferred"
        most.append(coordinator(tight).mapped)

    before = coordinator(tight).mapped
    with counted_preemptions(tight) as preempted:
        tokens = run(tight, lengths, each_step=act)
    assert preempted == []
    assert max(most) >= 2 * before
    if how == "release":
        assert tokens == expected(reference, lengths)
    wait_for(lambda: set(rt.form()) == {"float32"} and not coordinator(tight).busy)
    assert coordinator(tight).mapped == before
    assert run(tight, [64] * 8) == expected(reference, [64] * 8), "the first step after it has full layers"
    rt.check()


def test_an_idle_engine_ends_what_was_deferred(tight: Any) -> None:
    rt, before = elastic.vllm.runtime(tight), coordinator(tight).mapped
    rt.swap(range(8), "int4")
    wait_for(lambda: coordinator(tight).mapped > before)
    assert rt.restore().status == "deferred"
    wait_for(lambda: set(rt.form()) == {"float32"} and coordinator(tight).mapped == before)
    rt.check()


def test_another_thread_acts_while_the_engine_falls_idle_and_wakes(tight: Any, reference: list[list[int]]) -> None:
    """Whoever acts does not step the engine: its user may be about to."""
    rt, over = elastic.vllm.runtime(tight), threading.Event()

    def act() -> None:
        while not over.is_set():
            rt.release([3, 7])
            rt.restore()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        for _ in range(100):
            assert run(tight, [2] * 4) == expected(reference, [2] * 4)
    finally:
        over.set()
        thread.join()
    wait_for(lambda: set(rt.form()) == {"float32"})
    rt.check()


def abort_what_layers_wait_for(llm: Any) -> None:
    """Have layers come back that wait for the blocks of requests, when these are aborted; no step follows."""
    rt, engine = elastic.vllm.runtime(llm), llm.llm_engine
    rt.release(range(6))
    wait_for(lambda: coordinator(llm).mapped == 10)  # what requests are promised, layers must wait for
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    for number in range(6):
        engine.add_request(f"a{number}", {"prompt": "import os"}, sampling)
    for _ in range(70):
        engine.step()
    assert rt.restore().status == "deferred"
    engine.abort_request([f"a{number}" for number in range(6)])
    wait_for(lambda: set(rt.form()) == {"float32"})
    rt.check()


def test_what_waits_for_requests_ends_when_they_are_aborted(tight: Any) -> None:
    abort_what_layers_wait_for(tight)


def test_an_action_ends_the_steps_under_way_that_have_blocks_of_aborted_requests(
    tight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where steps are scheduled ahead: vLLM keeps the blocks until what may write to them has ended."""
    core = tight.llm_engine.engine_core.engine_core
    monkeypatch.setattr(core, "batch_queue_size", 2)
    monkeypatch.setattr(core, "batch_queue", deque(maxlen=2))
    monkeypatch.setattr(core, "step_fn", core.step_with_batch_queue)
    monkeypatch.setattr(core.scheduler, "defer_block_free", True)
    tight.llm_engine.add_request("a", {"prompt": TEXTS[0]}, SamplingParams(max_tokens=200, ignore_eos=True))
    tight.llm_engine.step()
    tight.llm_engine.abort_request(["a"])
    assert coordinator(tight).capacity.used
    elastic.vllm.runtime(tight).kv.resize("max")
    assert not coordinator(tight).capacity.used
    while core.batch_queue:  # one without tokens, which told the worker of the abort
        core.step_fn()


def test_use_and_capacity_are_the_schedulers(tight: Any) -> None:
    rt, used = elastic.vllm.runtime(tight), list[tuple[int, int]]()
    run(tight, [64] * 4, each_step=lambda step: used.append((rt.kv.used_bytes, rt.kv.capacity_bytes)))
    assert used[0][0] == 0
    assert 0 < max(used)[0] < max(used)[1] <= coordinator(tight).mapped * sector_bytes(tight)
