"""Structured pruning of layers: the model with smaller matrices is the one with zeros, and smaller by as many bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

import elastic
from elastic import ConfigError, Structured
from elastic.quant.sensitivity.fake_quant import dequantized_layer
from elastic.quant.variants.channels import channel_groups, pack_channels
from elastic.quant.variants.eligible import LayerParameters
from elastic.weights.decoder import find_decoder
from elastic.weights.proxy.tensor import WeightProxy
from support.architectures import GQA, build, prompt

FFN = ("llama-gqa", "gemma", "phi3", "phi", "gpt2", "gpt-neox", "falcon", "opt", "bloom")
HEADS = ("llama-gqa", "qwen2-sliding", "qwen3", "gemma3", "mixtral")


def with_zeros(model: Any, config: Structured) -> Any:
    """The plain model with zeros where the variant has nothing."""
    layers = find_decoder(model).layers
    copied = copy.deepcopy(model)
    for mine, layer in zip(find_decoder(copied).layers, layers, strict=True):
        mine.load_state_dict(dequantized_layer(layer, config).state_dict())
    return copied


@pytest.mark.parametrize(
    ("architecture", "config"),
    [*((name, Structured(ffn=0.5)) for name in FFN), *((name, Structured(heads=0.5)) for name in HEADS)],
)
def test_the_model_is_the_one_with_zeros(architecture: str, config: Structured, wrapped: Any) -> None:
    model = build(architecture)
    full = model(**prompt(2)).logits
    expected = with_zeros(model, config)(**prompt(2)).logits
    rt = wrapped(model, variants=[elastic.Variant("pruned", config)]).elastic
    rt.swap([0, 1, 2], "pruned")
    logits = model(**prompt(2)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, full, atol=1e-2)
    rt.restore()
    assert torch.equal(model(**prompt(2)).logits, full)


def test_as_many_bytes_go_as_channels() -> None:
    layer = LayerParameters.of(find_decoder(build("llama-gqa")).layers[0], "layer")
    packed = pack_channels(layer, Structured(ffn=0.5, heads=0.5), {})
    full = {name: parameter.nbytes for name, (_, parameter) in layer.parameters.items() if name in packed}
    assert set(packed) == {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")} | {
        "self_attn.q_proj.weight",
        "self_attn.o_proj.weight",
    }
    for name, packing in packed.items():
        assert packing.parts["packed"].nbytes == full[name] // 2
        index = packing.parts["inputs" if "down" in name or "o_proj" in name else "outputs"]
        assert index.nbytes == 4 * (24 if "mlp" in name else 16)


def test_all_matrices_of_an_ffn_leave_the_same_columns_out() -> None:
    layer = LayerParameters.of(find_decoder(build("phi3")).layers[0], "layer")
    packed = pack_channels(layer, Structured(ffn=0.5), {})
    kept = packed["mlp.down_proj.weight"].parts["inputs"]
    assert torch.equal(packed["mlp.gate_up_proj.weight"].parts["outputs"], torch.cat([kept, kept + 48]))
    assert len(kept) == 24


def test_a_bias_behind_as_many_columns_as_outputs_does_not_know_them() -> None:
    config = t.LlamaConfig(**{**GQA, "intermediate_size": GQA["hidden_size"], "mlp_bias": True})
    packed = pack_channels(LayerParameters.of(t.LlamaForCausalLM(config).model.layers[0]), Structured(ffn=0.5), {})
    assert set(packed) == {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def test_the_least_important_columns_and_heads_go() -> None:
    model = build("llama-gqa")
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    for matrix in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T):
        matrix[5:13] *= 0.01
    for matrix in (attention.q_proj.weight, attention.o_proj.weight.T):
        matrix[8:16] *= 0.01  # the second head
    layer = LayerParameters.of(model.model.layers[0], "layer")
    packed = pack_channels(layer, Structured(ffn=40 / 48, heads=0.75), {})
    assert packed["mlp.down_proj.weight"].parts["inputs"].tolist() == [*range(5), *range(13, 48)]
    assert packed["self_attn.q_proj.weight"].parts["outputs"].tolist() == [*range(8), *range(16, 32)]
    inputs = torch.randn(20, 48)
    inputs[:, 5:13] *= 1e4
    inputs[:, 20:28] = 0  # columns that do nothing on the text, whatever their weights
    config = Structured(ffn=40 / 48, by="wanda")
    packed = pack_channels(layer, config, {"layer.mlp.down_proj.weight": inputs})
    assert packed["mlp.down_proj.weight"].parts["inputs"].tolist() == [*range(20), *range(28, 48)]


@pytest.mark.parametrize(
    ("architecture", "config", "words"),
    [
        ("mixtral", Structured(ffn=0.5), r"model.layers.0 has experts"),
        ("qwen3-next", Structured(ffn=0.5), r"model.layers.0 has experts"),
        ("gpt2", Structured(heads=0.5), r"transformer.h.0 has no query heads of their own matrix"),
        ("gpt-oss", Structured(heads=0.5), r"no query heads"),
        ("llama-gqa", Structured(ffn=0.99), r"ffn=0.99.*so few that none would be"),
        ("llama-gqa", Structured(heads=0.9), r"heads=0.9.*so few that none would be"),
    ],
)
def test_layers_without_such_channels_are_refused_in_words(architecture: str, config: Structured, words: str) -> None:
    model = build(architecture)
    with pytest.raises(ConfigError, match=words):
        elastic.wrap(model, variants=[elastic.Variant("pruned", config)])
    assert not any(isinstance(p, WeightProxy) for p in model.parameters())


class NormedFFN(nn.Module):
    """An FFN whose columns are normed together: without some of them, the others would change."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(16, 32), "norm": nn.LayerNorm(32), "fc2": nn.Linear(32, 16)})


def test_columns_and_heads_that_know_of_one_another_are_not_touched() -> None:
    layer = LayerParameters.of(NormedFFN(), "layer")
    matrices = {name: p for name, (_, p) in layer.parameters.items() if p.ndim == 2}
    with pytest.raises(ConfigError, match="no FFN"):
        channel_groups(layer, Structured(ffn=0.5), matrices)
    attention = copy.deepcopy(find_decoder(build("qwen3")).layers[0])
    attention.self_attn.q_norm.weight = nn.Parameter(torch.ones(32))  # type: ignore[union-attr]  # over all heads
    layer = LayerParameters.of(attention, "layer")
    matrices = {name: p for name, (_, p) in layer.parameters.items() if p.ndim == 2}
    with pytest.raises(ConfigError, match="no query heads"):
        channel_groups(layer, Structured(heads=0.5), matrices)
