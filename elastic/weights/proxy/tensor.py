"""Proxies in Parameter slots, of weights that are absent, elsewhere or packed.

A `WeightProxy` has the shape, dtype and device of the parameter it stands for, and a `WeightSource` that knows its
value. Known operations of a forward pass are looked up in a table by (kind of source, function), into which kinds
register kernels; all others see the value, a plain tensor. Writing in place is refused, but for `copy_` (that is how
`load_state_dict` writes): it goes to the source.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from elastic.errors import StateError
from elastic.memory.pages.mapped_storage import outside_inference_mode
from elastic.weights.proxy.compilation import refuse_compilation

Function = Callable[..., Any]


class WeightSource(Protocol):
    """The source of a weight's value. All tensors have the same shape and dtype."""

    has_gradient: bool
    """Whether the value is the weight itself, as far as gradients are concerned."""

    def value(self) -> torch.Tensor:
        """Return the weight, any shape, as a plain tensor on its device: right now, for reading only."""

    def copy(self) -> torch.Tensor:
        """Return the weight, any shape, as a plain tensor that nobody else has; it may lie in host memory."""

    def stored(self) -> torch.Tensor:
        """Return the weight, any shape, as a plain tensor that lives on, to be read; it may lie in host memory."""

    def write(self, value: torch.Tensor) -> None:
        """Replace the weight by `value`, of any shape that broadcasts to it. Raises `StateError` where it cannot."""

    def describe(self) -> str:
        """Say for an error message which weight it is, and where."""


_kernels: dict[tuple[type, Function], Function] = {}


def register(kind: type, functions: Iterable[Function], kernel: Function) -> None:
    """Have `kernel(function, args, kwargs)` compute these functions of a weight with this kind of source."""
    for function in functions:
        _kernels[kind, function] = kernel


def on_values(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute a function on plain tensors: the kernel for kinds of sources whose value is at hand."""
    return function(*map(_value_of, args), **{name: _value_of(arg) for name, arg in kwargs.items()})


def _value_of(arg: Any) -> Any:
    if not isinstance(arg, WeightProxy):
        return arg
    value = arg.source.value()
    return differentiable(arg, value) if trains(arg) else value


def trains(weight: Any) -> bool:
    """Return whether an argument of a function is a proxy that a gradient is asked for."""
    return torch.is_grad_enabled() and isinstance(weight, WeightProxy) and weight.requires_grad


def differentiable(weight: WeightProxy, value: torch.Tensor) -> torch.Tensor:
    """Return a value, any shape, through which the weight gets its gradient, or whoever asks for that is refused."""
    return _Value.apply(weight, value)  # type: ignore[no-any-return, no-untyped-call]


FORWARD_FUNCTIONS: tuple[Function, ...] = (
    F.linear,
    F.layer_norm,
    F.rms_norm,
    F.conv1d,
    torch.addmm,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.baddbmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.Tensor.__getitem__,
    torch.mul,
    torch.add,
    torch.Tensor.mul,
    torch.Tensor.__mul__,
    torch.Tensor.__rmul__,
    torch.Tensor.add,
    torch.Tensor.__add__,
    torch.Tensor.__radd__,
)
"""The operations on weights in a forward pass: products (those of experts included), norms, biases."""
SWAPS = (torch.t, torch.Tensor.t, torch.Tensor.T.__get__, torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
"""Views with the two dimensions of a matrix swapped, which need not be named."""
GROUPED = tuple(f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None)
"""Products of rows with the experts that they belong to, in the builds of torch that have them."""


class WeightProxy(torch.Tensor):
    """A tensor in the place of a parameter whose bytes are not in the slot."""

    source: WeightSource

    @staticmethod
    def __new__(cls, like: torch.Tensor, source: WeightSource | None = None, **options: Any) -> WeightProxy:
        if source is None:  # of `type(parameter)(tensor, requires_grad=…)`, as accelerate makes what it puts in a slot
            raise StateError(
                "another library would put a parameter of its own in the place of a weight that is absent, packed or "
                "elsewhere; unwrap the model before it is dispatched, offloaded or loaded"
            )
        with outside_inference_mode():
            self: WeightProxy = torch.Tensor._make_wrapper_subclass(
                cls,
                like.shape,
                strides=like.stride(),
                dtype=like.dtype,
                device=like.device,
                requires_grad=like.requires_grad,
            )
        self.__dict__.update(getattr(like, "__dict__", {}))
        self._is_param = True  # isinstance(weight, nn.Parameter), as modules demand of what they register
        self.source = source
        return self

    @classmethod
    def of_shape(cls, like: torch.Tensor, shape: Sequence[int], source: WeightSource) -> WeightProxy:
        """Make a proxy of any shape, with the dtype and device of `like`, contiguous: for a part of it, or a view."""
        with outside_inference_mode():
            self: WeightProxy = torch.Tensor._make_wrapper_subclass(
                cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
            )
        self.source = source
        return self

    @classmethod
    def __torch_function__(
        cls, function: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            refuse_compilation()
        kwargs = kwargs or {}
        proxy = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, WeightProxy)), None)
        kernel = _kernels.get((type(proxy.source), function)) if proxy is not None else None
        if kernel is not None and "out" not in kwargs:
            return kernel(function, args, kwargs)
        if function in _NEED_MEMORY:
            return function(*_plain(args), **_plain(kwargs))
        if function is torch.Tensor.detach and sys._getframe(1).f_code is _NEW_PARAMETER:  # it wants a proxy back
            raise StateError(
                f"a weight {args[0].source.describe()}, cannot be the data of another Parameter, which would share its "
                "memory; give that a copy, as .detach() gives"
            )
        if function in _ADDRESSES:
            raise StateError(
                f"a weight {args[0].source.describe()}, has no address; use a copy of it, as .detach() gives; to share "
                "or dispatch the model, unwrap it first"
            )
        if function in _WRITE and args[0] is not args[1]:
            raise refusal("assignment", args[0] if isinstance(args[0], WeightProxy) else args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.is_view and torch.is_inference_mode_enabled():  # of what is made there no tensor can be a view
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(function, types, args, kwargs)
        if function is torch.ops.aten.copy_.default and isinstance(args[0], WeightProxy):
            args[0].source.write(_plain(args[1]))
            return args[0]
        if function in _COPIES:
            return _copy_on_device(args[0])
        if function is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:
            return args[0]  # a parametrization begins so, such as that of PEFT for an adapter on a parameter
        kwargs = kwargs or {}
        for number, argument in enumerate(function._schema.arguments):
            target = args[number] if number < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for weight in target if isinstance(target, list | tuple) else (target,):
                if written and isinstance(weight, WeightProxy):
                    raise refusal(str(function), weight)
        return function(*_plain(args), **_plain(kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy of a model has plain parameters."""
        copied = nn.Parameter(self.source.copy().to(self.device), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved, or sent to another process, as the plain parameter it stands for."""
        return nn.Parameter, (self.source.stored().to(self.device), self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Weight({tuple(self.shape)}, {self.dtype}, {self.source.describe()})"


class _Value(torch.autograd.Function):
    """The value of a weight, any shape: its gradient is that of the proxy in the slot, if the source has one."""

    @staticmethod
    def forward(ctx: Any, weight: WeightProxy, value: torch.Tensor) -> torch.Tensor:
        ctx.source = weight.source
        return value.detach()  # the tensor itself is the source's, and would be given a graph

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not ctx.source.has_gradient:
            raise StateError(
                f"a weight {ctx.source.describe()}, gets no gradient there: have it at its place in full (rt.restore, "
                "rt.migrate), or freeze it (requires_grad_(False)), and gradients flow through it"
            )
        return gradient, None


_COPIES = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default))
_NEED_MEMORY = frozenset(
    (
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.tolist,
        torch.Tensor.__dlpack__,
    )
)
_ADDRESSES = frozenset(
    (torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.share_memory_)
)
_NEW_PARAMETER = nn.Parameter.__new__.__code__
_WRITE = frozenset((torch.Tensor.__setitem__, torch.Tensor.data.__set__))  # type: ignore[attr-defined]


def _copy_on_device(weight: WeightProxy) -> torch.Tensor:
    """Return a plain copy where the weight says that it is, or in host memory where the device has no room for it.

    `state_dict` is made of these, also of models that are larger than their device.
    """
    copy = weight.source.copy()
    try:
        return copy.to(weight.device)
    except torch.OutOfMemoryError:
        return copy


def _plain(tree: Any) -> Any:
    return tree_map_only(WeightProxy, _as_described, tree)


def _as_described(proxy: WeightProxy) -> torch.Tensor:
    """Return the value of a weight, any shape, with the strides that the proxy has: views are made by these."""
    value = proxy.source.value()
    if value.stride() == proxy.stride():
        return value
    return torch.empty_strided(value.shape, proxy.stride(), dtype=value.dtype, device=value.device).copy_(value)


def refusal(what: str, weight: WeightProxy) -> StateError:
    """Make the error of whoever would write a weight, any shape, that is not plain."""
    return StateError(
        f"{what} would write into a weight {weight.source.describe()}; restore its layer first "
        "(model.elastic.restore()), or write with copy_ or load_state_dict; to move, cast or train the model, or if it "
        "was wrapped with prepack=True, unwrap it first"
    )
