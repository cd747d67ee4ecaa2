"""A wrapped model is not compiled: where `generate` would do that by itself, it calls the model as it is.

With a static cache it is transformers' default on GPUs. Compiled code would not see that weights move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any
from weakref import WeakSet

from torch import nn

logger = logging.getLogger(__name__)
_NAME = "get_compiled_call"
_uncompiled: WeakSet[nn.Module] = WeakSet()


def get_compiled_call(root: nn.Module, compile_config: Any) -> Callable[..., Any]:
    """Return the forward that `generate` decodes with; on a copy of a wrapped model, that of its class."""
    if root in _uncompiled:
        _warn_once()
        return root.__call__
    compiled: Callable[..., Any] = getattr(type(root), _NAME)(root, compile_config)
    return compiled


def install(root: nn.Module) -> None:
    """Have `generate` call a model uncompiled, if it would compile it."""
    stock = getattr(type(root), _NAME, None)
    present = getattr(root.__dict__.get(_NAME), "__func__", stock)
    if stock is not None and present in (stock, get_compiled_call):
        root.__dict__[_NAME] = MethodType(get_compiled_call, root)
        _uncompiled.add(root)


def remove(root: nn.Module) -> None:
    """Undo `install`. Can be called twice."""
    if root in _uncompiled:
        _uncompiled.discard(root)
        root.__dict__.pop(_NAME, None)


@cache
def _warn_once() -> None:
    logger.warning(
        "generate does not compile a wrapped model, whose weights may move at any time: it calls the model as it is; "
        "elastic.unwrap(model) before it is to be compiled"
    )
