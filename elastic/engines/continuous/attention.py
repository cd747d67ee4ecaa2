"""Attention over a cache in blocks, for batches of requests of any lengths, with no mask over pairs of requests.

Stock continuous batching has either a kernel for it (flash attention) or, elsewhere, one mask of all new tokens against
all cached ones: then a batch of twice the requests costs four times as much (benchmarks/continuous.py).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from elastic.engines.continuous.allocators import LayerBlocks
from elastic.engines.continuous.attention_inputs import AttentionBatch, DecodeGroup, PromptInputs


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: LayerBlocks,
    batch: AttentionBatch,
    write_index: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Write new keys and values, and let the new tokens see what they may.

    Query [heads, new, dim], keys and values [kv_heads, new, dim], of all requests after one another; `write_index`
    [new], rows of the cache. Returns [new, heads, dim].
    """
    out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
    for prompt in batch.prompts:  # before new tokens overwrite old ones that have just left a sliding window
        request = prompt.request
        new = slice(request.start, request.start + request.count)
        out[new] = _prompt(query[:, new], keys[:, new], values[:, new], blocks, prompt, scaling)
    blocks.key_rows.index_copy_(0, write_index, keys.transpose(0, 1))
    blocks.value_rows.index_copy_(0, write_index, values.transpose(0, 1))
    for group in batch.decoding:
        if batch.only_decoding:
            return _decode(query, blocks, group, scaling)
        out[group.at] = _decode(query[:, group.at], blocks, group, scaling)
    return out


def _decode(query: torch.Tensor, blocks: LayerBlocks, group: DecodeGroup, scaling: float | None) -> torch.Tensor:
    """Query [heads, requests, dim]; returns [requests, heads, dim]."""
    heads, requests, dim = query.shape
    kv_heads = blocks.keys.shape[2]
    keys, values = (
        b.index_select(0, group.table).view(requests, -1, kv_heads, dim).transpose(1, 2)
        for b in (blocks.keys, blocks.values)
    )
    packed = query.transpose(0, 1).reshape(requests, kv_heads, heads // kv_heads, dim)
    out = scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask, scale=scaling)
    return out.reshape(requests, heads, dim)


def _prompt(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: LayerBlocks,
    prompt: PromptInputs,
    scaling: float | None,
) -> torch.Tensor:
    """Query [heads, new, dim], keys and values [kv_heads, new, dim]; returns [new, heads, dim]."""
    if prompt.past.numel():
        keys = torch.cat([blocks.key_rows.index_select(0, prompt.past).transpose(0, 1), keys], 1)
        values = torch.cat([blocks.value_rows.index_select(0, prompt.past).transpose(0, 1), values], 1)
    out = scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=prompt.mask,
        is_causal=prompt.mask is None,
        scale=scaling,
        enable_gqa=query.shape[0] != keys.shape[0],
    )
    return out[0].transpose(0, 1)
