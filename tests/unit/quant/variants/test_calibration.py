"""Samples of the inputs of matrices."""

from __future__ import annotations

import torch
from torch import nn

from elastic.quant.variants.calibration import inputs_of
from support.architectures import build


def test_a_matrix_that_was_given_no_rows_has_no_samples() -> None:
    """Such as that of an expert which no token chose: what needs samples goes by its weights alone."""
    model, expert = build("llama-gqa"), nn.Linear(32, 8)
    mlp = model.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda module, args: (expert(args[0][:, :0]), None)[1])
    samples = inputs_of(model, {"expert": expert, "gate": mlp.gate_proj}, torch.arange(12).view(2, 6))
    assert {name: tuple(rows.shape) for name, rows in samples.items()} == {"gate": (12, 32)}


def test_text_passes_as_in_inference_whatever_the_model_is_in() -> None:
    """Dropout would draw from the program's random numbers, and other samples each time."""
    model, ids = build("llama-gqa"), torch.arange(12).view(2, 6)
    mlp = model.model.layers[1].mlp
    expected = inputs_of(model, {"gate": mlp.gate_proj}, ids)["gate"]
    for layer in model.train().model.layers:
        layer.self_attn.attention_dropout = 0.5
    mlp.eval()
    before = torch.get_rng_state()
    assert torch.equal(inputs_of(model, {"gate": mlp.gate_proj}, ids)["gate"], expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert [model.training, mlp.training] == [True, False]


def test_inputs_may_be_given_by_name() -> None:
    model, ids = build("llama-gqa"), torch.arange(12).view(2, 6)
    mlp = model.model.layers[0].mlp
    expected = inputs_of(model, {"down": mlp.down_proj}, ids)
    mlp.forward = lambda x: mlp.down_proj(input=mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert torch.equal(inputs_of(model, {"down": mlp.down_proj}, ids)["down"], expected["down"])
