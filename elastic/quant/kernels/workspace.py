"""Memory of products on a CPU: scratch for pieces of matrices, reused by each thread, so that they stay in its caches.

And fewer kernels: oneDNN makes one for each number of rows that a product in bfloat16 has.
"""

from __future__ import annotations

import math
import threading

import torch
import torch.nn.functional as F

_local = threading.local()
ROWS = 8
"""A product with more is made one of a multiple of so many."""


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


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x, bfloat16 [tokens, inputs], with rows of zeros behind it: a multiple of 8 of them, where it has more.

    For each number of rows oneDNN makes a kernel for .8 ms, and keeps it, .7 MB. Experts have any number of them.
    """
    rows = x.shape[0]
    return x if rows <= ROWS or x.dtype is not torch.bfloat16 else F.pad(x, (0, 0, 0, -rows % ROWS))


def kept_bytes() -> int:
    """Return the bytes of this thread's scratch memory: it is kept from product to product."""
    return sum(buffer.nbytes for buffer in _local.__dict__.values())
