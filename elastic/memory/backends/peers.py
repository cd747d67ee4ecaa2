"""GPUs that have no access to each other's memory: what goes from pages of one to another takes a detour."""

from __future__ import annotations

from functools import cache

import torch


@cache
def can_access(device: int, other: int) -> bool:
    """Return whether kernels and copies of one CUDA device, by index, may touch the memory of another."""
    return torch.cuda.can_device_access_peer(device, other)


def reachable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of any shape as it is if torch can copy it into pages of `device`; else a copy there.

    Between GPUs without access to each other's memory torch copies right only what came from `cudaMalloc`, on both
    sides: so by way of ordinary tensors.
    """
    source = tensor.device
    if source == device or source.type != "cuda" or device.type != "cuda":
        return tensor
    if can_access(source.index, device.index or 0):
        return tensor
    return tensor.clone().to(device)
