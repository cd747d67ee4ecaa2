"""Layers on another device than the model left them: their arguments are copied to it (CoCoServe, section 3.3).

What a layer returns goes straight on to the next layer's device, so consecutive layers on one device exchange nothing.
What all layers are given alike, such as masks and rotary embeddings, is copied once to each device.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic.hooks.forward_state import ForwardState
from elastic.hooks.interceptor import Args, Kwargs
from elastic.weights.model import ModelWeights
from elastic.weights.proxy.transfer_cache import TransferCache, moved


class DeviceTransfer:
    """The interceptor of a layer on `device`; `following` is the device of whatever comes next."""

    def __init__(self, device: torch.device, following: torch.device, transfers: TransferCache | None = None) -> None:
        self._device = device
        self._following = following
        self._transfers = transfers or TransferCache(device)

    def enter(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Copy the arguments to the layer's device; keyword arguments once, however many layers are given them."""
        return moved(args, self._device), {name: self._bring(value) for name, value in kwargs.items()}

    def leave(self, output: Any) -> Any:
        """Copy what the layer returns to the device of what comes next."""
        return None if output is None else moved(output, self._following)

    def _bring(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._bring, value))
        return self._transfers.bring(value) if isinstance(value, torch.Tensor) else value


class TransferRouter:
    """Keeps the device transfers of a model's layers as their devices are."""

    def __init__(self, weights: ModelWeights, forward: ForwardState) -> None:
        self._weights = weights
        self._forward = forward
        self._devices_at_first = [
            next((slot.device for slot in layer.slots.values()), layer.pool.backend.device) for layer in weights.layers
        ]

    def update(self) -> None:
        """Follow the layers' devices; at a safe point. After the last layer comes its device at first."""
        devices = [layer.pool.backend.device for layer in self._weights.layers]
        transfers = {device: TransferCache(device) for device in devices}
        for index, device in enumerate(devices):
            following = devices[index + 1] if index + 1 < len(devices) else self._devices_at_first[-1]
            new = None if devices == self._devices_at_first else DeviceTransfer(device, following, transfers[device])
            self._forward.replace(index, DeviceTransfer, new, outermost=True)
