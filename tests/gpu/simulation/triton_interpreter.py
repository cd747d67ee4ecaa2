"""Triton's interpreter with the bfloat16 of a GPU: alone, it multiplies the bits as integers and never rounds.

It replaces functions of Triton's language while a kernel runs, so one runs at a time.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch


def install() -> None:
    """Have products of bfloat16 be those of the numbers, in float32, and float32 be rounded to the nearest bfloat16."""
    from triton import language
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    product, cast, run = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, GridExecutor.__call__
    running = threading.RLock()

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != language.bfloat16:
            return handle
        numbers = torch.from_numpy(handle.data.view(np.int16)).view(torch.bfloat16).float()
        return TensorHandle(numbers.numpy(), language.float32)

    def create_dot(builder: Any, a: Any, b: Any, *more: Any) -> Any:
        return product(builder, widened(a), widened(b), *more)

    def cast_impl(builder: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (language.float32, language.bfloat16):
            return cast(builder, source, target)
        bits = torch.from_numpy(source.data).bfloat16().view(torch.int16)
        return TensorHandle(bits.numpy().view(np.uint16), language.bfloat16)

    def run_alone(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with running:
            return run(executor, *args, **kwargs)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    GridExecutor.__call__ = run_alone
