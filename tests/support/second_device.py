"""A second device on a machine that has only a CPU: `cpu:0`, told apart from `cpu` by a mark on the memory of tensors.

While it is there, tensors on it say so, results are where their operands are, and operands on two devices are an
error, as with any two devices. Its numbers are the CPU's: what is computed there is the same to the last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import elastic
from elastic.memory import places, weight_buffer
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages import virtual_range
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.weights.proxy.remote_tensor import RemoteTensor
from elastic.weights.proxy.tensor import WeightProxy
from support.wrapped_model import PAGE

HERE, THERE = torch.device("cpu"), torch.device("cpu", 0)
_T: Any = torch.Tensor
_BETWEEN_DEVICES = (_T.copy_, _T.data.__set__, _T.__setitem__, torch.ops.aten.copy_.default)


def tensors_in(given: Any) -> Iterator[torch.Tensor]:
    """Those among arguments or results; torch's own function takes half of the time of whatever is computed."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, tuple | list):
        for each in given:
            yield from tensors_in(each)
    elif isinstance(given, dict):
        yield from tensors_in(list(given.values()))


class SecondDevice(TorchFunctionMode):
    """Knows where tensors are, and counts what goes from one device to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[int, ...]] = []
        """The shapes of tensors that have travelled."""

    def of(self, tensor: torch.Tensor) -> torch.device:
        if isinstance(tensor, RemoteTensor | WeightProxy):
            return _T.device.__get__(tensor)  # type: ignore[no-any-return]
        return THERE if getattr(tensor.untyped_storage(), "there", False) else HERE

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function == _T.device.__get__:
                return self.of(args[0])
        if not torch._C._is_torch_function_enabled():  # the way of a subclass to its dispatch
            return function(*args, **kwargs)
        kinds = [kind for kind in (RemoteTensor, WeightProxy) if any(issubclass(t, kind) for t in types)]
        if kinds:
            with self:
                found = kinds[0].__torch_function__(function, types, args, kwargs)
                return kinds[-1].__torch_function__(function, types, args, kwargs) if found is NotImplemented else found
        if function in (_T.to, _T.cpu):
            rest = (HERE,) if function == _T.cpu else args[1:]
            return self._move(args[0], *rest, **kwargs)
        return self._compute(function, args, kwargs)

    def _move(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("non_blocking", None)
        device, wanted = kwargs.pop("device", None), kwargs.pop("dtype", None)
        for arg in args:
            if isinstance(arg, torch.Tensor):
                device, wanted = self.of(arg), arg.dtype
            elif isinstance(arg, torch.device | str):
                device = arg
            elif isinstance(arg, torch.dtype):
                wanted = arg
        here, target = self.of(tensor), self.of(tensor) if device is None else torch.device(device)
        result = tensor.to(wanted or tensor.dtype, **kwargs)
        if here == target:
            return self._mark(result) if here == THERE else result
        self.moved.append(tuple(tensor.shape))
        result = result.clone() if result.untyped_storage()._cdata == tensor.untyped_storage()._cdata else result
        return self._mark(result) if target == THERE else result

    def _compute(self, function: Any, args: Any, kwargs: Any) -> Any:
        operands = list(tensors_in((args, kwargs)))
        devices = {self.of(operand) for operand in operands if operand.ndim}
        if len(devices) > 1 and function not in _BETWEEN_DEVICES:
            raise RuntimeError(f"{function}: {[(tuple(t.shape), str(self.of(t))) for t in operands]}")
        asked = kwargs.get("device")
        result = function(*args, **{name: given for name, given in kwargs.items() if name != "device"})
        if (torch.device(asked) if asked is not None else next(iter(devices), HERE)) == THERE:
            known = {operand.untyped_storage()._cdata for operand in operands}
            for tensor in tensors_in(result):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.untyped_storage()._cdata not in known:
                    self._mark(tensor)
        return result

    def _mark(self, tensor: torch.Tensor) -> torch.Tensor:
        storage: Any = tensor.untyped_storage()
        storage.there = True
        return tensor


class MarkedSpan(MappedStorage):
    def __init__(self, address: int, nbytes: int, device: torch.device, on_dead: Any) -> None:
        super().__init__(address, nbytes, device, on_dead)
        if device == THERE:
            storage: Any = self.tensor(torch.uint8).untyped_storage()
            storage.there = True


def place_there(budget: int = 64 << 20, name: str = "there") -> elastic.Place:
    return elastic.Place(name, THERE, budget, page_bytes=PAGE)


@contextmanager
def second_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondDevice]:
    """In all threads, also in those that begin meanwhile."""
    mode, run, make = SecondDevice(), threading.Thread.run, places.make_backend

    def run_with_it(thread: threading.Thread) -> None:
        with mode:
            run(thread)

    def make_backend(place: elastic.Place) -> Any:
        backend = make(place)
        assert isinstance(backend, MemfdBackend)
        backend.device = place.device
        return backend

    monkeypatch.setattr(threading.Thread, "run", run_with_it)
    monkeypatch.setattr(places, "make_backend", make_backend)
    for module in (weight_buffer, virtual_range):
        monkeypatch.setattr(module, "MappedStorage", MarkedSpan)
    for kind in (RemoteTensor, WeightProxy):
        monkeypatch.setattr(kind, "__torch_dispatch__", _dispatch_in(mode, kind.__torch_dispatch__))
    with mode:
        yield mode


def _dispatch_in(mode: SecondDevice, dispatch: Any) -> Any:
    @classmethod  # type: ignore[misc]
    def inside(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with mode, torch._C._EnableTorchFunction():
            return dispatch(function, types, args, kwargs)

    return inside
