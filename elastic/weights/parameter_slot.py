"""A layer's tensors in its modules: parameters that live in pages, which can be switched, and all others."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from elastic.memory.checksum import digest
from elastic.memory.pages.mapped_storage import outside_inference_mode
from elastic.weights.prepacked.onednn import OneDNNLayout
from elastic.weights.prepacked.source import AbsentSource, ResidentSource
from elastic.weights.proxy.host_source import HostSource
from elastic.weights.proxy.tensor import WeightProxy
from elastic.weights.proxy.transfer_cache import moved
from elastic.weights.proxy.weight_home import WeightHome

Content = nn.Parameter | WeightProxy
"""What can sit in a slot."""


class ParameterSlot:
    """One parameter that lives in pages.

    Its identity is kept through switches wherever torch allows it, so that references follow.
    """

    def __init__(self, parameter: nn.Parameter, homes: tuple[tuple[nn.Module, str], ...]) -> None:
        self.parameter: Content = parameter
        self.homes = homes
        """The modules and attributes where it sits."""
        self.strides, self.device = parameter.stride(), parameter.device
        """As the user's model had them."""
        self.address: int | None = parameter.data_ptr()
        """Of the bytes that Elastic put in the slot; None for a `WeightProxy`, which has none."""
        self.prepacked: OneDNNLayout | None = None
        """The order of the full matrix in pages and in the host store; None: the plain one."""
        self._outside: weakref.ref[nn.Parameter] | None = None
        """The user's parameter object, while another one has to be in its place."""

    def plain(self, data: torch.Tensor) -> nn.Parameter:
        """Make a parameter over `data`: any shape, and the same shape and dtype."""
        with outside_inference_mode():
            return nn.Parameter(data, requires_grad=self.parameter.requires_grad)

    def resident(self, unit: WeightHome, name: str, stored: torch.Tensor) -> Content:
        """Make the content while `stored`, of the parameter's shape, are its full bytes, in pages of a unit."""
        if self.prepacked is None:
            return self.plain(stored)
        on_write = partial(unit.overwritten, name)
        return WeightProxy(self.parameter, ResidentSource(unit.name, self.prepacked, stored, on_write))

    def in_host_memory(self, unit: WeightHome, name: str, variant: str = "") -> HostSource:
        """Make the source while the host store has the full bytes; `variant`: the one that is in pages."""
        if self.prepacked is None:
            return HostSource(unit, name, variant)
        return AbsentSource(unit, name, self.prepacked, variant)

    def in_pages(self, full: torch.Tensor) -> torch.Tensor:
        """Return the full parameter, any shape, with its elements in the order that they have in pages."""
        return full if self.prepacked is None else self.prepacked.pack(full)

    def in_order(self, stored: torch.Tensor) -> torch.Tensor:
        """Undo `in_pages`, for a tensor of the same shape."""
        return stored if self.prepacked is None else self.prepacked.unpack(stored)

    def digest(self, stored: torch.Tensor) -> int:
        """Return the digest of the full parameter, any shape, whose elements lie as in pages."""
        return digest(self.in_order(stored))

    def put(self, content: Content) -> None:
        """Have a parameter or a proxy in the slot, with the gradient of what was there, which is let go of.

        Whether it takes one is as it was there last: it may have been frozen since `content` was made.
        """
        if content.requires_grad != self.parameter.requires_grad:
            content.requires_grad_(self.parameter.requires_grad)
        if self.parameter.grad is not None:
            content.grad = moved(self.parameter.grad, content.device)
        if not isinstance(content, WeightProxy):
            self._put_plain(content)
            return
        self.address, before = None, self.parameter
        self._exchange(content)
        if self.parameter is not before and not isinstance(before, WeightProxy):
            self._outside = weakref.ref(before)

    def intact(self) -> bool:
        """Return whether the modules have the parameter that Elastic put there, with its bytes."""
        if self.address is not None and self.parameter.data_ptr() != self.address:
            return False
        return all(module._parameters.get(name) is self.parameter for module, name in self.homes)

    def _put_plain(self, plain: nn.Parameter) -> None:
        self.address = plain.data_ptr()
        outside = self._outside() if self._outside else None
        if outside is not None:
            outside.data = plain.data
            outside.requires_grad_(plain.requires_grad)
            if plain.grad is not None:  # else it may have got one of a graph that was older
                outside.grad = plain.grad
            self._replace(outside)
            self._outside = None  # while there is one, torch refuses to exchange
        elif isinstance(self.parameter, WeightProxy):
            self._exchange(plain)
        else:
            self.parameter.data = plain.data
            if plain.grad is not None:  # it may have been on another device
                self.parameter.grad = plain.grad

    def _exchange(self, other: Content) -> None:
        """Put `other` in place of the parameter: under the same Python object, or else as another object."""
        try:
            torch.utils.swap_tensors(self.parameter, other)  # type: ignore[no-untyped-call]
        except RuntimeError:  # somebody has a weak reference, or a graph has the tensor
            self._replace(other)

    def _replace(self, parameter: Content) -> None:
        for module, name in self.homes:
            module._parameters[name] = parameter  # type: ignore[assignment]
        self.parameter = parameter


class UnpagedTensors:
    """The tensors of a decoder layer that do not lie in pages, and accelerate's hooks that know their device.

    They are buffers, parameters that others use too, and adapters.
    """

    def __init__(self, layer: nn.Module, slots: Mapping[str, ParameterSlot]) -> None:
        self._layer, self._slots = weakref.ref(layer), weakref.WeakSet(slots.values())
        paged = {id(slot.parameter) for slot in slots.values()}
        owners: list[dict[str, Any]] = [d for m in layer.modules() for d in (m._parameters, m._buffers)]
        self._tensors = [
            (owner, name)
            for owner in owners
            for name, tensor in owner.items()
            if tensor is not None and id(tensor) not in paged
        ]
        outer = [getattr(module, "_hf_hook", None) for module in layer.modules()]
        hooks = [hook for o in outer for hook in (getattr(o, "hooks", None) or [o])]  # a sequence of them, or one
        self.accelerate_hooks = [hook for hook in hooks if getattr(hook, "execution_device", None) is not None]

    def parameters(self) -> list[str]:
        """Return the names of those that are parameters now: others use them too, or they are adapters."""
        layer, paged = self._layer(), {id(slot.parameter) for slot in self._slots}
        return [] if layer is None else [name for name, p in layer.named_parameters() if id(p) not in paged]

    def move_to(self, device: torch.device) -> None:
        """Have the buffers on a device, and accelerate send inputs there."""
        for hook in self.accelerate_hooks:
            if torch.device(hook.execution_device) != device:
                hook.execution_device = device
        for owner, name in self._tensors:
            tensor = owner.get(name)  # one that was deleted since, or set to None, is nowhere
            if tensor is not None and tensor.device != device and not isinstance(tensor, nn.Parameter):
                owner[name] = tensor.to(device)


def is_under(name: str, parts: Collection[str]) -> bool:
    """Return whether a parameter is one of these, or of a module of these names."""
    return any(name == part or name.startswith(part + ".") for part in parts)
