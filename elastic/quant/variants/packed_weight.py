"""Packed matrices in Parameter slots: the products of a forward pass are computed from their parts.

A parameter may be a matrix, [outputs, inputs] or, as in GPT-2's Conv1D, [inputs, outputs]; or those of all experts of a
layer, with one dimension more in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from elastic.quant.formats.base import BoundKernel, Format, Kernel, KernelTarget, PackedTensors, bind
from elastic.quant.formats.kernel_table import MatmulSpec, bucket_of, paths
from elastic.weights.batch_context import full_batch_tokens
from elastic.weights.proxy.tensor import (
    FORWARD_FUNCTIONS,
    GROUPED,
    SWAPS,
    Function,
    WeightProxy,
    WeightSource,
    on_values,
    register,
    trains,
)


class KernelCache:
    """The kernels of a packed matrix, each looked up once. Holds no tensor."""

    def __init__(self) -> None:
        self.kernels: Mapping[str, Kernel] = {}
        """The paths of the format, by name; empty until the first product."""
        self.chosen: dict[tuple[torch.dtype, int, int], Kernel] = {}
        """Dtype, bucket of tokens and version of the table -> the path to take."""


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix in parts, or those of several experts: the parts of all of them are stacked."""

    format: Format
    parts: PackedTensors
    dtype: torch.dtype
    """The dtype of the parameter that it stands for."""
    transposed: bool = False
    """True if the parameter is [inputs, outputs]."""
    experts: int | None = None
    """The number of experts; None for a single matrix."""
    of_experts: bool = False
    """True if it is one expert of several."""
    cache: KernelCache = field(default_factory=KernelCache, repr=False, compare=False)
    """Shared by views of the same matrices: kernels take the parts as an argument."""
    _bound: dict[tuple[torch.dtype, int, int], BoundKernel] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The same key as of `KernelCache.chosen` -> the path to take, for these parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        inner = (self.format.matrix.outputs, self.format.matrix.inputs)
        return (*(() if self.experts is None else (self.experts,)), *(reversed(inner) if self.transposed else inner))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x: [..., inputs] with the matrix; returns [..., outputs] in the dtype of x."""
        matrix = self.format.matrix
        rows = x if x.dim() == 2 else x.reshape(-1, matrix.inputs)
        tokens = full_batch_tokens(rows.shape[0])
        key = x.dtype, bucket_of(tokens), paths.version
        bound = self._bound.get(key)
        if bound is None:
            kernel = self.cache.chosen.get(key)
            if kernel is None:
                kernel = self.cache.chosen[key] = self._choose_kernel(x.dtype, tokens)
            if self.of_experts:  # a matrix made for this product alone
                return kernel(rows, self.parts).view(*x.shape[:-1], matrix.outputs)
            bound = self._bound[key] = bind(kernel, self.parts)
        y = bound(rows)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], matrix.outputs)

    def value(self) -> torch.Tensor:
        """Expand the parts to the parameter, [..., outputs, inputs] or transposed, in its dtype."""
        if self.experts is not None:
            return torch.stack([self.expert(i).value() for i in range(self.experts)])
        value = self.format.value(self.parts)
        return (value.T if self.transposed else value).to(self.dtype)

    def expert(self, index: int) -> PackedMatrix:
        """Return the matrix of one expert."""
        parts = {name: part[index] for name, part in self.parts.items()}
        return replace(self, parts=parts, experts=None, of_experts=True)

    def for_target(self, target: KernelTarget) -> PackedMatrix:
        """Return the same codes, packed for another target."""
        matrices = [self] if self.experts is None else [self.expert(i) for i in range(self.experts)]
        packed = [self.format.repack(matrix.parts, target) for matrix in matrices]
        parts = packed[0] if self.experts is None else stack_parts(packed)
        return replace(self, format=replace(self.format, target=target), parts=parts, cache=KernelCache())

    def spec(self, dtype: torch.dtype) -> MatmulSpec:
        """Return the key in the kernel table of its products with activations of a dtype."""
        form = self.format
        return MatmulSpec.of(form.config, self.parts, form.matrix, form.target, dtype)

    def _choose_kernel(self, dtype: torch.dtype, tokens: int) -> Kernel:
        if not self.cache.kernels:
            self.cache.kernels = self.format.paths(self.parts)
        return paths.path(self.spec(dtype), tokens, self.cache.kernels)


def stack_parts(experts: Sequence[PackedTensors]) -> dict[str, torch.Tensor]:
    """Stack the parts of experts, each part of one shape, into [experts, ...]."""
    return {name: torch.stack([parts[name] for parts in experts]) for name in experts[0]}


@dataclass(eq=False)
class VariantSource:
    """The source of a parameter that a variant has changed: copied, saved and written is the full parameter."""

    has_gradient = False
    full: WeightSource

    def copy(self) -> torch.Tensor:
        """Return a copy of the full parameter, in its shape, `[...]`, and dtype."""
        return self.full.copy()

    def stored(self) -> torch.Tensor:
        """Return the full parameter as it is kept, in its shape, `[...]`, and dtype."""
        return self.full.stored()

    def write(self, value: torch.Tensor) -> None:
        """Replace the full parameter by a value of its shape, `[...]`."""
        self.full.write(value)

    def describe(self) -> str:
        """Say where the full parameter is."""
        return self.full.describe()


@dataclass(eq=False)
class PlainSource(VariantSource):
    """The source of a parameter that a variant has changed but not packed, such as a rescaled norm."""

    tensor: torch.Tensor

    def value(self) -> torch.Tensor:
        """Return the changed parameter, in its own shape, `[...]`, and dtype."""
        return self.tensor


@dataclass(eq=False)
class PackedSource(VariantSource):
    """The source of a packed parameter."""

    packed: PackedMatrix

    def value(self) -> torch.Tensor:
        """Expand the parts to the parameter, [..., outputs, inputs] or transposed, in its dtype."""
        return self.packed.value()


class PackedView(PackedSource):
    """The source of a part or another view of a packed parameter: also copied and saved is the value in use."""

    copy = stored = PackedSource.value


def _linear(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute F.linear(x, weight, bias)."""
    names = ("input", "weight", "bias")
    x, weight, bias = args if len(args) == 3 else (*args, *map(kwargs.get, names[len(args) :]))
    return _product(x, weight, bias) if _usable(x, weight, False) else on_values(function, args, kwargs)


def _matmul(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute x @ weight, or torch.addmm(bias, x, weight), as Conv1D calls it."""
    addends = args[:1] if function is torch.addmm else ()
    factors = args[len(addends) :]
    if len(factors) == 2 and not kwargs and _usable(factors[0], factors[1], True):
        return _product(factors[0], factors[1], addends[0] if addends else None)
    return on_values(function, args, kwargs)


def _getitem(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute weight[expert], or weight[experts] for a tensor of them."""
    weight, index = args
    packed = _packed(weight)
    if packed is None or packed.experts is None:
        return on_values(function, args, kwargs)
    numbers = isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32)
    if type(index) is int or (numbers and not index.ndim):
        return _view(weight, packed.expert(int(index)))
    if numbers and index.ndim == 1 and len(index) and not trains(weight):
        used, positions = torch.unique(index, return_inverse=True)
        return torch.stack([packed.expert(int(i)).value() for i in used])[positions]
    return on_values(function, args, kwargs)


def _transpose(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute weight.T, weight.transpose(-2, -1) and the like."""
    weight, packed = args[0], _packed(args[0])
    dims = {dim % weight.ndim for dim in args[1:]} if len(args) == 3 and not kwargs else set()
    if packed is None or (function not in SWAPS and dims != {weight.ndim - 2, weight.ndim - 1}):
        return on_values(function, args, kwargs)
    return _view(weight, replace(packed, transposed=not packed.transposed))


def _grouped(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute grouped_mm(x, weights, offs=offs): rows up to offs[i] belong to expert i."""
    named = {name for name, value in kwargs.items() if value is not None}
    if len(args) != 2 or named != {"offs"} or not _usable(args[0], args[1], True, experts=True):
        return on_values(function, args, kwargs)
    x, packed = args[0], args[1].source.packed
    out = x.new_zeros(x.shape[0], packed.format.matrix.outputs)
    offs, start = kwargs["offs"], 0
    offs[0].item()  # who records operators must see that contents are read, which `tolist` does not show
    for expert, stop in enumerate(offs.tolist()):
        if stop > start:
            out[start:stop] = packed.expert(expert).product(x[start:stop])
        start = stop
    return out


def _usable(x: Any, weight: Any, transposed: bool, *, experts: bool = False) -> bool:
    """Return whether a product can be computed from the parts, through which no gradient flows."""
    packed = _packed(weight)
    if packed is None or isinstance(x, WeightProxy) or not x.is_floating_point():
        return False
    if x.shape[-1:] != (packed.format.matrix.inputs,) or packed.transposed is not transposed:
        return False
    recorded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return (packed.experts is not None) is experts and not recorded


def _product(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x: [..., inputs] and add a bias, [outputs]; returns [..., outputs] in the dtype of a plain product."""
    out: torch.Tensor = weight.source.packed.product(x)
    if bias is not None:
        out = out + (bias.source.value() if isinstance(bias, WeightProxy) else bias)
    device = out.device.type
    if torch.is_autocast_enabled(device) and out.dtype != torch.float64:
        return out.to(torch.get_autocast_dtype(device))
    return out


def _packed(weight: Any) -> PackedMatrix | None:
    source = weight.source if isinstance(weight, WeightProxy) else None
    return source.packed if isinstance(source, PackedSource) else None


def _view(weight: WeightProxy, packed: PackedMatrix) -> WeightProxy:
    """Return a proxy for a part of a packed parameter, or for another view of it."""
    source = weight.source
    assert isinstance(source, PackedSource)
    return WeightProxy.of_shape(weight, packed.shape, PackedView(source.full, packed))


for _kind in (PackedSource, PackedView, PlainSource):  # a product may meet either first
    register(_kind, FORWARD_FUNCTIONS, on_values)
    register(_kind, (F.linear,), _linear)
    register(_kind, (torch.addmm, torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__), _matmul)
    register(_kind, (torch.Tensor.__getitem__,), _getitem)
    register(_kind, (torch.Tensor.transpose, torch.transpose, *SWAPS), _transpose)
    register(_kind, GROUPED, _grouped)
