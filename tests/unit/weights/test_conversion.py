"""Casts and moves of a wrapped model are those of its class, where nothing is in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support.architectures import build, prompt


def test_what_leaves_the_layers_alone_is_done(wrapped: Any) -> None:
    model = build("llama-gqa")
    model.scale = nn.Parameter(torch.ones(2), requires_grad=False)
    wrapped(model).elastic.release([1])
    model._apply(torch.Tensor.double, recurse=False)
    assert model.scale.dtype == torch.float64
    assert model.lm_head.weight.dtype == torch.float32


def test_a_class_may_have_an_older_way_of_its_own(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits

    class Older(type(model)):  # type: ignore[misc]
        def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
            return super()._apply(fn)  # type: ignore[no-any-return]

    model.__class__ = Older
    assert torch.equal(wrapped(model).float()(**prompt()).logits, expected)
