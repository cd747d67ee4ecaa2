"""Moving weights into pages and out: any layout, little memory, everything as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import elastic
from elastic.memory.weight_layout import ParameterLayout
from elastic.weights import paging
from support.architectures import build, prompt
from support.child_process import in_fork


def transposed_and_padded(parameter: torch.Tensor) -> ParameterLayout:
    if parameter.ndim == 3:  # products of experts demand their strides
        return ParameterLayout.like(parameter)
    shape = tuple(parameter.shape)
    order = tuple(reversed(range(parameter.ndim)))
    return ParameterLayout(shape, parameter.dtype, order, tuple(n + 5 for n in shape), cuts=(0,))


@pytest.mark.parametrize("architecture", ["llama-gqa", "gpt2", "mixtral", "deepseek-v3"])
def test_a_transposed_padded_layout_computes_and_saves_as_the_checkpoint(
    architecture: str, wrapped: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = build(architecture)
    before, expected = {k: v.clone() for k, v in model.state_dict().items()}, model(**prompt()).logits
    strides = [p.stride() for p in model.parameters()]
    model.save_pretrained(tmp_path / "plain")
    monkeypatch.setattr(paging, "ParameterLayout", SimpleNamespace(like=transposed_and_padded))
    rt = wrapped(model).elastic
    layer = model.get_submodule(next(iter(rt.status().residencies)))
    matrix = next(p for p in layer.parameters() if p.ndim == 2)
    assert matrix.stride() == (1, matrix.shape[0] + 5)
    for step in (lambda: None, lambda: rt.release(0), lambda: rt.restore(0)):
        step()
        torch.testing.assert_close(model(**prompt()).logits, expected, rtol=1e-4, atol=1e-4)
        state = model.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in before.items())
    rt.release(1)
    model.save_pretrained(tmp_path / "wrapped")
    assert (tmp_path / "plain/model.safetensors").read_bytes() == (tmp_path / "wrapped/model.safetensors").read_bytes()
    elastic.unwrap(model)
    assert [p.stride() for p in model.parameters()] == strides
    assert torch.equal(model(**prompt()).logits, expected)


def test_the_state_of_a_resident_layer_is_contiguous_where_the_checkpoint_is(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "ParameterLayout", SimpleNamespace(like=transposed_and_padded))
    model = wrapped(build("llama-gqa"))
    for tensor in model.state_dict().values():
        assert tensor.is_contiguous()


@pytest.mark.slow
def test_wrapping_and_unwrapping_need_no_more_than_one_layer_beside_the_model() -> None:
    out = in_fork("""
    import re, torch, elastic
    from elastic.memory.pages.page_pool import PagePool
    from transformers import LlamaConfig, LlamaForCausalLM
    PagePool.__init__.__kwdefaults__["ready_pages"] = 0  # those kept ready, of no layer, are mapped and so counted
    config = LlamaConfig(vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=16,
                         num_attention_heads=8)
    model = LlamaForCausalLM(config).eval()
    layer = sum(p.nbytes for p in model.model.layers[0].parameters()) / 2**20

    def peak(work):
        work()  # what is allocated once and for all
        open("/proc/self/clear_refs", "w").write("5")
        def status(field):
            return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
        before = status("VmRSS")
        work()
        return status("VmHWM") - before

    for place in ("cpu=200MiB", "cpu=100MiB"):  # the second one has room for a part of the layers only
        def both():
            elastic.wrap(model, places=place)
            elastic.unwrap(model)
        print(peak(both) / layer)
    """)
    beside = 0.25  # what torch and malloc keep for themselves
    assert all(float(line) < 1 + beside for line in out.split()), out
