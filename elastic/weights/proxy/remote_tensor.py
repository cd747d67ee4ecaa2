"""A result that is still on the device where it was computed, beside the layer that asked for it (CoCoServe, 3.3).

So consecutive modules at one place exchange nothing: what is computed from such results alone, element by element, is
computed there; every other operation has them copied home.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from elastic.memory.copy_engine import to_device
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
    (_T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_, _T.numpy, _T.__array__, _T.tolist, _T.__dlpack__)
)


class RemoteTensor(torch.Tensor):
    """A tensor with the shape and dtype of `value`, on the device `home`, to which it is copied when needed there."""

    value: torch.Tensor
    """Where it was computed; once it was needed, on the home device."""
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
        if function in STAYING and "out" not in kwargs and _all_at_one_place(args, kwargs):
            return _compute_remotely(function, args, kwargs)
        if function in _MEMORY:
            return function(*_fetched(args), **_fetched(kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*_fetched(args), **_fetched(kwargs or {}))

    def fetched(self) -> torch.Tensor:
        """Return the plain tensor, of the same shape and dtype, on its home device, where it stays from now on."""
        if self.value.device != self.home:
            self.value = to_device(self.value, self.home)
        return self.value

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.fetched().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetched().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.fetched())


def wrap_remote(value: Any, home: torch.device) -> Any:
    """Wrap what a function has returned on another device, so that tensors are copied home when needed there."""
    if isinstance(value, tuple | list):
        return type(value)(wrap_remote(item, home) for item in value)
    if not isinstance(value, torch.Tensor) or value.device == home:
        return value
    return to_device(value, home) if value.requires_grad else RemoteTensor(value, home)


def _compute_remotely(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    remote = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, RemoteTensor)]
    values = tree_map_only(RemoteTensor, lambda tensor: tensor.value, (args, kwargs))
    result = function(*values[0], **values[1])
    # dropout at rest, and what works in place, return what they were given
    same = next((tensor for tensor in remote if tensor.value is result), None)
    return same if same is not None else wrap_remote(result, remote[0].home)


def _all_at_one_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all tensors are still where they were computed, at one place."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    if not all(isinstance(tensor, RemoteTensor) for tensor in tensors):
        return False
    devices = {tensor.value.device for tensor in tensors}  # type: ignore[attr-defined]
    return len(devices) == 1 and tensors[0].home not in devices  # type: ignore[attr-defined]


def _fetched(tree: Any) -> Any:
    return tree_map_only(RemoteTensor, RemoteTensor.fetched, tree)
