"""Parameters at a place of another device than their layer computes on (CoCoServe, section 3.3).

A product with a matrix is computed where the matrix is: what it is multiplied with is copied there, once however many
matrices want it. For everything else that is done with such a parameter its value is copied to the layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from elastic.memory.backends.peers import reachable
from elastic.memory.copy_engine import to_device
from elastic.weights.proxy.remote_tensor import RemoteTensor, wrap_remote
from elastic.weights.proxy.tensor import (
    FORWARD_FUNCTIONS,
    GROUPED,
    SWAPS,
    Function,
    WeightProxy,
    differentiable,
    on_values,
    register,
    trains,
)
from elastic.weights.proxy.transfer_cache import moved
from elastic.weights.proxy.weight_home import WeightHome

_T = torch.Tensor


class RemoteSource:
    """A parameter that is at its unit's place: plain there, or a `WeightProxy` of a variant; or a view of one."""

    has_gradient = False

    def __init__(self, unit: WeightHome, at_place: torch.Tensor) -> None:
        self.unit = unit
        self.at_place = at_place if isinstance(at_place, WeightProxy) else at_place.detach()
        self.packed = at_place.source if isinstance(at_place, WeightProxy) else None
        """Knows the value at the place of one that is packed there; None: it is plain."""

    def value(self) -> torch.Tensor:
        """Return the weight on the device where its layer computes, in the same shape and dtype."""
        value = self.packed.value() if self.packed is not None else self.at_place
        return to_device(value, self.unit.compute_device)

    def copy(self) -> torch.Tensor:
        """Return a copy of the full weight, maybe in host memory, in the same shape and dtype."""
        return self.packed.copy() if self.packed is not None else self.value()

    def stored(self) -> torch.Tensor:
        """Return the full weight, maybe in host memory, in the same shape and dtype."""
        return self.packed.stored() if self.packed is not None else self.value()

    def write(self, value: torch.Tensor) -> None:
        """Write `value`, of any shape that broadcasts to the weight, at its place. Raises `StateError` if packed."""
        if self.packed is not None:
            self.packed.write(value)
        else:
            with torch.no_grad():
                self.at_place.copy_(reachable(value, self.at_place.device))
            self.unit.writes += 1

    def describe(self) -> str:
        """Say for an error message where the weight is."""
        return f"of {self.unit.name}, which is at {self.unit.pool.name}, on another device than its layer"


def _product(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute x @ weight and the like, where the weight is."""
    sources = (source for arg in (*args, *kwargs.values()) if (source := _remote(arg)) is not None)
    matrix = next((source for source in sources if source.at_place.ndim > 1), None)
    if matrix is None:
        return on_values(function, args, kwargs)
    unit = matrix.unit
    brought = [_brought(arg, unit) for arg in args]
    result = function(*brought, **{name: _brought(arg, unit) for name, arg in kwargs.items()})
    return wrap_remote(result, unit.compute_device)


def _getitem(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute weight[expert], or any other part."""
    weight, index = args
    source = _remote(weight)
    if source is None:
        return on_values(function, args, kwargs)
    if isinstance(index, torch.Tensor) and not index.ndim and index.dtype in (torch.int64, torch.int32):
        index = int(index)
    part = source.at_place[moved(index, source.unit.pool.backend.device)]
    if isinstance(index, int) and part.ndim > 1:
        return WeightProxy.of_shape(weight, part.shape, RemoteSource(source.unit, part))
    return wrap_remote(part, source.unit.compute_device)


def _transpose(function: Function, args: Any, kwargs: Any) -> Any:
    """Compute weight.T and the like: a view of the weight where it is."""
    source = _remote(args[0])
    assert source is not None, "it is the only weight that is given"
    view = function(source.at_place, *args[1:], **kwargs)
    return WeightProxy.of_shape(args[0], view.shape, RemoteSource(source.unit, view))


def _remote(value: Any) -> RemoteSource | None:
    source = value.source if isinstance(value, WeightProxy) else None
    return source if isinstance(source, RemoteSource) else None


def _brought(value: Any, unit: WeightHome) -> Any:
    """Return a function's argument on the unit's device."""
    device, source = unit.pool.backend.device, _remote(value)
    if source is not None and source.unit.pool.backend.device == device:
        if not trains(value):
            return source.at_place
        return differentiable(value, source.at_place if source.packed is None else source.packed.value())
    if isinstance(value, WeightProxy):
        return to_device(value.source.value(), device)
    if isinstance(value, RemoteTensor):
        return moved(value.value, device)
    return unit.transfers.bring(value) if isinstance(value, torch.Tensor) and value.ndim else value


_PRODUCTS = (
    *(F.linear, F.conv1d, torch.addmm, torch.matmul, torch.mm, torch.bmm, torch.baddbmm),
    *(_T.matmul, _T.__matmul__, _T.__rmatmul__, _T.mm, _T.bmm),
    *GROUPED,
)
register(RemoteSource, FORWARD_FUNCTIONS, on_values)
register(RemoteSource, _PRODUCTS, _product)
register(RemoteSource, (_T.__getitem__,), _getitem)
register(RemoteSource, (_T.transpose, torch.transpose, *SWAPS), _transpose)
