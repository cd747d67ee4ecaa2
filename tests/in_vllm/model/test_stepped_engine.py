"""Workers in processes of their own, the engine in the user's, which steps it: actions end while nobody does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import elastic.vllm
from support.vllm_engine.engine import FULL, TEXTS, coordinator, elastic_engine, expected, run

LENGTHS = [60] * len(TEXTS)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with elastic_engine("16MiB", distributed_executor_backend="mp") as engine:
            yield engine


def test_what_was_deferred_is_done_without_another_request(llm: Any, reference: list[list[int]]) -> None:
    rt, before = elastic.vllm.runtime(llm), coordinator(llm).mapped
    for _ in range(3):
        rt.release(range(6))
        assert coordinator(llm).mapped > before
        rt.restore()
        assert rt.form() == FULL
        assert coordinator(llm).mapped == before
        assert run(llm, LENGTHS) == expected(reference, LENGTHS)
    rt.check()


def test_a_smaller_cache_is_there_without_another_request(llm: Any) -> None:
    rt, before = elastic.vllm.runtime(llm), coordinator(llm).mapped
    rt.kv.resize(rt.kv.maximum_bytes // 2)
    assert coordinator(llm).mapped < before
    rt.kv.resize("max")
    assert coordinator(llm).mapped == before
