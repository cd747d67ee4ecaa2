"""Memory for pieces of matrices: kept and reused by each thread, so that pieces stay in its caches."""

from __future__ import annotations

import math
import threading

import torch

_local = threading.local()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU with undefined contents, valid until this thread asks for the same name again."""
    kept: dict[str, torch.Tensor] = _local.__dict__
    nbytes = math.prod(shape) * dtype.itemsize
    if name not in kept or kept[name].numel() < nbytes:
        with torch.inference_mode(False):
            kept[name] = torch.empty(nbytes, dtype=torch.uint8)
    return kept[name][:nbytes].view(dtype).view(shape)
