"""Two ranks under load: at every step both compute with the same forms, whoever changes them, and whatever fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import elastic.vllm
from elastic.config import Policy
from elastic.types import Restore, Swap
from support.vllm_engine.engine import FULL, TEXTS, come_back, elastic_engine, expected, run, wait_for

LENGTHS = [100] * len(TEXTS)
PACKED = range(6)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the functions that are called on ranks here
        yield


@pytest.fixture(scope="module")
def llm(reference: list[list[int]], two_ranks: None) -> Iterator[Any]:
    with elastic_engine("12MiB", tensor_parallel_size=2) as engine:
        yield engine


@pytest.fixture(scope="module", autouse=True)
def whole(llm: Any) -> int:
    """The capacity beside full weights, which is known before the first step."""
    wait_for(lambda: elastic.vllm.runtime(llm).kv.capacity_bytes > 0)
    return int(elastic.vllm.runtime(llm).kv.capacity_bytes)


def note_forms(llm: Any) -> None:
    """Have each rank note the form that it computes every step with."""

    def note(worker: Any) -> None:
        runner, original = worker.model_runner, type(worker.model_runner).execute_model
        worker.noted = []

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                worker.noted.append(tuple(worker.elastic.runtime.form()))
            return original(runner, scheduled, *args, **kwargs)

        runner.execute_model = execute_model

    llm.collective_rpc(note)


def noted_forms(llm: Any) -> list[tuple[str, ...]]:
    """Return what was noted since, which is the same at both ranks."""

    def noted(worker: Any) -> list[tuple[str, ...]]:
        del worker.model_runner.execute_model
        return worker.noted

    first, second = llm.collective_rpc(noted)
    assert first == second
    return [tuple(form) for form in first]


def test_layers_change_between_the_same_steps(llm: Any, reference: list[list[int]]) -> None:
    rt = elastic.vllm.runtime(llm)

    def change(step: int) -> None:
        if step % 10 == 3:
            rt.release([step % 12, (step + 5) % 12])
        elif step % 10 == 8:
            rt.restore()

    note_forms(llm)
    assert run(llm, LENGTHS, each_step=change) == expected(reference, LENGTHS)
    assert len(set(noted_forms(llm))) > 3
    come_back(rt)
    rt.check()


def test_packed_layers_come_and_go_under_load(llm: Any, reference: list[list[int]]) -> None:
    rt = elastic.vllm.runtime(llm)

    def change(step: int) -> None:
        if step % 20 == 5:
            rt.swap(PACKED, "int4")
        elif step % 20 == 15:
            rt.restore()

    note_forms(llm)
    run(llm, LENGTHS, each_step=change)
    forms = noted_forms(llm)
    assert {("int4",) * 6 + FULL[6:], FULL} <= set(forms)
    come_back(rt)
    assert run(llm, LENGTHS) == expected(reference, LENGTHS)
    rt.swap(range(12), "int4")
    packed = run(llm, LENGTHS)
    assert packed == run(llm, LENGTHS) != expected(reference, LENGTHS)
    rt.restore()
    come_back(rt)
    rt.check()


def break_creation(llm: Any, after: int) -> None:
    """Have the second rank get no pages any more after so many calls, and ask for them often."""

    def fail(worker: Any) -> None:
        from elastic.engines.vllm.kv import worker_channel
        from elastic.errors import CapacityError

        pool = worker.elastic.kv.pool
        pool.trim()  # else pages that were created before are taken
        if worker.rank == 0:
            return
        worker_channel.RETRY_S, worker.calls = 0.05, 0

        def create(pages: Any) -> None:
            worker.calls += 1
            if worker.calls > after:
                raise CapacityError("injected", requested_bytes=1, free_bytes=0, total_bytes=0)
            type(pool.backend).create(pool.backend, pages)

        pool.backend.create = create

    llm.collective_rpc(fail)


def mend_creation(llm: Any) -> int:
    """Undo that; return how often the second rank wanted pages."""

    def mend(worker: Any) -> int:
        if worker.rank == 0:
            return 0
        del worker.elastic.kv.pool.backend.create
        return int(worker.calls)

    return int(llm.collective_rpc(mend)[1])


@pytest.mark.parametrize("after", range(5))
def test_creation_fails_at_any_sector_of_one_rank(llm: Any, reference: list[list[int]], whole: int, after: int) -> None:
    rt = elastic.vllm.runtime(llm)
    rt.kv.resize("1MiB")
    wait_for(lambda: rt.kv.capacity_bytes <= 1 << 20)
    break_creation(llm, after)
    tokens = run(llm, LENGTHS, each_step=lambda step: rt.kv.resize("max") if step == 5 else None)
    assert tokens == expected(reference, LENGTHS)
    first, second = rt.status().kv
    assert first.capacity_bytes == second.capacity_bytes < whole
    assert mend_creation(llm) > after
    wait_for(lambda: {kv.capacity_bytes for kv in rt.status().kv} == {whole})
    assert run(llm, LENGTHS) == expected(reference, LENGTHS)
    assert rt.snapshot().traffic.preemptions == 0
    rt.check()


def test_the_controller_changes_both(two_ranks: None) -> None:
    policy = Policy(tick_s=0.01, pressure_ticks=1, recovery_ticks=1, cooldown_s=0.05, dwell_s=0.1, idle_s=0.1)
    with elastic_engine("8MiB", policy=policy, tensor_parallel_size=2) as llm:
        rt = elastic.vllm.runtime(llm)
        note_forms(llm)
        run(llm, [160] * 24)
        assert any("int4" in form for form in noted_forms(llm))
        come_back(rt)
        assert {type(event.action) for event in rt.events() if event.ok} >= {Swap, Restore}
        assert rt.health().faults == ()
        assert rt.snapshot().traffic.preemptions == 0
        rt.check()
