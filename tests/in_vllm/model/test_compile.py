"""Compiled models: every product is one opaque operator, so that a graph sees what the slots have now."""

from __future__ import annotations

import time
from typing import Any

import pytest

import elastic.vllm
from support.vllm_engine.engine import TEXTS, elastic_engine, expected, run

LENGTHS = [60] * len(TEXTS)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.long)], ids=["traced", "inductor"])
def test_a_compiled_model_follows_its_layers(
    quick: bool, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if quick:
        monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # the tracer only: inductor takes more than a minute
    with elastic_engine("32MiB", enforce_eager=False) as llm:
        runtime = elastic.vllm.runtime(llm)
        assert run(llm, LENGTHS) == expected(reference, LENGTHS)
        runtime.release([3, 7])
        assert run(llm, LENGTHS) == expected(reference, LENGTHS)
        runtime.swap([2, 5, 9], "int4")
        packed = run(llm, LENGTHS)
        assert packed == run(llm, LENGTHS) != expected(reference, LENGTHS)
        runtime.restore()
        wait_until_full(runtime)
        assert run(llm, LENGTHS) == expected(reference, LENGTHS)
        runtime.check()


def wait_until_full(runtime: Any) -> None:
    deadline = time.monotonic() + 30
    while set(runtime.form()) != {"float32"}:
        assert time.monotonic() < deadline, runtime.form()
        time.sleep(0.01)
