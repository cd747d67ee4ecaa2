"""Scratch memory for pieces of matrices: reused by each thread, so that pieces stay in its caches."""

from __future__ import annotations

import math
import threading

import torch

_local = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor of any shape and dtype, `[*shape]`, with undefined contents.

    It is valid until this thread asks for the same name again.
    """
    buffers: dict[str, torch.Tensor] = _local.__dict__
    nbytes = math.prod(shape) * dtype.itemsize
    if name not in buffers or buffers[name].numel() < nbytes:
        with torch.inference_mode(False):
            buffers[name] = torch.empty(nbytes, dtype=torch.uint8)
    return buffers[name][:nbytes].view(dtype).view(shape)


def kept_bytes() -> int:
    """Return the bytes of this thread's scratch memory: it is kept from product to product."""
    return sum(buffer.nbytes for buffer in _local.__dict__.values())
