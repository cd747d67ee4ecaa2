"""Parameters at a place of another device than their layer computes on (CoCoServe, section 3.3).

A product with a matrix is computed where the matrix is: what it is multiplied with travels there, once however many
matrices want it. Of everything else that is done with such a parameter the value comes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from elastic.weights.proxy.remote_tensor import RemoteTensor, away
from elastic.weights.proxy.tensor import FORWARD_FUNCTIONS, Function, WeightProxy, on_values, register
from elastic.weights.proxy.transfer_cache import moved
from elastic.weights.proxy.weight_home import WeightHome

_T = torch.Tensor


class RemoteSource:
    """A parameter that is at its unit's place: plain there, or a `WeightProxy` of a variant; or a view of one."""

    def __init__(self, unit: WeightHome, there: torch.Tensor) -> None:
        self.unit = unit
        self.there = there if isinstance(there, WeightProxy) else there.detach()

    def value(self) -> torch.Tensor:
        there = self.there.source.value() if isinstance(self.there, WeightProxy) else self.there
        return there.to(self.unit.compute_device)

    def copy(self) -> torch.Tensor:
        return self.there.source.copy() if isinstance(self.there, WeightProxy) else self.value()

    def stored(self) -> torch.Tensor:
        return self.there.source.stored() if isinstance(self.there, WeightProxy) else self.value()

    def write(self, value: torch.Tensor) -> None:
        if isinstance(self.there, WeightProxy):
            self.there.source.write(value)
        else:
            with torch.no_grad():
                self.there.copy_(value)
            self.unit.wrote()

    def describe(self) -> str:
        return f"of {self.unit.name}, which is at {self.unit.pool.name}, on another device than its layer"


def _product(function: Function, args: Any, kwargs: Any) -> Any:
    """x @ weight and the like, where the weight is."""
    found = (source for arg in (*args, *kwargs.values()) if (source := _remote(arg)) is not None)
    matrix = next((source for source in found if source.there.ndim > 1), None)
    if matrix is None:
        return on_values(function, args, kwargs)
    unit = matrix.unit
    there = [_there(arg, unit) for arg in args]
    return away(function(*there, **{name: _there(arg, unit) for name, arg in kwargs.items()}), unit.compute_device)


def _getitem(function: Function, args: Any, kwargs: Any) -> Any:
    """weight[expert], or any other part."""
    weight, index = args
    source = _remote(weight)
    if source is None:
        return on_values(function, args, kwargs)
    if isinstance(index, torch.Tensor) and not index.ndim and index.dtype in (torch.int64, torch.int32):
        index = int(index)
    part = source.there[moved(index, source.unit.pool.backend.device)]
    return _view(weight, part) if isinstance(index, int) and part.ndim > 1 else away(part, source.unit.compute_device)


def _flip(function: Function, args: Any, kwargs: Any) -> Any:
    """weight.T and the like."""
    source = _remote(args[0])
    assert source is not None, "it is the only weight that is given"
    return _view(args[0], function(source.there, *args[1:], **kwargs))


def _view(weight: WeightProxy, there: torch.Tensor) -> WeightProxy:
    source = _remote(weight)
    assert source is not None, "a view of a remote weight"
    return WeightProxy.of_shape(weight, there.shape, RemoteSource(source.unit, there))


def _remote(value: Any) -> RemoteSource | None:
    source = value.source if isinstance(value, WeightProxy) else None
    return source if isinstance(source, RemoteSource) else None


def _there(value: Any, unit: WeightHome) -> Any:
    """A function's argument, on the unit's device."""
    device, source = unit.pool.backend.device, _remote(value)
    if source is not None and source.unit.pool.backend.device == device:
        return source.there
    if isinstance(value, WeightProxy):
        return value.source.value().to(device)
    if isinstance(value, RemoteTensor):
        return moved(value.value, device)
    return unit.arrivals.bring(value) if isinstance(value, torch.Tensor) and value.ndim else value


_PRODUCTS = (
    *(F.linear, F.conv1d, torch.addmm, torch.matmul, torch.mm, torch.bmm, torch.baddbmm),
    *(_T.matmul, _T.__matmul__, _T.__rmatmul__, _T.mm, _T.bmm),
    *(f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None),
)
_FLIPS = (_T.transpose, torch.transpose, torch.t, _T.t, _T.T.__get__, _T.mT.__get__)  # type: ignore[attr-defined]
register(RemoteSource, FORWARD_FUNCTIONS, on_values)
register(RemoteSource, _PRODUCTS, _product)
register(RemoteSource, (_T.__getitem__,), _getitem)
register(RemoteSource, _FLIPS, _flip)
