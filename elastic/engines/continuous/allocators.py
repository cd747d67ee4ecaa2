"""transformers' block allocators, each layer in a range of its own: [block, keys or values, token, head, dim]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from elastic.engines.continuous.sector_pool import SectorPool
from elastic.kvcache.storage.paged import GroupRanges


class ElasticBlockLedger(BlockLedger):  # type: ignore[misc]
    """transformers' ledger of shared blocks; `version` says when who shares what has changed."""

    version = 0

    def acquire(self, block_id: int) -> None:
        """Count one more request that shares a block."""
        self.version += 1
        super().acquire(block_id)

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """Count one request fewer; return whether the block is free."""
        self.version += block_id in self.shared_ref_counts
        free: bool = super().release(block_id, no_cache)
        return free


@dataclass(frozen=True)
class LayerBlocks:
    """The cache of one layer, seen in four ways. Only blocks that were allocated may be touched."""

    keys: torch.Tensor
    """[block, token, head, dim]"""
    values: torch.Tensor
    key_rows: torch.Tensor
    """[row, head, dim]: a token of block b is row b * 2 * tokens + its place in the block."""
    value_rows: torch.Tensor


class _Blocks:
    """The base of both kinds of allocator."""

    tokens_per_page: int
    bytes_per_page: int
    num_key_value_heads: int
    head_dim: int
    cache_dtype: torch.dtype
    layer_indices: list[int]
    index: int
    block_table: dict[str, list[int]]
    layers: dict[int, LayerBlocks]
    read_trash_index = sentinel_index = write_trash_index = 0  # of padding, which there is none

    def use(self, ranges: GroupRanges, pool: SectorPool) -> None:
        """Take blocks from these ranges."""
        self.pool = pool
        self.ledger = ElasticBlockLedger()
        self.blocks_per_sector = pool.memory.blocks_per_sector(self.index)
        self.num_blocks = self.blocks_per_sector * pool.memory.sectors
        self.num_pages = self.num_blocks * len(self.layer_indices)
        self.block_physical_stride = 2 * self.tokens_per_page
        pool.set_blocks_per_sector(self.index, self.blocks_per_sector)
        self.layers = {}
        tokens, heads, dim = self.tokens_per_page, self.num_key_value_heads, self.head_dim
        for layer in self.layer_indices:
            flat = ranges.view(layer, self.cache_dtype)
            blocks = flat[: self.num_blocks * 2 * tokens * heads * dim].view(-1, 2, tokens, heads, dim)
            rows = blocks.view(-1, heads, dim)
            self.layers[layer] = LayerBlocks(blocks[:, 0], blocks[:, 1], rows, rows[tokens:])

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Give a request the blocks for its next tokens.

        Only the last one is read before it is full. The slots that nobody wrote weigh 0 there, and 0 times NaN, which
        bytes of any earlier owner may be, is NaN: so it begins as zeros.
        """
        before = len(self.block_table.get(request_id, ()))
        super().allocate_cache_to_request(request_id, past_length, query_length)  # type: ignore[misc]
        table = self.block_table[request_id]
        if len(table) > before:
            for layer in self.layers.values():
                layer.keys[table[-1]].zero_()
                layer.values[table[-1]].zero_()

    def reusable_sectors(self) -> int:
        """Count the sectors in which every block is free or kept for reuse."""
        size = self.blocks_per_sector
        cached = {block // size for block in self.ledger.cached_blocks}
        if not cached:
            return 0
        return len(cached - {block // size for table in self.block_table.values() for block in table})


class FullBlocks(_Blocks, FullAttentionCacheAllocator):  # type: ignore[misc]
    """Layers that see every token."""


class SlidingBlocks(_Blocks, SlidingAttentionCacheAllocator):  # type: ignore[misc]
    """Layers that see a window: the token at position p is in slot p modulo the window."""

    def recent_rows(self, request: str, past: int) -> list[int]:
        """List the rows of the last tokens before position `past` that a next one sees."""
        count = min(past, self.sliding_window - 1)
        rows: list[int] = self._token_indices_to_physical_indices(request, past - count, count)
        return rows


ALLOCATORS: dict[str, Any] = {FULL_ATTENTION: FullBlocks, SLIDING_ATTENTION: SlidingBlocks}
