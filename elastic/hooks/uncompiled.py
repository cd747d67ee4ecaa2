"""A wrapped model is not compiled: where `generate` would do that by itself, it calls the model as it is.

With a static cache it is transformers' default on GPUs. Compiled code would not see that weights move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)
_NAME = "get_compiled_call"


def get_compiled_call(root: nn.Module, compile_config: Any) -> Callable[..., Any]:
    """Return the forward that `generate` decodes with."""
    _warn_once()
    return root.__call__


def install(root: nn.Module) -> None:
    """Have `generate` call a model uncompiled, if it would compile it."""
    if hasattr(type(root), _NAME) and _NAME not in root.__dict__:
        root.__dict__[_NAME] = MethodType(get_compiled_call, root)


def remove(root: nn.Module) -> None:
    """Undo `install`. Can be called twice."""
    if is_uncompiled_call(root.__dict__.get(_NAME)):
        del root.__dict__[_NAME]


def is_uncompiled_call(value: Any) -> bool:
    """Return whether an attribute is what `install` puts on a model."""
    return getattr(value, "__func__", None) is get_compiled_call


@cache
def _warn_once() -> None:
    logger.warning(
        "generate does not compile a wrapped model, whose weights may move at any time: it calls the model as it is; "
        "elastic.unwrap(model) before it is to be compiled"
    )
