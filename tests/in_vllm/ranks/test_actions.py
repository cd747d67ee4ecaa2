"""Two ranks (tensor parallel): an action is done by both before the same step, or by none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import elastic.vllm
from elastic.config import Policy
from elastic.errors import ElasticError
from elastic.types import Release, ResizeKV
from support.vllm_engine.engine import TEXTS, elastic_engine, expected, run

LENGTHS = [100] * len(TEXTS)
FULL = ("float32",) * 12


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the functions that are called on ranks here
        with elastic_engine("24MiB", tensor_parallel_size=2) as engine:
            yield engine


def wait_for(runtime: Any, form: tuple[str, ...]) -> None:
    wait_until(runtime.form, form)


def wait_until(tell: Callable[[], Any], expected: Any) -> None:
    deadline = time.monotonic() + 60
    while (told := tell()) != expected:
        assert time.monotonic() < deadline, told
        time.sleep(0.01)


def owners(runtime: Any) -> list[dict[str, int]]:
    return [dict(place.owners) for place in runtime.status().places]


def forms(llm: Any) -> set[tuple[str, ...]]:
    """The forms of the ranks: one, if they agree."""
    return {tuple(form) for form in llm.collective_rpc(lambda worker: worker.elastic.runtime.form())}


def test_layers_leave_and_return_on_both_ranks(llm: Any, reference: list[list[int]]) -> None:
    runtime = elastic.vllm.runtime(llm)

    def change(step: int) -> None:
        if step in (10, 50):
            runtime.release([3, 7])
        elif step in (30, 70):
            runtime.restore()
        if step % 20 == 15:
            assert len(forms(llm)) == 1

    assert run(llm, LENGTHS, each_step=change) == expected(reference, LENGTHS)
    wait_for(runtime, FULL)
    runtime.check()
    status = runtime.status()
    assert len(status.places) == len(status.kv) == 2
    assert [residency.shard for residency in status.residencies["model.layers.3"]] == ["0/2", "1/2"]


def test_no_rank_keeps_a_prefetch_buffer_under_a_policy(
    reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a first release waits for blocks. What came free before it was known to wait counts, too."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with elastic_engine("16MiB", policy=Policy(tick_s=3600.0), tensor_parallel_size=2) as llm:
        runtime = elastic.vllm.runtime(llm)
        first, second = owners(runtime)
        assert first == second
        assert llm.collective_rpc("elastic_look", args=("health",))[1].count('"running": false') == 1
        assert runtime.release([1, 2]).status == "deferred"
        wait_for(runtime, ("float32", "absent", "absent", *FULL[3:]))
        assert run(llm, LENGTHS) == expected(reference, LENGTHS)
        runtime.check()


def test_a_swap_commits_on_both_ranks_while_the_engine_is_idle(llm: Any) -> None:
    runtime = elastic.vllm.runtime(llm)
    assert runtime.swap([2, 5], "int4").layers == (2, 5)
    assert len(forms(llm)) == 1
    runtime.restore()
    wait_for(runtime, FULL)


def test_both_ranks_resize_whichever_place_is_named(llm: Any) -> None:
    runtime = elastic.vllm.runtime(llm)
    for number, cache in enumerate(runtime.status().kv):
        resize = ResizeKV(cache.place, (3 + number) << 20)
        assert len(runtime.plan([resize])) == 1
        runtime.apply([resize, Release((1,))])
        assert {kv.limit_bytes for kv in runtime.status().kv} == {(3 + number) << 20}
        runtime.restore()
        wait_for(runtime, FULL)
    runtime.kv.resize("max")
    runtime.check()


def test_a_refusal_of_one_rank_rolls_back_both(llm: Any, reference: list[list[int]]) -> None:
    runtime = elastic.vllm.runtime(llm)

    def refuse(worker: Any) -> None:
        if worker.rank == 1:
            from elastic.errors import CapacityError

            def no_host_memory(*args: Any, **kwargs: Any) -> Any:
                raise CapacityError("host memory is full", requested_bytes=1, free_bytes=0, total_bytes=0)

            worker.elastic._parts.weights.layers[4].keep = no_host_memory

    def relent(worker: Any) -> None:
        vars(worker.elastic._parts.weights.layers[4]).pop("keep", None)

    llm.collective_rpc(refuse)
    before = owners(runtime)
    with pytest.raises(ElasticError, match="host memory is full"):
        runtime.release([3, 4])
    assert forms(llm) == {FULL}
    wait_until(partial(owners, runtime), before)  # the KV cache maps again what was to be a buffer, in a step
    runtime.check()
    llm.collective_rpc(relent)
    assert runtime.release([3, 4]).layers == (3, 4)
    runtime.restore()
    wait_for(runtime, FULL)
    assert run(llm, LENGTHS) == expected(reference, LENGTHS)
