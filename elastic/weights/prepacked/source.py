"""Sources of full matrices that lie in oneDNN's order: where their layer computes, or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from elastic.weights.prepacked.joined import NOTHING, JoinedProduct, find_groups, join
from elastic.weights.prepacked.onednn import OneDNNLayout
from elastic.weights.prepacked.padding import multiply_padded, padded_rows
from elastic.weights.proxy.host_source import HostSource
from elastic.weights.proxy.tensor import FORWARD_FUNCTIONS, Function, WeightProxy, differentiable, on_values, register
from elastic.weights.proxy.weight_home import WeightHome


class ResidentSource:
    """A matrix, [outputs, inputs], where its layer computes; `packed` are its bytes, in the pages of a unit or not."""

    has_gradient = True

    def __init__(self, owner: str, layout: OneDNNLayout, packed: torch.Tensor, on_write: Callable[[], None]) -> None:
        self.packed = packed
        self.layout = layout
        self._owner = owner
        self._on_write = on_write
        self._matrix = layout.view(packed)
        self._padded = padded_rows(layout.shape[1], layout.dtype)
        self.joined: tuple[JoinedProduct, int] | None = None
        """The product with several matrices, and which of them this is; None: it is multiplied alone."""

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x, [..., inputs], with the matrix, and add a bias; returns [..., outputs] in the dtype of x."""
        if not _is_plain(x, self.layout):
            return F.linear(x, self.value().to(x.dtype), bias)
        product = None
        if self.joined is not None and bias is None:  # one that is added afterwards would be rounded once more
            joined, number = self.joined
            product = joined.product(x, number)
        return multiply_padded(x, self._matrix, bias, self._padded) if product is None else product

    def value(self) -> torch.Tensor:
        """Return the matrix, [outputs, inputs], in the plain order, in memory of its own."""
        return self.layout.unpack(self.packed)

    copy = stored = value

    def write(self, value: torch.Tensor) -> None:
        """Replace the matrix by `value`, of any shape that broadcasts to it."""
        plain = value.to(self.layout.dtype).expand(self.layout.shape).contiguous()
        with torch.no_grad():
            self.packed.copy_(self.layout.pack(plain))
        if self.joined is not None:
            self.joined[0].last = NOTHING
        self._on_write()

    def describe(self) -> str:
        """Say for an error message where the weight is."""
        return f"of {self._owner}, which is in oneDNN's order"


class AbsentSource(HostSource):
    """A matrix, [outputs, inputs], that is in this order in host memory, and in a prefetch buffer during a call."""

    def __init__(self, unit: WeightHome, name: str, layout: OneDNNLayout, variant: str = "") -> None:
        super().__init__(unit, name, variant)
        self._layout = layout
        self._padded = padded_rows(layout.shape[1], layout.dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x, [..., inputs], with the matrix, and add a bias; returns [..., outputs] in the dtype of x."""
        if _is_plain(x, self._layout):
            return multiply_padded(x, self._layout.view(self._bytes()), bias, self._padded)
        return F.linear(x, self.value().to(x.dtype), bias)

    def value(self) -> torch.Tensor:
        """Return the matrix, [outputs, inputs], in the plain order, in memory of its own."""
        return self._layout.unpack(self._bytes())

    copy = stored = value

    def _bytes(self) -> torch.Tensor:
        prefetched = self._unit.prefetched.tensors
        return self._unit.host_copies[self._name].tensor if prefetched is None else prefetched[self._name]


Source = ResidentSource | AbsentSource


def join_products(sources: Mapping[str, ResidentSource]) -> None:
    """Have matrices of a layer, by parameter, that are given the same inputs be multiplied at once where they can be.

    All of them must come and go together.
    """
    for group in find_groups(sources):
        members = [sources[name] for name in group]
        joined = join(tuple(each.layout for each in members), tuple(each.packed for each in members))
        for number, member in enumerate(members):
            member.joined = None if joined is None else (joined, number)


def _is_plain(x: torch.Tensor, layout: OneDNNLayout) -> bool:
    """Return whether oneDNN's product may be used: of this dtype, not of autocast's, and without a gradient."""
    recorded = x.requires_grad and torch.is_grad_enabled()
    return x.dtype is layout.dtype and not recorded and not torch.is_autocast_enabled("cpu")


def _linear(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute F.linear(x, weight, bias)."""
    names = ("input", "weight", "bias")
    x, weight, bias = args if len(args) == 3 else (*args, *map(kwargs.get, names[len(args) :]))
    source = weight.source if isinstance(weight, WeightProxy) else None
    if not isinstance(source, Source) or isinstance(x, WeightProxy) or isinstance(bias, WeightProxy):
        return on_values(function, args, kwargs)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):  # to the bit as on a plain model
        return F.linear(x, differentiable(weight, source.value()).to(x.dtype), bias)
    return source.product(x, bias)


for _kind in (ResidentSource, AbsentSource):
    register(_kind, FORWARD_FUNCTIONS, on_values)
    register(_kind, (F.linear,), _linear)
