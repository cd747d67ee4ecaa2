"""Attention over a cache in blocks, for batches of sequences of any lengths, with no mask over pairs of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from elastic.engines.executor.attention_metadata import AttentionMetadata, DecodeGroup, PromptChunk, bytes_at_once
from elastic.engines.executor.block_layout import BlockLayout, CacheParts
from elastic.engines.executor.kernels.paged_attention import PagedAttention
from elastic.kvcache.score_terms import ScoreTerms, attend_by_scores


@dataclass(frozen=True)
class BlockAttention:
    """Attention over blocks of one layout: by a compiled kernel where a few tokens are new, else by torch's operators.

    Caches [elements] are of a layer, queries of the heads of some of its parts, `terms` of the query's heads.
    """

    layout: BlockLayout
    kernel: PagedAttention | None = None

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        parts: CacheParts,
        batch: AttentionMetadata,
        scaling: float | None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        """Write new keys and values, and let the new tokens see what they may.

        Query [heads, new, dim], keys and values [kv_heads, new, dim], of all sequences after one another. Returns [new,
        heads, dim].
        """
        if batch.decodes and batch.decodes[0].at is None:  # all of the batch
            self._write(cache, parts, batch, keys, values)
            return self._decode(query, cache, parts, batch.decodes[0], scaling, terms)
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        if batch.prompts:  # before new tokens overwrite old ones that have just left a sliding window
            read = self.layout.as_read(keys, values)  # so that it matters not how a prompt was cut
            for prompt in batch.prompts:
                own = read[0][:, prompt.at], read[1][:, prompt.at]
                out[prompt.at] = self._prompt(query[:, prompt.at], own, cache, parts, prompt, scaling, terms)
        if batch.written is not None:
            keys, values = keys.index_select(1, batch.written), values.index_select(1, batch.written)
        self._write(cache, parts, batch, keys, values)
        for prompt in batch.continued:
            out[prompt.at] = self._prompt(query[:, prompt.at], None, cache, parts, prompt, scaling, terms)
        for group in batch.decodes:
            out[group.at] = self._decode(query[:, group.at], cache, parts, group, scaling, terms)
        if batch.in_place is not None:
            assert self.kernel is not None
            self.kernel.attend(query, cache, parts, batch.in_place, scaling, terms, out)
        return out

    def _write(
        self, cache: torch.Tensor, parts: CacheParts, batch: AttentionMetadata, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        if self.kernel is not None and self.kernel.writes:
            self.kernel.write(cache, parts, batch.blocks, batch.slots, keys, values)
        else:
            self.layout.write(cache, batch.write.of(parts), keys, values)

    def _decode(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        parts: CacheParts,
        group: DecodeGroup,
        scaling: float | None,
        terms: ScoreTerms | None,
    ) -> torch.Tensor:
        """Query [heads, sequences, dim]; returns [sequences, heads, dim]."""
        heads, sequences, dim = query.shape
        each = heads // parts.heads
        packed, outs = query.transpose(0, 1).reshape(sequences, parts.heads, each, dim), []
        for some, keys, values in self._read(cache, group.read.of(parts), query.dtype, decode=True):
            asked = packed[:, some]
            if terms is None:
                out = scaled_dot_product_attention(asked, keys, values, attn_mask=group.mask, scale=scaling)
            else:
                theirs = terms.of_heads(slice(some.start * each, some.stop * each))
                out = attend_by_scores(asked.flatten(1, 2)[:, :, None], keys, values, group.mask, scaling, theirs)
            outs.append(out.reshape(sequences, -1, out.shape[-1]))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _prompt(
        self,
        query: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor] | None,
        cache: torch.Tensor,
        parts: CacheParts,
        prompt: PromptChunk,
        scaling: float | None,
        terms: ScoreTerms | None,
    ) -> torch.Tensor:
        """Query [heads, new, dim], its own keys and values [kv_heads, new, dim], or None if they are in the cache.

        Returns [new, heads, dim].
        """
        if prompt.read is None:
            assert own is not None
            return _prompt_heads(query, *own, prompt.mask, scaling, terms)
        each, outs = len(query) // parts.heads, []
        for some, *read in self._read(cache, prompt.read.of(parts), query.dtype, decode=False):
            keys, values = (states[0][:, prompt.seen] for states in read)
            if own is not None:
                keys, values = torch.cat([keys, own[0][some]], 1), torch.cat([values, own[1][some]], 1)
            asked = slice(some.start * each, some.stop * each)
            theirs = None if terms is None else terms.of_heads(asked)
            outs.append(_prompt_heads(query[asked], keys, values, prompt.mask, scaling, theirs))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _read(
        self, cache: torch.Tensor, index: torch.Tensor, dtype: torch.dtype, *, decode: bool
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield heads, and keys and values [sequences, heads, blocks * tokens, dim], of so many as are read at once."""
        _, sequences, places, blocks = index.shape
        each, shape = self.layout.row_heads, self.layout.shape
        place_bytes = 2 * sequences * blocks * shape.tokens * each * shape.dim * dtype.itemsize
        most = max(1, bytes_at_once(cache.device, decode=decode) // place_bytes)
        for start in range(0, places, most):
            stop = min(places, start + most)
            yield slice(start * each, stop * each), *self.layout.read(cache, index[:, :, start:stop])


def _prompt_heads(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    terms: ScoreTerms | None,
) -> torch.Tensor:
    """Query [heads, new, dim], keys and values [kv_heads, past + new, dim]; returns [new, heads, dim]."""
    if terms is not None:
        return attend_by_scores(query[None], keys[None], values[None], mask, scaling, terms)[0].transpose(0, 1)
    out = scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[0] != keys.shape[0],
    )
    return out[0].transpose(0, 1)
