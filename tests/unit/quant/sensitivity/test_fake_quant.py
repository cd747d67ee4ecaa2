"""A rounded layer has the values of the codes in its matrices, and all else as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.quant.formats.integer import Integers, round_to_nearest
from elastic.quant.sensitivity.fake_quant import dequantized_layer
from elastic.weights.decoder import find_decoder
from support.architectures import build

CASES = {
    "llama-gqa": ({"self_attn.q_proj.weight", "mlp.down_proj.weight"}, {"input_layernorm.weight"}),
    "gpt2": ({"attn.c_attn.weight", "mlp.c_proj.weight"}, {"attn.c_attn.bias", "ln_1.weight"}),
    "mixtral": ({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}, {"mlp.gate.weight"}),
    "gpt-oss": ({"mlp.experts.gate_up_proj"}, {"mlp.router.weight", "mlp.experts.gate_up_proj_bias"}),
    "qwen3-next": ({"mlp.shared_expert.up_proj.weight"}, {"mlp.gate.weight", "linear_attn.conv1d.weight"}),
}


@pytest.mark.parametrize("architecture", CASES)
def test_matrices_are_rounded_and_nothing_else(architecture: str) -> None:
    layer = find_decoder(build(architecture)).layers[0]
    before = {name: p.clone() for name, p in layer.named_parameters()}
    rounded = dict(dequantized_layer(layer, Integers(3)).named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())
    changed = {name for name, p in rounded.items() if not torch.equal(p, before[name])}
    expected, kept = CASES[architecture]
    assert expected <= changed <= {name for name, p in before.items() if p.ndim > 1}
    assert not kept & changed
    assert kept <= set(before)


def test_groups_lie_along_the_inputs_however_a_matrix_is_stored() -> None:
    for architecture, name in (("gpt2", "attn.c_attn.weight"), ("gpt-oss", "mlp.experts.gate_up_proj")):
        layer = find_decoder(build(architecture)).layers[0]
        matrix = layer.get_parameter(name)
        rounded = dequantized_layer(layer, Integers(4, 32)).get_parameter(name)
        first = matrix if matrix.ndim == 2 else matrix[0]
        expected = round_to_nearest(first.T, Integers(4, 32)).value().T
        assert torch.equal(rounded if matrix.ndim == 2 else rounded[0], expected)


@pytest.mark.parametrize(("inputs", "size"), [(256, 128), (192, 64), (96, 32), (48, -1), (112, -1)])
def test_the_group_size_is_one_that_divides_the_inputs(inputs: int, size: int) -> None:
    layer = nn.Sequential(nn.Linear(inputs, 16))
    expected = round_to_nearest(layer[0].weight, Integers(4, size)).value()
    assert torch.equal(dequantized_layer(layer, Integers(4))[0].weight, expected)  # type: ignore[index]
