"""Products of a few tokens with a small full matrix in float32, by a kernel in C++, on a CPU.

Matrices that are too small to be worth packing (`choice.SMALLEST_BYTES`) stay plain. torch's product puts such a matrix
in an order of its own each time, which takes as long as the product.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from elastic.compiler import compiled_library
from elastic.weights.prepacked.choice import SMALLEST_BYTES

SOURCE = Path(__file__).with_name("small_linear.cpp")
MOST_TOKENS = 16
"""For which it is faster than torch's product, and than oneDNN's with a matrix in its own order."""
_OUTPUTS = 4
_PTR, _INT = ctypes.c_void_p, ctypes.c_int64


def is_small(weight: torch.Tensor) -> bool:
    """Return whether there is a kernel for products with a matrix, [outputs, inputs], as it is now."""
    return (
        weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and weight.ndim == 2
        and 0 < weight.nbytes < SMALLEST_BYTES
        and weight.shape[0] % _OUTPUTS == 0
        and (library := _library()) is not None
        and weight.shape[1] % library.lanes() == 0
    )


def small_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute F.linear(x, weight, bias) for a weight that `is_small`; with the kernel where there are few tokens.

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs] or None, in float32, on a CPU. Returns [..., outputs].
    Sums are rounded otherwise than F.linear's. No gradient flows through the kernel: it is not used where one may.
    """
    outputs, inputs = weight.shape
    if (
        x.numel() > MOST_TOKENS * inputs
        or x.dtype is not torch.float32
        or torch.is_grad_enabled()
        or not (x.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous()))
    ):
        return F.linear(x, weight, bias)
    library = _library()
    assert library is not None
    out = x.new_empty((*x.shape[:-1], outputs))
    library.multiply(
        weight.data_ptr(),
        inputs,
        outputs,
        x.data_ptr(),
        x.numel() // inputs,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@cache
def _library() -> ctypes.CDLL | None:
    library = compiled_library(SOURCE, "products with small matrices are torch's, up to twice as long")
    if library is None or not library.is_supported():
        return None
    library.multiply.argtypes = [_PTR, _INT, _INT, _PTR, _INT, _PTR, _PTR, ctypes.c_int]
    library.multiply.restype = None
    return library
