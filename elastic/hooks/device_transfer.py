"""Layers on another device than the model left them: what they are given travels to them (CoCoServe, section 3.3).

What a layer returns goes straight on to the next layer's device, so consecutive layers on one device exchange nothing.
What all layers are given alike, such as masks and rotary embeddings, travels once to each device.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic.hooks.forward_state import ForwardState
from elastic.hooks.interceptor import Args, Kwargs
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.proxy.transfer_cache import TransferCache, moved


class DeviceTransfer:
    """The detour of a layer. `here` is its device, `there` that of whatever comes next."""

    def __init__(self, here: torch.device, there: torch.device, arrivals: TransferCache | None = None) -> None:
        self._here = here
        self._there = there
        self._arrivals = arrivals or TransferCache(here)

    def enter(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return moved(args, self._here), {name: self._once(value) for name, value in kwargs.items()}

    def leave(self, output: Any) -> Any:
        return None if output is None else moved(output, self._there)

    def _once(self, value: Any) -> Any:
        """A copy for each tensor, however many layers are given it."""
        if isinstance(value, tuple):
            return tuple(map(self._once, value))
        return self._arrivals.bring(value) if isinstance(value, torch.Tensor) else value


class TransferRouter:
    """Keeps the detours of a model's layers as their devices are."""

    def __init__(self, weights: ModelWeights, forward: ForwardState) -> None:
        self._weights = weights
        self._forward = forward
        self._at_first = [_device_at_first(layer) for layer in weights.layers]

    def lay(self) -> None:
        """Layers have moved; at a safe point. What follows the last layer is where that layer was at first."""
        devices = [layer.pool.backend.device for layer in self._weights.layers]
        following = [*devices[1:], self._at_first[-1]]
        arrivals = {device: TransferCache(device) for device in devices}
        for index, (here, there) in enumerate(zip(devices, following, strict=True)):
            others = [d for d in self._forward.interceptors.get(index, ()) if not isinstance(d, DeviceTransfer)]
            travel = [DeviceTransfer(here, there, arrivals[here])] if devices != self._at_first else []
            self._forward.interceptor(index, [*travel, *others])


def _device_at_first(layer: WeightUnit) -> torch.device:
    return next((slot.device for slot in layer.slots.values()), layer.pool.backend.device)
