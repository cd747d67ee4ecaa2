"""Compiled code would not see that weights move, nor what reads keys and values in pages."""

from __future__ import annotations

from typing import NoReturn

import torch

from elastic.errors import StateError


def refuse_compilation(how: str = "compiled") -> None:
    """Raise `StateError` for a caller that is being compiled, with a part of a wrapped model or all of it.

    That is done outside the compiled code, where an error is not taken for a reason to run it uncompiled.
    """
    torch.compiler.disable(_refuse)(how)  # type: ignore[no-untyped-call]


def _refuse(how: str) -> NoReturn:
    raise StateError(f"a wrapped model, or a part of it, cannot be {how}; unwrap it first")
