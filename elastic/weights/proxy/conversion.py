"""Casts and moves of a whole model: with weights that are not plain, these are refused before any other has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic.weights.proxy.tensor import WeightProxy, refusal


def convert(root: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Do what `to`, `half`, `share_memory` and their like ask of a module: `function` of each tensor, of any shape."""
    with torch.no_grad():
        for weight in root.parameters(recurse):
            if isinstance(weight, WeightProxy) and function(weight) is not weight:
                raise refusal("a cast or move of the model", weight)
    kind: Any = type(root)
    options = {} if recurse else {"recurse": False}  # classes may have an `_apply` of a function alone
    return kind._apply(root, function, **options)  # type: ignore[no-any-return]
