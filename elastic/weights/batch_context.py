"""The share of a batch that a thread computes: what depends on the number of tokens goes by those of the whole batch.

So a replica takes the kernels that the layer would have taken for all rows together.
"""

from __future__ import annotations

import threading
from collections.abc import Container

from torch import nn


class BatchShare:
    """A number of rows or tokens of a batch, and the module that computes them."""

    def __init__(self, count: int, batch: int) -> None:
        self.count = count
        self.batch = batch
        self.replica: nn.Module | None = None
        """Called in place of the next layer that the thread calls, this once; None: the layer itself."""


class _CurrentShare(threading.local):
    share: BatchShare | None = None
    """None: whole batches."""
    plan: Container[int] | None = None
    """The decoder layers that are computed, the others being passed over; None: all layers."""


thread = _CurrentShare()


def full_batch_tokens(tokens: int) -> int:
    """Return how many tokens the whole batch has where this thread has so many."""
    share = thread.share
    return tokens if share is None else tokens * share.batch // share.count
