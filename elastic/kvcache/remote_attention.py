"""Attention over keys and values that are on another device than the queries (CoCoServe, section 3.3).

Either attention visits them (queries go there, the result comes back), or they are fetched, whichever moves fewer
bytes: one new token visits a long context, a prompt fetches a short one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic.memory.copy_engine import to_device

Attention = Callable[..., tuple[torch.Tensor, Any]]


def ship_query_bytes(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Bytes that travel if attention goes where keys and values are: queries, mask and result.

    query `[batch, heads, q, dim]`, value `[batch, kv_heads, k, value_dim]`.
    """
    batch, heads, tokens, _ = query.shape
    result = batch * heads * tokens * value.shape[-1] * query.element_size()
    return query.nbytes + result + (mask.nbytes if mask is not None else 0)


def fetch_kv_bytes(key: torch.Tensor, value: torch.Tensor) -> int:
    """Bytes that travel if keys and values come: `[batch, kv_heads, k, dim]` each."""
    return key.nbytes + value.nbytes


def attend_on_cache_device(
    attention: Attention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """What `attention` gives, on the query's device."""
    here, there = query.device, key.device
    if fetch_kv_bytes(key, value) < ship_query_bytes(query, value, mask):
        return attention(module, query, to_device(key, here), to_device(value, here), mask, **kwargs)[0]
    guests = {name: to_device(given, there) for name, given in kwargs.items()}
    out, _ = attention(module, to_device(query, there), key, value, to_device(mask, there), **guests)
    return out.to(here)
