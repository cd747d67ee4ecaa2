"""What a spawned child does in unit/runtime/test_runtime.py: it must be importable there."""

from __future__ import annotations

from typing import Any

import torch


def compare(model: Any, inputs: dict[str, torch.Tensor], expected: torch.Tensor, answers: Any) -> None:
    """Say whether the model that arrived is a plain one that computes the same."""
    torch.set_num_threads(1)
    plain = all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    answers.put((plain, getattr(model, "elastic", None) is None, torch.equal(model(**inputs).logits, expected)))
