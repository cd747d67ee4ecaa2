"""Kernels for the attention of one new token, in which each key head is read once.

With one query token the query heads of a group are simply several queries of one key head, so no key is repeated:
[batch, heads, 1, dim] is viewed as [batch, kv_heads, heads // kv_heads, dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
"""(query [batch, kv_heads, n, dim], key [batch, kv_heads, k, dim], value [batch, kv_heads, k, value_dim], mask
[batch or 1, 1, 1, k] or None, scaling) -> [batch, kv_heads, n, value_dim]."""


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Run torch's fused kernel.

    query: [batch, kv_heads, n, dim], key: [batch, kv_heads, k, dim], value: [batch, kv_heads, k, value_dim], mask:
    [batch or 1, 1, 1, k] or None, all of one dtype. Returns [batch, kv_heads, n, value_dim].
    """
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def key_by_query(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Run two batched products, the first as key x query, softmax in float32 between them.

    query: [batch, kv_heads, n, dim], key: [batch, kv_heads, k, dim], value: [batch, kv_heads, k, value_dim], mask:
    [batch or 1, 1, 1, k] or None, all of one dtype. Returns [batch, kv_heads, n, value_dim].
    """
    query, scaling = _within_range(query, scaling)
    products = torch.bmm(key.flatten(0, 1), query.flatten(0, 1).transpose(1, 2))
    return _weigh(products.transpose(1, 2).contiguous(), query.shape, value, mask, scaling)


def query_by_key(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Run two batched products, the first as query x key, softmax in float32 between them.

    query: [batch, kv_heads, n, dim], key: [batch, kv_heads, k, dim], value: [batch, kv_heads, k, value_dim], mask:
    [batch or 1, 1, 1, k] or None, all of one dtype. Returns [batch, kv_heads, n, value_dim].
    """
    query, scaling = _within_range(query, scaling)
    products = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    return _weigh(products, query.shape, value, mask, scaling)


def _within_range(query: torch.Tensor, scaling: float) -> tuple[torch.Tensor, float]:
    """Take the power of two out of a scaling below 1, for queries, [..., dim], in float16; others are as they were.

    Products that are still to be scaled may be beyond its range, which ends at 65,504. Powers of two round no query
    but one that is next to nothing.
    """
    exponent = math.frexp(scaling)[1] - 1
    if query.dtype != torch.float16 or exponent >= 0:
        return query, scaling
    return query * 2.0**exponent, scaling * 2.0**-exponent


def _weigh(
    products: torch.Tensor, shape: torch.Size, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Turn products [batch * kv_heads, n, k] into the weighted values, [batch, kv_heads, n, value_dim]."""
    batch, kv_heads, n, _ = shape
    scores = products.float() * scaling
    if mask is not None:
        scores = scores.view(batch, kv_heads, n, -1)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        scores = scores.flatten(0, 1)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    out = torch.bmm(weights, value.flatten(0, 1)).view(batch, kv_heads, n, -1)
    if mask is None:
        return out
    allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
    # of nothing: 0, as in torch's kernel, and no NaN to be cached
    return out.masked_fill_(~allowed.any(-1, keepdim=True), 0)


KERNELS: dict[str, Kernel] = {"sdpa": sdpa, "key_by_query": key_by_query, "query_by_key": query_by_key}
