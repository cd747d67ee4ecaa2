"""Runs of operators on elements, called at once: what is between the products of a decode step (CPU).

torch takes five to ten microseconds to call an operator, and one or two to compute 16 x 768 elements. All that are
translated are one IEEE operation for each element, in float32, so the bits are torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from elastic.compiler import compiled_library

SOURCE = Path(__file__).with_name("elementwise.cpp")
DIMS = 4
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_COPY, _ADD, _SUB, _MUL, _DIV, _NEG, _RSQRT = range(7)
_aten = torch.ops.aten
_BINARY = {
    _aten.add.out: _ADD,
    _aten.sub.out: _SUB,
    _aten.mul.out: _MUL,
    _aten.div.out: _DIV,
    _aten.add_.Tensor: _ADD,
    _aten.sub_.Tensor: _SUB,
    _aten.mul_.Tensor: _MUL,
    _aten.div_.Tensor: _DIV,
}
_UNARY = {_aten.neg.out: _NEG, _aten.rsqrt.out: _RSQRT}


_Steps = ctypes.c_int64 * DIMS


class _Operand(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("steps", _Steps), ("dtype", ctypes.c_int64)]


class Instruction(ctypes.Structure):
    """An operator, over tensors that are where they were when it was made: see the source."""

    _fields_ = [
        ("code", ctypes.c_int64),
        ("sizes", _Steps),
        ("out", _Operand),
        ("left", _Operand),
        ("right", _Operand),
        ("number", ctypes.c_float),
    ]


class ElementwiseProgram:
    """Instructions, one after another."""

    def __init__(
        self, library: ctypes.CDLL, instructions: Sequence[Instruction], tensors: Sequence[torch.Tensor]
    ) -> None:
        """`tensors`: theirs, which are kept."""
        self._run = library["run"]
        self._run.argtypes, self._run.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), None
        self._instructions = (Instruction * len(instructions))(*instructions)
        self._given = ctypes.addressof(self._instructions), len(instructions)
        self._tensors = tensors

    def __call__(self) -> None:
        """Run them."""
        self._run(*self._given, torch.get_num_threads())


def elementwise_library() -> ctypes.CDLL | None:
    """Return what runs programs; None: it cannot be compiled here."""
    return compiled_library(SOURCE, "replays call all operators of torch's one by one", "run")


def translate(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[torch.Tensor, ...] = ()
) -> list[Instruction] | None:
    """Return an operator as instructions; None: it is none of these, or what it is called with is not.

    Tensors are of any shapes that broadcast to the result's. `results`: what it returns is copied to.
    """
    out: Any = kwargs.get("out", args[0] if args else None)
    others = kwargs.keys() - {"out"}
    if function in _BINARY and not others:
        return _made(_BINARY[function], out, *args)
    if function in _UNARY and not others:
        return _made(_UNARY[function], out, args[0])
    if function is _aten.pow.Tensor_Scalar_out and args[1] == 2 and not others:
        return _made(_MUL, out, args[0], args[0])
    if function is _aten.copy_.default and len(args) == 2:
        return _made(_COPY, out, args[1].expand(out.shape))
    if function is _aten._to_copy.default and len(results) == 1 and others <= {"dtype"}:
        return _made(_COPY, results[0], args[0])
    if function is _aten.cat.out and not others:
        return _joined(out, *args)
    return None


def _joined(out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> list[Instruction] | None:
    instructions: list[Instruction] = []
    start = 0
    for tensor in tensors:
        if tensor.dim() != out.dim():  # an empty one
            return None
        made = _made(_COPY, out.narrow(dim, start, tensor.shape[dim]), tensor)
        if made is None:
            return None
        instructions, start = instructions + made, start + tensor.shape[dim]
    return instructions


def _made(code: int, out: torch.Tensor, left: Any, right: Any = None) -> list[Instruction] | None:
    """Return one instruction, of elements of `out`; None: for dtypes or strides that are not for it."""
    tensors = [operand for operand in (out, left, right) if isinstance(operand, torch.Tensor)]
    dtypes = {tensor.dtype for tensor in tensors}
    number = 0.0 if isinstance(right, torch.Tensor | None) else right
    if not isinstance(left, torch.Tensor) or not isinstance(number, float | int) or not dtypes <= _DTYPES.keys():
        return None
    if code not in (_COPY, _NEG) and out.dtype is not torch.float32 and (len(dtypes) > 1 or len(tensors) < 3):
        return None  # torch rounds numbers first, tensors of another dtype, and steps of 1 / sqrt
    sizes, steps = _merged(list(out.shape), [list(tensor.expand(out.shape).stride()) for tensor in tensors])
    if len(sizes) > DIMS or steps[0][-1] != 1 or any(step[-1] not in (0, 1) for step in steps):
        return None
    ahead = DIMS - len(sizes)  # dimensions of one element
    operands = [
        _Operand(tensor.data_ptr(), _Steps(*[0] * ahead, *step), _DTYPES[tensor.dtype])
        for tensor, step in zip(tensors, steps, strict=True)
    ]
    operands += [_Operand()] * (3 - len(operands))
    return [Instruction(code, _Steps(*[1] * ahead, *sizes), *operands, float(number))]


def _merged(sizes: list[int], steps: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Leave out dimensions of one element, and make one of two that all tensors step through as one."""
    kept: list[int] = []
    for dim in range(len(sizes)):
        if sizes[dim] == 1:
            continue
        if kept and all(step[kept[-1]] == step[dim] * sizes[dim] for step in steps):
            sizes = [*sizes[:dim], sizes[kept[-1]] * sizes[dim], *sizes[dim + 1 :]]
            kept[-1] = dim
        else:
            kept.append(dim)
    return [sizes[dim] for dim in kept] or [1], [[step[dim] for dim in kept] or [1] for step in steps]
