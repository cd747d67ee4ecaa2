"""The parts of a decoder layer's inputs by requests, where the tokens of all are one row: a table by name.

Under continuous batching a forward pass has hidden states [1, tokens, hidden], the new tokens of all requests after one
another. A part of the batch is a span of tokens that ends where a request does. The engine's KV cache stays where it
is: each part is given the cache as its requests see it, and asks it for attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from elastic.hooks.replicas.split_rows import HIDDEN, LayerInputs, NotSplittable, SplitSpec, Take
from elastic.weights.decoder import PAGED_CACHE

CACHES = (PAGED_CACHE,)


@runtime_checkable
class RequestCache(Protocol):
    """An engine's KV cache in a forward pass, as far as replica groups need it."""

    def new_tokens(self) -> Sequence[int]:
        """Return the number of new tokens of each request of the batch, in order."""

    def of_requests(self, start: int, stop: int) -> Any:
        """Make the cache for these requests of the batch, good for threads of their own, and for any device."""


def _span(axis: int) -> Take:
    """Take tokens along this axis, counted from the last: of hidden states [1, tokens, hidden], -2."""

    def take(tensor: torch.Tensor, tokens: slice, count: int) -> torch.Tensor | None:
        """Return the tokens of a tensor of any shape that has all of them along the axis."""
        if tensor.ndim < -axis or tensor.shape[axis] != count:
            return None
        return tensor.narrow(axis, tokens.start, tokens.stop - tokens.start)

    return take


BY_REQUESTS = SplitSpec(
    axis=1,
    table={
        HIDDEN: _span(-2),
        # [1, 1, 1, 1]: the cache knows what each token sees
        "attention_mask": lambda tensor, tokens, count: tensor if tensor.numel() == 1 else None,
        "position_ids": _span(-1),
        "position_embeddings": _span(-2),
        "position_embeddings_global": _span(-2),
        "position_embeddings_local": _span(-2),
    },
    caches=CACHES,
)


def request_cache(inputs: LayerInputs) -> RequestCache | None:
    """Return the cache of the engine that has called the model; None: no engine has.

    Raises `NotSplittable` if it has other tokens than the hidden states.
    """
    cache, hidden = inputs.first_of(CACHES), inputs.hidden
    if not isinstance(cache, RequestCache):
        return None
    if hidden.ndim > 3:  # it will be in all batches: named without their sizes, it is said once
        raise NotSplittable(f"{HIDDEN}, a tensor of {hidden.ndim} dimensions")
    if hidden.ndim != 3 or hidden.shape[:2] != (1, sum(cache.new_tokens())):
        raise NotSplittable(f"hidden_states {list(hidden.shape)} for {sum(cache.new_tokens())} tokens of requests")
    return cache
