"""A wrapped model is not compiled: where `generate` would do that by itself, it calls the model as it is.

With a static cache it is transformers' default on GPUs. Compiled code would not see that weights move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


def get_compiled_call(root: nn.Module, compile_config: Any) -> Callable[..., Any]:
    """Return the forward that `generate` decodes with."""
    _warn_once()
    return root.__call__


@cache
def _warn_once() -> None:
    logger.warning(
        "generate does not compile a wrapped model, whose weights may move at any time: it calls the model as it is; "
        "elastic.unwrap(model) before it is to be compiled"
    )
