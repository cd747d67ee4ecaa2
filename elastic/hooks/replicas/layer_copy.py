"""A copy of a module's structure: its own modules, without hooks, over tensors that are put into it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from elastic.errors import ConfigError
from elastic.hooks.forward_override import dispatches
from elastic.weights.parameter_slot import Content, ParameterSlot

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


_ACCELERATE = ("forward", "_old_forward", "_hf_hook")
"""What accelerate's `add_hook_to_module` leaves on a module; what it does with inputs, whoever calls a replica does."""


class LayerCopy:
    """`module` computes like the one that it was made of, but that no hook is called.

    Parameters, buffers and configs are the very objects of the original until others are put in.
    """

    def __init__(self, original: nn.Module) -> None:
        _require_own_forward(original)
        memo: dict[int, Any] = {}
        for module in original.modules():
            tensors = [*module._parameters.values(), *module._buffers.values()]
            memo |= {id(t): t for t in (*tensors, getattr(module, "config", None)) if t is not None}
            memo |= {id(hooks): OrderedDict() for name in _HOOKS if (hooks := module.__dict__.get(name)) is not None}
            memo |= {id(left_out): () for name in _ACCELERATE if (left_out := module.__dict__.get(name)) is not None}
        self.module: nn.Module = copy.deepcopy(original, memo)
        for module in self.module.modules():
            for name in _ACCELERATE:
                module.__dict__.pop(name, None)
        self._copies: dict[nn.Module, nn.Module] = dict(zip(original.modules(), self.module.modules(), strict=True))

    def put(self, slots: Mapping[str, ParameterSlot], contents: Mapping[str, Content]) -> None:
        """Have `contents` where the original has its slots of the same names; it is not known any more then."""
        for name, slot in slots.items():
            for module, attribute in slot.homes:
                self._copies[module]._parameters[attribute] = contents[name]  # type: ignore[assignment]
        self._copies.clear()

    def empty(self) -> None:
        """Hold no tensor any more."""
        for module in self.module.modules():
            module._parameters.clear()
            module._buffers.clear()

    def bring_buffers(self, device: Any) -> None:
        """Have copies of the buffers on a device."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)


def _require_own_forward(layer: nn.Module) -> None:
    """A `forward` on an instance is bound to it: what its copy calls would be the original."""
    for name, module in layer.named_modules():
        if "forward" in module.__dict__ and not (dispatches(module) or _by_accelerate(module)):
            raise ConfigError(
                f"{name or type(layer).__name__} has a forward method of its own, put there by another library: this "
                "layer cannot be replicated; have that library take it off before elastic.wrap"
            )


def _by_accelerate(module: nn.Module) -> bool:
    """Whether its `forward` is that of its class, wrapped by accelerate's `add_hook_to_module` to bring inputs."""
    known, inside = module.__dict__, module.__dict__.get("_old_forward")
    wrapped = getattr(known.get("forward"), "__wrapped__", None)
    own = getattr(inside, "__func__", None) is type(module).forward and getattr(inside, "__self__", None) is module
    return own and "_hf_hook" in known and wrapped == inside
