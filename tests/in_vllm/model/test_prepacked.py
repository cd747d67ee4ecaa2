"""All full matrices of a vLLM engine in oneDNN's order: the tokens are those of vLLM, whatever leaves and returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import elastic.vllm
from elastic.engines.vllm import assembly
from elastic.weights.prepacked.onednn import OneDNNLayout, find_layout
from elastic.weights.prepacked.source import ResidentSource
from support.vllm_engine.engine import TEXTS, come_back, elastic_engine, expected, run

LENGTHS = [100] * len(TEXTS)


def layout_of(weight: torch.Tensor) -> OneDNNLayout | None:
    return find_layout((weight.shape[0], weight.shape[1]), weight.dtype)


@pytest.fixture(scope="module")
def llm(reference: list[list[int]]) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "prepacked_layout", layout_of)
        with elastic_engine("32MiB") as engine:
            yield engine


@pytest.mark.usefixtures("llm")
def test_all_of_them_are_packed() -> None:
    (model,) = assembly._models.values()
    sources = [slot.parameter.source for unit in model._parts.weights.layers for slot in unit.slots.values()]
    assert len(sources) == 12 * 4
    assert all(isinstance(source, ResidentSource) for source in sources)


def test_tokens_are_vllms_while_layers_leave_and_return(llm: Any, reference: list[list[int]]) -> None:
    rt = elastic.vllm.runtime(llm)

    def change(step: int) -> None:
        if step % 6 == 2:
            rt.release([step % 12, (step + 5) % 12])
        elif step % 6 == 5:
            rt.restore()

    assert run(llm, LENGTHS, each_step=change) == expected(reference, LENGTHS)
    rt.swap([2, 5, 9], "int4")
    assert run(llm, LENGTHS) != expected(reference, LENGTHS)
    rt.restore()
    come_back(rt)
    assert run(llm, LENGTHS) == expected(reference, LENGTHS)
    rt.check()
