"""A copy of a module's structure: its own modules, without hooks, over tensors that are put into it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.hooks.base import HOOK_TABLES
from elastic.hooks.forward_override import dispatches
from elastic.weights.parameter_slot import Content, ParameterSlot

_ACCELERATE = ("forward", "_old_forward", "_hf_hook")
"""The attributes that accelerate's `add_hook_to_module` leaves; inputs are sent by whoever calls a replica."""


class LayerCopy:
    """A module that computes like its original, except that no hook is called.

    Parameters, buffers and configs are the very objects of the original until others are put in.
    """

    def __init__(self, original: nn.Module) -> None:
        _require_own_forward(original)
        memo: dict[int, Any] = {}
        for module in original.modules():
            tensors = [*module._parameters.values(), *module._buffers.values()]
            memo |= {id(t): t for t in (*tensors, getattr(module, "config", None)) if t is not None}
            tables = [module.__dict__.get(name) or {} for name in HOOK_TABLES]
            memo |= {id(hook): hook for table in tables for hook in table.values() if not isinstance(hook, nn.Module)}
            memo |= {id(value): () for name in _ACCELERATE if (value := module.__dict__.get(name)) is not None}
        self.module: nn.Module = copy.deepcopy(original, memo)
        for module in self.module.modules():
            for name in _ACCELERATE:
                module.__dict__.pop(name, None)
            for name in HOOK_TABLES:
                module.__dict__.get(name, {}).clear()
        self._children = [(module._modules, dict(module._modules)) for module in original.modules()]
        self._copies: dict[nn.Module, nn.Module] = dict(zip(original.modules(), self.module.modules(), strict=True))

    def put(self, slots: Mapping[str, ParameterSlot], contents: Mapping[str, Content], device: torch.device) -> None:
        """Have `contents` where the original has its slots of the same names, and forget the original.

        Buffers, or copies of them, are then on the device too.
        """
        for name, slot in slots.items():
            for module, attribute in slot.homes:
                self._copies[module]._parameters[attribute] = contents[name]  # type: ignore[assignment]
        self._copies.clear()
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)

    @property
    def is_like_original(self) -> bool:
        """Whether the original has the modules that it had when it was copied; an adapter may have come since."""
        return all(now == then for now, then in self._children)

    def empty(self) -> None:
        """Hold no tensor any more, and nothing of the original."""
        self._children.clear()
        for module in self.module.modules():
            module._parameters.clear()
            module._buffers.clear()


def _require_own_forward(layer: nn.Module) -> None:
    """Refuse a `forward` on an instance: it is bound to it, so a copy would call the original."""
    for name, module in layer.named_modules():
        if "forward" in module.__dict__ and not (dispatches(module) or _by_accelerate(module)):
            raise ConfigError(
                f"{name or type(layer).__name__} has a forward method of its own, put there by another library: this "
                "layer cannot be replicated; have that library take it off before elastic.wrap"
            )


def _by_accelerate(module: nn.Module) -> bool:
    """Return whether the `forward` of an instance is that of its class, wrapped by accelerate to bring inputs."""
    attributes, inner = module.__dict__, module.__dict__.get("_old_forward")
    wrapped = getattr(attributes.get("forward"), "__wrapped__", None)
    plain = getattr(inner, "__func__", None) is type(module).forward and getattr(inner, "__self__", None) is module
    return plain and "_hf_hook" in attributes and wrapped == inner
