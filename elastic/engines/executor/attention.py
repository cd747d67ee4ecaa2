"""Attention over a cache in blocks, for batches of sequences of any lengths, with no mask over pairs of sequences."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from elastic.engines.executor.attention_metadata import AttentionMetadata, DecodeGroup, PromptChunk
from elastic.engines.executor.block_layout import BlockLayout, CacheParts
from elastic.kvcache.score_terms import ScoreTerms, attend_by_scores


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: torch.Tensor,
    layout: BlockLayout,
    parts: CacheParts,
    batch: AttentionMetadata,
    scaling: float | None,
    terms: ScoreTerms | None = None,
) -> torch.Tensor:
    """Write new keys and values, and let the new tokens see what they may.

    Query [heads, new, dim], keys and values [kv_heads, new, dim], of all sequences after one another, and of the heads
    of some parts; cache [elements], of the layer; terms of the query's heads. Returns [new, heads, dim].
    """
    out = None
    if batch.prompts:  # before new tokens overwrite old ones that have just left a sliding window
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        seen_keys, seen_values = layout.as_read(keys, values)  # so that it matters not how a prompt was cut
        for prompt in batch.prompts:
            new = prompt.at
            out[new] = _prompt(
                query[:, new], seen_keys[:, new], seen_values[:, new], cache, layout, parts, prompt, scaling, terms
            )
    if batch.written is not None:
        keys, values = keys.index_select(1, batch.written), values.index_select(1, batch.written)
    layout.write(cache, batch.write.of(parts), keys, values)
    for group in batch.decodes:
        if group.at is None:
            return _decode(query, cache, layout, parts, group, scaling, terms)
        if out is None:
            out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        out[group.at] = _decode(query[:, group.at], cache, layout, parts, group, scaling, terms)
    assert out is not None
    return out


def _decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    layout: BlockLayout,
    parts: CacheParts,
    group: DecodeGroup,
    scaling: float | None,
    terms: ScoreTerms | None,
) -> torch.Tensor:
    """Query [heads, sequences, dim]; returns [sequences, heads, dim]."""
    heads, sequences, dim = query.shape
    keys, values = layout.read(cache, group.read.of(parts), sequences, parts.heads)
    if terms is not None:
        return attend_by_scores(query.transpose(0, 1)[:, :, None], keys, values, group.mask, scaling, terms)[:, :, 0]
    packed = query.transpose(0, 1).reshape(sequences, parts.heads, heads // parts.heads, dim)
    out = scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask, scale=scaling)
    return out.reshape(sequences, heads, dim)


def _prompt(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: torch.Tensor,
    layout: BlockLayout,
    parts: CacheParts,
    prompt: PromptChunk,
    scaling: float | None,
    terms: ScoreTerms | None,
) -> torch.Tensor:
    """Query [heads, new, dim], keys and values [kv_heads, new, dim]; returns [new, heads, dim]."""
    if prompt.read is not None:
        old_keys, old_values = layout.read(cache, prompt.read.of(parts), 1, parts.heads)
        keys = torch.cat([old_keys[0][:, prompt.past], keys], 1)
        values = torch.cat([old_values[0][:, prompt.past], values], 1)
    if terms is not None:
        return attend_by_scores(query[None], keys[None], values[None], prompt.mask, scaling, terms)[0].transpose(0, 1)
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
