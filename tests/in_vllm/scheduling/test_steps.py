"""What a step costs beside the scheduler where nothing has changed, and that nothing is missed for it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import elastic.vllm
from elastic.engines.vllm import scheduler_side
from support.vllm_engine.engine import (
    TEXTS,
    coordinator,
    counted_preemptions,
    elastic_engine,
    expected,
    run,
    scheduler,
    sector_bytes,
    side,
)

SCHEDULERS = (
    "vllm/scheduler",
    "vllm/scheduler_side",
    "vllm/connector",
    "vllm/agreement",
    "kv/coordinator",
    "kv/capacity",
    "kv/admission",
)


@pytest.fixture(autouse=True)
def never_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing decided because time has passed: what is missed then is missed for ever."""
    monkeypatch.setattr(scheduler_side, "DECIDE_S", float("inf"))


@pytest.fixture(scope="module")
def llm(reference: list[list[int]]) -> Iterator[Any]:
    with elastic_engine("16MiB", max_num_seqs=40) as llm:
        yield llm


@pytest.fixture
def engine(llm: Any) -> Iterator[Any]:
    yield llm.llm_engine
    llm.llm_engine.abort_request(list(side(llm).requests), internal=True)
    llm.llm_engine.step()
    elastic.vllm.runtime(llm).kv.resize("max")


def add(engine: Any, names: list[str], length: int = 200, **sampled: Any) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **sampled)
    for name in names:
        engine.add_request(name, {"prompt": TEXTS[0]}, sampling)


def counted_calls(step: Callable[[], object]) -> Counter[str]:
    """Count the functions of its scheduler and KV connector that a step calls."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        file, name = frame.f_code.co_filename.removesuffix(".py"), frame.f_code.co_qualname
        if event == "call" and file.endswith(SCHEDULERS) and not name.startswith("RankAgreement"):
            calls[name] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def calls_at_rest(llm: Any, engine: Any) -> Counter[str]:
    """Count those of a step in which nothing changed, behind another."""
    at_rest = 0
    for _ in range(100):
        before = side(llm).decisions
        calls = counted_calls(engine.step)
        at_rest = at_rest + 1 if (side(llm).decisions, side(llm).quiet) == (before, True) else 0
        if at_rest == 2:
            return calls
    raise AssertionError("it does not come to rest")


def test_a_step_in_which_nothing_changed_costs_the_same_however_many_wait(llm: Any, engine: Any) -> None:
    add(engine, ["a", "b"])
    alone = calls_at_rest(llm, engine)
    assert sum(alone.values()) <= 8, alone
    add(engine, [f"w{number}" for number in range(30)])
    assert calls_at_rest(llm, engine) == alone
    assert len(scheduler(llm).waiting) > 20
    assert len(side(llm).requests) == 32


def test_all_that_wait_get_in_in_turn(llm: Any, reference: list[list[int]]) -> None:
    lengths = [40, 10, 25, 60] * 8
    with counted_preemptions(llm) as preempted:
        assert run(llm, lengths) == expected(reference, lengths)
    assert preempted == []


@pytest.mark.parametrize("how", ["abort", "release", "raise the limit"])
def test_whatever_makes_room_lets_in(llm: Any, engine: Any, how: str) -> None:
    rt = elastic.vllm.runtime(llm)
    if how != "release":
        rt.kv.resize(coordinator(llm).mapped // 2 * sector_bytes(llm))
    add(engine, [f"w{number}" for number in range(30)])
    calls_at_rest(llm, engine)
    waiting = len(scheduler(llm).waiting)
    assert waiting
    if how == "abort":
        engine.abort_request([scheduler(llm).running[0].request_id], internal=True)
    elif how == "release":
        rt.release(range(6))
    else:
        rt.kv.resize("max")
    for _ in range(20):
        engine.step()
    assert len(scheduler(llm).waiting) < waiting
    rt.restore()


def test_an_engine_is_not_settled_where_a_request_arrives_meanwhile(
    llm: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that schedule it use the pool of blocks, without the lock."""
    beside, capacity = side(llm), coordinator(llm).capacity

    class Lock:
        """One that was waited for until a request had come."""

        def __enter__(self) -> None:
            beside._idle = False

        def __exit__(self, *_: object) -> None:
            beside._idle = True

    engine.step()
    assert beside._idle
    touched = list[bool]()
    monkeypatch.setattr(capacity, "withdraw_freed", lambda **_: touched.append(True))
    monkeypatch.setattr(beside, "lock", Lock())
    beside.settle()
    assert not touched


def test_requests_that_were_preempted_come_back_before_those_that_wait(llm: Any, engine: Any) -> None:
    add(engine, [f"w{number}" for number in range(30)])
    for _ in range(8):
        engine.step()
    running = {request.request_id for request in scheduler(llm).running}
    assert llm.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert {request.request_id for request in scheduler(llm).running} == running


def test_tokens_are_told_when_a_request_ends(llm: Any, reference: list[list[int]]) -> None:
    before = elastic.vllm.runtime(llm).snapshot().traffic.generated_tokens
    run(llm, [30] * 3)
    assert elastic.vllm.runtime(llm).snapshot().traffic.generated_tokens - before == 90
