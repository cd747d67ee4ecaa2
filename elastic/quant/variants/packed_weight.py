"""Packed matrices in Parameter slots: the products of a forward pass are computed from their parts.

A parameter may be a matrix, [outputs, inputs] or, as in GPT-2's Conv1D, [inputs, outputs]; or those of all experts of a
layer, with one dimension more in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from elastic.quant.formats.base import BoundKernel, Kernel, KernelTarget, MatrixShape, PackedTensors, bind, format_of
from elastic.quant.formats.kernel_table import MatmulSpec, bucket_of, paths
from elastic.weights.batch_context import full_batch_tokens
from elastic.weights.proxy.tensor import FORWARD_FUNCTIONS, Function, WeightProxy, WeightSource, on_values, register


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix in parts, or those of several experts: the parts of all of them are stacked."""

    config: Any
    matrix: MatrixShape
    target: KernelTarget
    parts: PackedTensors
    dtype: torch.dtype
    """Of the parameter that it stands for."""
    transposed: bool = False
    """The parameter is [inputs, outputs]."""
    experts: int | None = None
    of_experts: bool = False
    """It is one of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's."""
        inner = (self.matrix.outputs, self.matrix.inputs)
        return (*(() if self.experts is None else (self.experts,)), *(reversed(inner) if self.transposed else inner))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] times the matrix: [..., outputs], in the dtype of x."""
        rows = x.reshape(-1, self.matrix.inputs)
        tokens = full_batch_tokens(rows.shape[0])
        bucket, version = bucket_of(tokens), paths.version
        bound = self._bound.get((x.dtype, bucket, version))
        if bound is None:
            path = paths.path(self._kernels.product(x.dtype), tokens, self._kernels.paths)
            if self.of_experts:  # seen once, for this product
                return path(rows, self.parts).view(*x.shape[:-1], self.matrix.outputs)
            bound = self._bound[x.dtype, bucket, version] = bind(path, self.parts)
        return bound(rows).view(*x.shape[:-1], self.matrix.outputs)

    def value(self) -> torch.Tensor:
        """The parameter that the parts stand for, in its shape and dtype."""
        if self.experts is not None:
            return torch.stack([self.expert(i).value() for i in range(self.experts)])
        value = format_of(self.config).value(self.config, self.parts, self.matrix, self.target)
        return (value.T if self.transposed else value).to(self.dtype)

    def expert(self, index: int) -> PackedMatrix:
        """One expert's."""
        one = replace(
            self, parts={name: part[index] for name, part in self.parts.items()}, experts=None, of_experts=True
        )
        one.__dict__["_kernels"] = self._kernels  # they take the parts as an argument
        return one

    def for_target(self, target: KernelTarget) -> PackedMatrix:
        """The same codes, packed for another target."""
        format_, each = (
            format_of(self.config),
            [self] if self.experts is None else list(map(self.expert, range(self.experts))),
        )
        made = [format_.repack(self.config, one.parts, self.matrix, self.target, target) for one in each]
        parts = made[0] if self.experts is None else {name: torch.stack([m[name] for m in made]) for name in made[0]}
        return replace(self, parts=parts, target=target)

    def flipped(self) -> PackedMatrix:
        """The same matrices, seen with inputs and outputs exchanged."""
        other = replace(self, transposed=not self.transposed)
        other.__dict__["_kernels"] = self._kernels
        return other

    def product_of(self, dtype: torch.dtype) -> MatmulSpec:
        """What stands for its products with activations of a dtype in the table of paths."""
        return self._kernels.product(dtype)

    @cached_property
    def _bound(self) -> dict[tuple[torch.dtype, int, int], BoundKernel]:
        """By dtype, bucket of tokens and version of the table: the path to take, for these parts."""
        return {}

    @cached_property
    def _kernels(self) -> _KernelCache:
        return _KernelCache(self)


class _KernelCache:
    """The paths of a packed matrix, and its products by dtype: looked up in every forward pass. Holds no tensor."""

    def __init__(self, packed: PackedMatrix) -> None:
        config, matrix, target = packed.config, packed.matrix, packed.target
        self.paths: Mapping[str, Kernel] = format_of(config).paths(config, packed.parts, matrix, target)
        self._any = MatmulSpec.of(config, packed.parts, matrix, target, packed.dtype)
        self._products: dict[torch.dtype, MatmulSpec] = {}

    def product(self, dtype: torch.dtype) -> MatmulSpec:
        found = self._products.get(dtype)
        if found is None:
            found = self._products[dtype] = replace(self._any, dtype=dtype)
        return found


class PackedSource:
    """A parameter that is at its place in packed form. What is read out whole, copied or saved is the full one."""

    def __init__(self, packed: PackedMatrix, full: WeightSource) -> None:
        self.packed = packed
        self._full = full
        self.copy, self.stored, self.write, self.describe = full.copy, full.stored, full.write, full.describe

    def value(self) -> torch.Tensor:
        return self.packed.value()

    def view(self, packed: PackedMatrix) -> PackedSource:
        """For a part of it, or another view: its copies are those of what is packed."""
        return PackedSource(packed, _ValueOf(packed, self._full))


class PlainSource:
    """A parameter that a variant has changed but not packed, such as a rescaled norm."""

    def __init__(self, tensor: torch.Tensor, full: WeightSource) -> None:
        self._tensor = tensor
        self.copy, self.stored, self.write, self.describe = full.copy, full.stored, full.write, full.describe

    def value(self) -> torch.Tensor:
        return self._tensor


class _ValueOf:
    """What views of a packed parameter read as: the value in use. They are not written."""

    def __init__(self, packed: PackedMatrix, full: WeightSource) -> None:
        self.value = self.copy = self.stored = packed.value
        self.write, self.describe = full.write, full.describe


def _linear(function: Function, args: Any, kwargs: Any) -> Any:
    """F.linear(x, weight, bias)."""
    x, weight, bias = args if len(args) == 3 else _bound(("input", "weight", "bias"), args, kwargs)
    return _product(x, weight, bias) if _usable(x, weight, False) else on_values(function, args, kwargs)


def _addmm(function: Function, args: Any, kwargs: Any) -> Any:
    """torch.addmm(bias, x, weight), as Conv1D calls it."""
    if len(args) == 3 and not kwargs and _usable(args[1], args[2], True):
        return _product(args[1], args[2], args[0])
    return on_values(function, args, kwargs)


def _matmul(function: Function, args: Any, kwargs: Any) -> Any:
    """x @ weight."""
    if len(args) == 2 and not kwargs and _usable(args[0], args[1], True):
        return _product(args[0], args[1], None)
    return on_values(function, args, kwargs)


def _getitem(function: Function, args: Any, kwargs: Any) -> Any:
    """weight[expert], or weight[experts] for a tensor of them."""
    weight, index = args
    packed = _packed(weight)
    if packed is None or packed.experts is None:
        return on_values(function, args, kwargs)
    if isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.ndim and not index.is_floating_point()):
        return _view(weight, packed.expert(int(index)))
    if isinstance(index, torch.Tensor) and index.ndim == 1 and index.dtype in (torch.int64, torch.int32):
        used, places = torch.unique(index, return_inverse=True)
        return torch.stack([packed.expert(int(i)).value() for i in used])[places]
    return on_values(function, args, kwargs)


def _transpose(function: Function, args: Any, kwargs: Any) -> Any:
    """weight.transpose(-2, -1)."""
    weight, packed = args[0], _packed(args[0])
    if packed is None or kwargs or len(args) != 3:
        return on_values(function, args, kwargs)
    last = {weight.ndim - 2, weight.ndim - 1}
    swaps_last = {dim % weight.ndim for dim in args[1:]} == last
    return _view(weight, packed.flipped()) if swaps_last else on_values(function, args, kwargs)


def _flip(function: Function, args: Any, kwargs: Any) -> Any:
    """weight.T and the like."""
    packed = _packed(args[0])
    return _view(args[0], packed.flipped()) if packed is not None else on_values(function, args, kwargs)


def _grouped(function: Function, args: Any, kwargs: Any) -> Any:
    """grouped_mm(x, weights, offs=offs): rows up to offs[i] belong to expert i."""
    given = {name for name, value in kwargs.items() if value is not None}
    if len(args) != 2 or given != {"offs"} or not _usable(args[0], args[1], True, experts=True):
        return on_values(function, args, kwargs)
    x, packed = args[0], args[1].source.packed
    out = x.new_zeros(x.shape[0], packed.matrix.outputs)
    start = 0
    for expert, stop in enumerate(kwargs["offs"].tolist()):
        if stop > start:
            out[start:stop] = packed.expert(expert).product(x[start:stop])
        start = stop
    return out


def _usable(x: Any, weight: Any, transposed: bool, *, experts: bool = False) -> bool:
    """Whether a product can be computed from the parts: they have no derivative."""
    packed = _packed(weight)
    if (
        packed is None
        or isinstance(x, WeightProxy)
        or not x.is_floating_point()
        or x.shape[-1:] != (packed.matrix.inputs,)
    ):
        return False
    if packed.transposed is not transposed or (packed.experts is not None) is not experts:
        return False
    return not (torch.is_grad_enabled() and x.requires_grad)


def _product(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = weight.source.packed.product(x)
    if bias is None:
        return out
    return out + (bias.source.value() if isinstance(bias, WeightProxy) else bias)


def _packed(weight: Any) -> PackedMatrix | None:
    source = weight.source if isinstance(weight, WeightProxy) else None
    return source.packed if isinstance(source, PackedSource) else None


def _view(weight: WeightProxy, packed: PackedMatrix) -> WeightProxy:
    source = weight.source
    assert isinstance(source, PackedSource)
    return WeightProxy.of_shape(weight, packed.shape, source.view(packed))


def _bound(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


_FLIPS = (torch.t, torch.Tensor.t, torch.Tensor.T.__get__, torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
_GROUPED = tuple(f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None)
for _kind in (PackedSource, PlainSource):  # a product may meet either first
    register(_kind, FORWARD_FUNCTIONS, on_values)
    register(_kind, (F.linear,), _linear)
    register(_kind, (torch.addmm,), _addmm)
    register(_kind, (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__), _matmul)
    register(_kind, (torch.Tensor.__getitem__,), _getitem)
    register(_kind, (torch.Tensor.transpose, torch.transpose), _transpose)
    register(_kind, _FLIPS, _flip)
    register(_kind, _GROUPED, _grouped)
