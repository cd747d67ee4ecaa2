"""Attention over keys and values that are on another device than the queries (CoCoServe, section 3.3).

Either attention goes there (queries are sent, the result comes back), or they are fetched, whichever moves fewer
bytes: one new token goes to a long context, a prompt fetches a short one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic.memory.copy_engine import to_device

Attention = Callable[..., tuple[torch.Tensor, Any]]


def ship_query_bytes(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Count the bytes that travel if attention goes where keys and values are: queries, mask and result.

    query: [batch, heads, q, dim], value: [batch, kv_heads, k, value_dim], mask: [batch or 1, heads or 1, q, k].
    """
    batch, heads, tokens, _ = query.shape
    result = batch * heads * tokens * value.shape[-1] * query.element_size()
    return query.nbytes + result + (mask.nbytes if mask is not None else 0)


def attend_on_cache_device(
    attention: Attention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute what `attention` gives, on the query's device.

    query: [batch, heads, q, dim], key and value: [batch, kv_heads, k, dim], mask: [batch or 1, heads or 1, q, k].
    """
    query_device, cache_device = query.device, key.device
    if key.nbytes + value.nbytes < ship_query_bytes(query, value, mask):
        key, value = to_device(key, query_device), to_device(value, query_device)
        return attention(module, query, key, value, mask, **kwargs)[0]
    shipped = {name: to_device(argument, cache_device) for name, argument in kwargs.items()}
    query, mask = to_device(query, cache_device), to_device(mask, cache_device)
    return attention(module, query, key, value, mask, **shipped)[0].to(query_device)
