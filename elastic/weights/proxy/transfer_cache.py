"""Tensors that are copied to another device, each once."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from elastic.memory.backends.peers import reachable


class TransferCache:
    """Copies, on one device, of tensors that several modules there are given.

    A copy lives as long as its tensor, and is made anew when that was written.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = WeakTensorKeyDictionary()  # tensor -> (its version when it was copied, the copy)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, in the same shape and dtype."""
        if tensor.device == self.device:
            return tensor
        if tensor.is_inference() or tensor.requires_grad:  # nobody knows when it is written; it has a graph
            return moved(tensor, self.device)  # type: ignore[no-any-return]
        version, copy = self._copies.get(tensor, (None, None))  # type: ignore[no-untyped-call]
        if version != tensor._version:
            copy = moved(tensor, self.device)
            self._copies[tensor] = tensor._version, copy
        return copy  # type: ignore[no-any-return]


def moved(value: Any, device: torch.device) -> Any:
    """Copy a tensor to a device, or those in tuples and lists; return all else as it is.

    What comes to a CPU is there on return: nothing there would wait for a copy that is under way.
    """
    if isinstance(value, torch.Tensor):
        return reachable(value, device).to(device, non_blocking=device.type == "cuda")
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    return value
