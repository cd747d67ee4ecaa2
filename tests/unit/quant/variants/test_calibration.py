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
