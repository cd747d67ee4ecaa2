"""Other weights are loaded into an engine that runs: all layers have them, in every variant, or it is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import elastic.vllm
from elastic.engines.vllm import assembly
from elastic.errors import StateError
from elastic.weights.prepacked.onednn import find_layout
from support.vllm_engine.engine import MODEL, TEXTS, come_back, elastic_engine, run

LENGTHS = [40] * len(TEXTS)
LAYERS = [1, 3, 5]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with other weights of the same shapes."""
    path = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(MODEL, path)
    weights, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if weight.ndim > 1 and "embed" not in name:
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = (weight.float() * (1 + 0.3 * noise)).to(weight.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def in_all_forms(llm: Any) -> Iterator[list[list[int]]]:
    """Generate with full weights, with streamed ones, with packed ones, and with restored ones."""
    rt = elastic.vllm.runtime(llm)
    yield run(llm, LENGTHS)
    for act in (lambda: rt.release(LAYERS), lambda: rt.swap(LAYERS, "int4"), rt.restore):
        act()
        if act == rt.restore:
            come_back(rt)
        yield run(llm, LENGTHS)
    rt.check()


def reload(llm: Any, path: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


@pytest.fixture(scope="module")
def expected(other: str) -> list[list[list[int]]]:
    with elastic_engine("32MiB", other) as llm:
        return list(in_all_forms(llm))


def test_all_layers_have_the_new_weights(other: str, expected: list[Any]) -> None:
    with elastic_engine("32MiB") as llm:
        before = list(in_all_forms(llm))
        reload(llm, other)
        after = list(in_all_forms(llm))
    assert after == expected
    assert all(old != new for old, new in zip(before, after, strict=True))


def test_they_are_refused_where_matrices_lie_in_onednns_order(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "prepacked_layout", lambda w: find_layout((w.shape[0], w.shape[1]), w.dtype))
    with elastic_engine("32MiB") as llm:
        before = run(llm, LENGTHS)
        with pytest.raises(StateError, match="oneDNN's order"):
            reload(llm, other)
        assert run(llm, LENGTHS) == before


def test_they_are_refused_while_a_layer_is_not_full(other: str) -> None:
    with elastic_engine("32MiB") as llm:
        rt, before = elastic.vllm.runtime(llm), run(llm, LENGTHS)
        for act in (lambda: rt.release(LAYERS), lambda: rt.swap(LAYERS, "int4")):
            act()
            with pytest.raises(StateError, match=r"call restore\(\) before"):
                reload(llm, other)
            with pytest.raises(StateError, match=r"call restore\(\) before"):
                llm.collective_rpc("update_weights", args=({},))
        rt.restore()
        come_back(rt)
        assert run(llm, LENGTHS) == before
