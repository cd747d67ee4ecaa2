"""Products with matrices in integers on a CPU, by kernels in C++: nibbles in torch's order, and rows of int8.

torch's own kernels for them have x in bfloat16 and multiply in float32. These read the same bytes, and multiply
integers of 16 bits, two at a time: x is rounded to them, each group of a token with a step of its own, which is
1 / 32,767 of its largest element (rows of int8: of every 256 inputs). With x = i s + e, |e| <= s / 2, the error is at
most s / 2 * sum(|w|) of a group. Sums of a group are exact, and a token has the same bits in any batch. What is no
number, or infinite, is NaN.

They are operators of torch's, so that captures of steps see them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from elastic.compiler import compiled_library
from elastic.quant.formats.base import BoundKernel

SOURCE = Path(__file__).with_name("integer_matmul.cpp")
MOST_GROUP = 256
"""Inputs of a group, whose sum fits 32 bits."""
OUTPUTS = 4
"""Of a matrix in rows, or a multiple of them."""
WIDTHS = {"AVX512": 64, "AVX2": 32}
"""Columns of a block for the instructions of a target whose blocks the kernel reads fast; see int4_layout.py."""

_PTR, _INT = ctypes.c_void_p, ctypes.c_int64


class _NibbleMatrix(ctypes.Structure):
    """How a matrix lies: see the source."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "group", "width")),
        *((name, ctypes.c_float) for name in ("middle", "factor")),
    ]


def multiplies_nibbles(instructions: str, group: int) -> bool:
    """Return whether there is a kernel for nibbles packed for such instructions, with groups of so many inputs."""
    return instructions in WIDTHS and group % 2 == 0 and group <= MOST_GROUP and _library() is not None


def multiplies_rows(outputs: int) -> bool:
    """Return whether there is a kernel for a matrix in rows of int8 with so many outputs."""
    return outputs % OUTPUTS == 0 and _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    without = "products with int8 and int4 are torch's operators', some up to twice as long"
    library = compiled_library(SOURCE, without, "is_supported")  # which has all else where it is
    if library is None:
        return None
    matrix = (ctypes.POINTER(_NibbleMatrix), _PTR, _PTR, _PTR, _INT)  # layout, planes, scales and their step
    library.multiply_int4.argtypes = [*matrix, _PTR, _INT, _PTR, _INT, ctypes.c_int]  # x, rows, outputs and their step
    library.multiply_int8.argtypes = [_PTR, _PTR, _PTR, _INT, _INT, _PTR, _INT, _PTR, ctypes.c_int]
    library.multiply_int4.restype = library.multiply_int8.restype = None
    return library


_matrix = cache(_NibbleMatrix)


FixedCall = Callable[..., None]
"""A product in memory that was looked up once; arguments are ignored."""


def _multiply_int4(planes: torch.Tensor, scales: torch.Tensor, width: int, middle: float, factor: float) -> FixedCall:
    """Return the function in C++ for a matrix, of x's address and rows, those of outputs and their step, and threads.

    Shapes are those of `int4_matmul`.
    """
    library, (groups, outputs, _) = _library(), scales.shape
    assert library is not None
    group = 2 * planes[0].numel() // outputs // groups
    return partial(
        library.multiply_int4,
        _matrix(outputs, group * groups, group, width, middle, factor),
        planes[0].data_ptr(),
        planes[1].data_ptr() if len(planes) == 2 else None,
        scales.data_ptr(),
        scales.stride(0),
    )


def _multiply_int8(rows: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None) -> FixedCall:
    """Return the function in C++ for a matrix, of x's address and rows, the outputs', and threads.

    Shapes are those of `int8_matmul`.
    """
    library = _library()
    assert library is not None
    return partial(
        library.multiply_int8,
        rows.data_ptr(),
        scales.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        *rows.shape,
    )


def _fixed_int4(
    x: torch.Tensor,
    planes: torch.Tensor,
    scales: torch.Tensor,
    width: int,
    middle: float,
    factor: float,
    out: torch.Tensor,
) -> FixedCall:
    multiply = _multiply_int4(planes, scales, width, middle, factor)
    call = partial(multiply, x.data_ptr(), len(x), out.data_ptr(), out.stride(0))
    return lambda *arguments: call(torch.get_num_threads())


def _fixed_int8(
    x: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, out: torch.Tensor
) -> FixedCall:
    call = partial(_multiply_int8(rows, scales, offsets), x.data_ptr(), len(x), out.data_ptr())
    return lambda *arguments: call(torch.get_num_threads())


_operators = torch.library.Library("elastic", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define(  # type: ignore[no-untyped-call]
    "int4_matmul(Tensor x, Tensor planes, Tensor scales, int width, float middle, float factor, Tensor(a!) out) -> ()"
)
_operators.define(  # type: ignore[no-untyped-call]
    "int8_matmul(Tensor x, Tensor rows, Tensor scales, Tensor? offsets, Tensor(a!) out) -> ()"
)
_operators.impl("int4_matmul", lambda *args: _fixed_int4(*args)(), "CPU")  # type: ignore[no-untyped-call]
_operators.impl("int8_matmul", lambda *args: _fixed_int8(*args)(), "CPU")  # type: ignore[no-untyped-call]
int4_matmul = torch.ops.elastic.int4_matmul.default
"""Write x @ matrix.T to `out`.

x: float32 [tokens, inputs], contiguous; planes: uint8 [1 or 2, outputs * inputs / 2], the nibbles of codes, or the
upper and the lower ones; scales: bfloat16 [groups, outputs, 2], columns next to one another; out: float32 [tokens,
outputs], rows in one piece. weight = scale * (code - middle + factor * offset / scale), the quotient rounded to a whole
number. The caller has checked shapes.
"""
int8_matmul = torch.ops.elastic.int8_matmul.default
"""Write x @ matrix.T to `out`, all contiguous.

x: float32 [tokens, inputs]; rows: int8 [outputs, inputs]; scales: bfloat16 [outputs]; offsets: float32 [outputs], or
None; out: float32 [tokens, outputs]. weight = scale * code + offset. The caller has checked shapes.
"""


class _Recorder(threading.local):
    active = False


recorder = _Recorder()
"""`active` is set where operators of this thread are recorded. To call one takes as long as a small product."""


def bind_int4(planes: torch.Tensor, scales: torch.Tensor, width: int, middle: float, factor: float) -> BoundKernel:
    """Return the product with a matrix that stays where it is, for x: float32 [tokens, inputs], contiguous.

    Shapes are those of `int4_matmul`.
    """
    multiply, outputs = _multiply_int4(planes, scales, width, middle, factor), scales.shape[1]

    def product(x: torch.Tensor) -> torch.Tensor:
        """Multiply x: [tokens, inputs]; returns [tokens, outputs]."""
        rows = x.shape[0]
        out = torch.empty(rows, outputs, dtype=torch.float32)
        if recorder.active:
            int4_matmul(x, planes, scales, width, middle, factor, out)
        else:
            multiply(x.data_ptr(), rows, out.data_ptr(), outputs, torch.get_num_threads())
        return out

    return product


def bind_int8(rows: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None) -> BoundKernel:
    """Return the product with a matrix that stays where it is, for x: float32 [tokens, inputs], contiguous.

    Shapes are those of `int8_matmul`.
    """
    multiply, outputs = _multiply_int8(rows, scales, offsets), len(rows)

    def product(x: torch.Tensor) -> torch.Tensor:
        """Multiply x: [tokens, inputs]; returns [tokens, outputs]."""
        tokens = x.shape[0]
        out = torch.empty(tokens, outputs, dtype=torch.float32)
        if recorder.active:
            int8_matmul(x, rows, scales, offsets, out)
        else:
            multiply(x.data_ptr(), tokens, out.data_ptr(), torch.get_num_threads())
        return out

    return product


FIXED: dict[object, Callable[..., FixedCall]] = {int4_matmul: _fixed_int4, int8_matmul: _fixed_int8}
"""Of each operator: what returns a call with the same arguments, tensors of any shape that stay where they are."""
