"""Products of a few tokens with a matrix in bfloat16 that lies as [inputs, outputs], by a kernel in C++, on a CPU.

So lies the last matrix of a feed-forward network whose inputs come and go part by part (`LayerCut.stored`). oneDNN
reorders such a matrix first, for each product, which takes up to four times as long as the product does.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from elastic.compiler import compiled_library

SOURCE = Path(__file__).with_name("transposed_linear.cpp")
MOST_TOKENS = 16
"""For which it is faster than oneDNN's product, that reads the matrix three times but computes more at once."""
OUTPUTS = 32
"""Of a matrix, or a multiple of them."""
_PLAIN = (torch.nn.Parameter, torch.Tensor)
_PTR, _INT = ctypes.c_void_p, ctypes.c_int64


def transposed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute F.linear(x, weight, bias), with a kernel for few tokens and a weight that lies as [inputs, outputs].

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs] or None. Any device, any dtype that F.linear takes.
    Returns [..., outputs]. Through the kernel no gradient flows: it is not used where one may.
    """
    if not _is_lying_so(weight) or not _is_for_kernel(x, weight, bias):
        return F.linear(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    transposed_matmul(x.reshape(-1, x.shape[-1]), weight.T, bias, out.view(-1, out.shape[-1]))
    return out


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for products on a device, of a dtype."""
    return device.type == "cpu" and dtype is torch.bfloat16 and _library() is not None


def _is_lying_so(weight: torch.Tensor) -> bool:
    return (
        type(weight) in _PLAIN
        and weight.dtype is torch.bfloat16
        and weight.ndim == 2
        and weight.stride(0) == 1
        and weight.stride(1) >= weight.shape[0] > 1
        and weight.shape[0] % OUTPUTS == 0
        and weight.device.type == "cpu"
    )


def _is_for_kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return (
        type(x) is torch.Tensor
        and x.dtype is torch.bfloat16
        and x.device == weight.device
        and x.shape[-1] == weight.shape[1]
        and 0 < x.numel() <= MOST_TOKENS * x.shape[-1]
        and (bias is None or (type(bias) in _PLAIN and bias.dtype is torch.bfloat16 and bias.is_contiguous()))
        and not torch.is_grad_enabled()
        and _library() is not None
    )


@cache
def _library() -> ctypes.CDLL | None:
    without = "products with parts of feed-forward networks are oneDNN's, up to four times as long"
    library = compiled_library(SOURCE, without, "is_supported", "multiply")
    if library is None:
        return None
    library.multiply.argtypes = [_PTR, _INT, _INT, _INT, _PTR, _INT, _PTR, _PTR, ctypes.c_int]
    library.multiply.restype = None
    return library


def _transposed_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    library = _library()
    assert library is not None
    x = x.contiguous()
    library.multiply(
        weight.data_ptr(),
        weight.stride(0),
        *weight.shape,
        x.data_ptr(),
        len(x),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )


_operators = torch.library.Library("elastic", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define(  # type: ignore[no-untyped-call]
    "transposed_matmul(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()"
)
_operators.impl("transposed_matmul", _transposed_matmul, "CPU")  # type: ignore[no-untyped-call]
transposed_matmul = torch.ops.elastic.transposed_matmul.default
"""Write x @ weight + bias to `out`, all bfloat16: an operator, so that captures of steps see it.

x: [tokens, inputs], at most `MOST_TOKENS`; weight: [inputs, outputs], each row in one piece; bias: [outputs] or None;
out: [tokens, outputs], contiguous. The caller has checked them.
"""
