"""What of a batch a thread computes: a share of its rows or tokens, or some of the layers, or of their parts.

What depends on the number of tokens goes by those of the whole batch, so a replica takes the kernels that the layer
would have taken for all rows together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from typing import Any, Protocol

from torch import nn


class BatchShare:
    """A number of rows or tokens of a batch, and the module that computes them."""

    def __init__(self, count: int, batch: int) -> None:
        self.count = count
        self.batch = batch
        self.replica: nn.Module | None = None
        """Called in place of the next layer that the thread calls, this once; None: the layer itself."""


class ForwardPlan(Protocol):
    """Which layers a forward pass computes in this process, whole or in part; the others are passed over."""

    layers: Container[int]
    """Those that are computed."""

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the forward of a module's class, pass over it or compute a part; return what the module returns."""


ModelForward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Computes the forward pass of a whole model in place of the model's own method, between its hooks, from the arguments
of that."""


class _CurrentBatch(threading.local):
    share: BatchShare | None = None
    """None: whole batches."""
    plan: ForwardPlan | None = None
    """None: all layers. Looked at by modules with a forward override alone."""
    graphs: ModelForward | None = None
    """None: the model's own forward. Looked at by a root with an override alone."""


thread = _CurrentBatch()


def full_batch_tokens(tokens: int) -> int:
    """Return how many tokens the whole batch has where this thread has so many."""
    share = thread.share
    return tokens if share is None else tokens * share.batch // share.count
