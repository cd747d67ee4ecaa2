"""Detours of what is copied: between GPUs that have no access to each other's memory, and by way of host memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch

logger = logging.getLogger(__name__)


can_access = cache(torch.cuda.can_device_access_peer)
"""Whether kernels and copies of one CUDA device, by index, may touch the memory of another."""


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


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor of host memory, [*shape], that a device copies to: page-locked for a GPU, if the system allows."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            logger.warning("the system refuses page-locked memory: copies from %s are slower: %s", device, error)
    return torch.empty(shape, dtype=dtype)
