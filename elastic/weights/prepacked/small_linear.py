"""Products with a small full matrix in float32 on a CPU: few tokens by a kernel in C++, many by the faster library.

Matrices that are too small to be worth packing (`choice.SMALLEST_BYTES`) stay plain. torch's product puts such a matrix
in an order of its own each time, which takes as long as the product. With many tokens the order matters less than the
library: torch's takes twice oneDNN's time on some processors.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F

from elastic.compiler import compiled_library
from elastic.memory.backends.device_time import time_ratio
from elastic.weights.prepacked import onednn
from elastic.weights.prepacked.choice import SMALLEST_BYTES

SOURCE = Path(__file__).with_name("small_linear.cpp")
MOST_TOKENS = 64
"""Of the kernel. It takes .5 to .7 of torch's time, and up to 24 tokens no longer than oneDNN's with a matrix in its
own order."""
TIMED_TOKENS, REPEATS = 256, 5
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
    """Compute F.linear(x, weight, bias) for a weight that `is_small`.

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs] or None, in float32, on a CPU. Returns [..., outputs].
    Sums are rounded otherwise than F.linear's. Where a gradient may flow, it is F.linear.
    """
    outputs, inputs = weight.shape
    if (
        x.dtype is not torch.float32
        or x.shape[-1] != inputs
        or torch.is_grad_enabled()
        or not (x.is_contiguous() and weight.is_contiguous())
        or not (bias is None or (bias.dtype is torch.float32 and len(bias) == outputs and bias.is_contiguous()))
    ):
        return F.linear(x, weight, bias)
    tokens = x.numel() // inputs
    if tokens > MOST_TOKENS:
        by_onednn = _is_faster_by_onednn((outputs, inputs), torch.get_num_threads())
        return (onednn.multiply if by_onednn else F.linear)(x, weight, bias)
    library = _library()
    assert library is not None
    out = x.new_empty((tokens, outputs))
    library.multiply(
        weight.data_ptr(),
        inputs,
        outputs,
        x.data_ptr(),
        tokens,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out if x.ndim == 2 else out.view(*x.shape[:-1], outputs)


@cache
def _is_faster_by_onednn(shape: tuple[int, int], threads: int) -> bool:
    """Time products of many tokens, with the threads that torch uses now."""
    if not onednn.has_product():
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        weight, x = torch.randn(shape, generator=generator), torch.randn(TIMED_TOKENS, shape[1], generator=generator)
        by_onednn, by_torch = partial(onednn.multiply, x, weight, None), partial(F.linear, x, weight)
        return time_ratio(by_onednn, by_torch, weight.device, REPEATS) < 1


@cache
def _library() -> ctypes.CDLL | None:
    without = "products with small matrices are torch's, up to twice as long"
    library = compiled_library(SOURCE, without, "is_supported", "lanes", "multiply")
    if library is None:
        return None
    library.multiply.argtypes = [_PTR, _INT, _INT, _PTR, _INT, _PTR, _PTR, ctypes.c_int]
    library.multiply.restype = None
    return library
