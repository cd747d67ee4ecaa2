"""A result that is still on the device where it was computed, beside the layer that asked for it (CoCoServe, 3.3).

So consecutive modules at one place exchange nothing: what is computed from such results alone, element by element, is
computed there; every other operation has them come.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from elastic.weights.proxy.tensor import Function, WeightProxy

_T = torch.Tensor
STAYING: frozenset[Function] = frozenset(
    (
        *(F.silu, F.gelu, F.relu, F.dropout, F.mish, F.softplus, F.hardswish),
        *(torch.tanh, torch.sigmoid, torch.relu, torch.square, torch.pow, torch.mul, torch.add, torch.sub, torch.clamp),
        *(_T.tanh, _T.sigmoid, _T.relu, _T.square, _T.pow, _T.mul, _T.add, _T.sub, _T.clamp),
        *(_T.__mul__, _T.__rmul__, _T.__add__, _T.__radd__, _T.__sub__, _T.__rsub__, _T.__pow__, _T.__neg__),
    )
)
"""Element by element, and never a view of what they are given."""
_MEMORY: frozenset[Function] = frozenset(
    (_T.data_ptr, _T.untyped_storage, _T.storage, _T.numpy, _T.__array__, _T.tolist, _T.__dlpack__)
)


class RemoteTensor(torch.Tensor):
    """A tensor with the shape and dtype of `value`, on the device `home`, to which it comes when it is needed there."""

    value: torch.Tensor
    """There; and once it was needed, here."""
    home: torch.device

    @staticmethod
    def __new__(cls, value: torch.Tensor, home: torch.device) -> RemoteTensor:
        self: RemoteTensor = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=home
        )
        self.value, self.home = value, home
        return self

    @classmethod
    def __torch_function__(
        cls, function: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, WeightProxy) for kind in types):
            return NotImplemented  # a weight knows what to do
        if function in STAYING and "out" not in kwargs and _all_away(args, kwargs):
            return _stay(function, args, kwargs)
        if function in _MEMORY:
            return function(*_here(args), **_here(kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*_here(args), **_here(kwargs or {}))

    def come(self) -> torch.Tensor:
        """The plain tensor, at home from now on."""
        if self.value.device != self.home:
            self.value = self.value.to(self.home)
        return self.value

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.come().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.come().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.come())


def away(value: Any, home: torch.device) -> Any:
    """What a function has returned on another device: tensors come home when they are needed there."""
    if isinstance(value, tuple | list):
        return type(value)(away(one, home) for one in value)
    if not isinstance(value, torch.Tensor) or value.device == home:
        return value
    return value.to(home) if value.requires_grad else RemoteTensor(value, home)


def _stay(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    guests = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, RemoteTensor)]
    result = function(*_there(args), **_there(kwargs))
    same = next((guest for guest in guests if guest.value is result), None)  # dropout at rest, and what works in place
    return same if same is not None else away(result, guests[0].home)


def _all_away(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all tensors are still at one place."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    if not all(isinstance(tensor, RemoteTensor) for tensor in tensors):
        return False
    devices = {tensor.value.device for tensor in tensors}  # type: ignore[attr-defined]
    return len(devices) == 1 and tensors[0].home not in devices  # type: ignore[attr-defined]


def _here(tree: Any) -> Any:
    return tree_map_only(RemoteTensor, RemoteTensor.come, tree)


def _there(tree: Any) -> Any:
    return tree_map_only(RemoteTensor, lambda result: result.value, tree)
