"""Linear modules of a feed-forward network that is cut by columns of its inside, computed with some of the parts.

Weights are in the checkpoint's orientation. They come in as few tensors as they lie in, one behind another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from elastic.planning.sharding.cut_plan import ParameterCut
from elastic.weights.shards.transposed_linear import transposed_linear

Parts = tuple[int, ...]
PartTensors = Mapping[str, tuple[torch.Tensor, ...]]
"""Of each cut parameter of a layer, by name, what some parts have of it."""


@dataclass(frozen=True)
class InnerMatrix:
    """From the hidden size to the inside; fused ones give what each of them gives, one behind another."""

    weight: ParameterCut
    bias: str
    """The name of its bias in the layer; "": it has none."""

    def compute(self, module: nn.Module, tensors: PartTensors, own: Parts, hidden: torch.Tensor) -> torch.Tensor:
        """Return the parts' columns of the inside, [..., columns], of hidden states [..., hidden size]."""
        weights = (weight.T if self.weight.dim else weight for weight in tensors[self.weight.name])
        inside = [functional.linear(hidden, weight) for weight in weights]
        joined = _joined(inside, -1)
        return joined + _joined(tensors[self.bias], 0) if self.bias else joined


@dataclass(frozen=True)
class OuterMatrix:
    """From the inside to the hidden size: outputs are added up over the ranks, and then the bias."""

    weight: ParameterCut

    def compute(self, module: nn.Module, tensors: PartTensors, own: Parts, inside: torch.Tensor) -> torch.Tensor:
        """Return what the parts add, [..., hidden size], of their columns of the inside [..., columns]."""
        weights = [weight if self.weight.dim else weight.T for weight in tensors[self.weight.name]]
        columns = torch.split(inside, [weight.shape[1] for weight in weights], -1)
        first, *others = map(transposed_linear, columns, weights)
        for other in others:
            first = first + other
        return first


def _joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
