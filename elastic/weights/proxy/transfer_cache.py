"""Tensors that travel to another device, each once."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class TransferCache:
    """Copies, on one device, of tensors that several modules there are given: as long as those live, and are as they
    were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = WeakTensorKeyDictionary()  # tensor -> how often it had been written, its copy

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device."""
        if tensor.device == self.device:
            return tensor
        if tensor.is_inference() or tensor.requires_grad:  # nobody knows when it is written; it has a graph
            return moved(tensor, self.device)  # type: ignore[no-any-return]
        written, copy = self._copies.get(tensor, (None, None))  # type: ignore[no-untyped-call]
        if written != tensor._version:
            copy = moved(tensor, self.device)
            self._copies[tensor] = tensor._version, copy
        return copy  # type: ignore[no-any-return]


def moved(value: Any, device: torch.device) -> Any:
    """A tensor on a device, or whatever has tensors in tuples and lists; all else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type == "cuda")
    if isinstance(value, tuple | list):
        return type(value)(moved(one, device) for one in value)
    return value
