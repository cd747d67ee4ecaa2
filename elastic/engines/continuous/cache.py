"""transformers' paged cache on elastic pages: its capacity is what the ledger says at any moment.

The stock cache is one tensor of a fixed size; where it has no block left, requests are thrown out and computed anew,
and where one request alone does not fit, all are failed. Here a request is admitted, and a block given, only while all
that live can still end one after another (`kvcache/storage/admission.py`); the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache, group_layers_by_attn_type
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import find_num_key_value_heads

from elastic.engines.continuous.admission_ledger import AdmissionLedger
from elastic.engines.continuous.allocators import ALLOCATORS
from elastic.engines.continuous.attention_inputs import RequestTokens
from elastic.engines.continuous.request_slice import RequestSlice
from elastic.engines.continuous.sector_pool import SectorPool
from elastic.errors import CapacityError, Overloaded
from elastic.kvcache.storage.paged import BlockGroup, BlockMemory
from elastic.kvcache.storage.pool import KVPool

RETRY_AFTER_S = 5.0
"""For a request that the limit has no room for: somebody lowered it, and may raise it again."""


class ElasticPagedCache(PagedAttentionCache):  # type: ignore[misc]
    """Used by one engine's thread; the runtime's worker takes idle sectors. Both hold the lock of its memory."""

    def __init__(
        self,
        config: Any,
        kv: KVPool,
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_tokens: int,
        max_batch_tokens: int,
        share_prefixes: bool = True,
    ) -> None:
        # Not the stock __init__, which allocates: what the other parts of continuous batching read is set here.
        self.config, self.dtype, self.device = config, dtype, device
        self.max_batch_tokens = max_batch_tokens
        self.cache_allocators = {
            kind: ALLOCATORS[kind](
                index=index,
                config=config,
                num_key_value_heads=find_num_key_value_heads(config),
                cache_dtype=dtype,
                page_size=block_tokens,
                layer_indices=layers,
                allow_block_sharing=share_prefixes,
            )
            for index, (kind, layers) in enumerate(group_layers_by_attn_type(config).items())
        }
        self._allocators = list(self.cache_allocators.values())
        self.layer_to_allocator = {i: allocator for allocator in self._allocators for i in allocator.layer_indices}
        self.ledger = AdmissionLedger(self._allocators)
        self._providing = False
        with kv.lock:  # nobody asks the ledger before its allocators have memory
            self.memory = BlockMemory(
                kv,
                [BlockGroup(tuple(a.layer_indices), a.bytes_per_page) for a in self._allocators],
                promised=self.ledger.promised_sectors,
                reusable=self.ledger.reusable_sectors,
                give_up_reusable=lambda sectors: self._evict_all(),
            )
            self.pool = SectorPool(self.memory, self.ledger.sectors_changed)
            for ranges, allocator in zip(self.memory.groups, self._allocators, strict=True):
                allocator.use(ranges, self.pool)
        self.bytes_per_sector, self.num_sectors = self.memory.sector_bytes, self.memory.sectors
        self.num_blocks = max(allocator.num_blocks for allocator in self._allocators)
        self.allow_block_sharing = share_prefixes
        self.use_prefix_sharing = all(allocator.use_block_sharing for allocator in self._allocators)
        self.max_blocks_per_request = self.max_decode_fast_path_length = 0  # of a kernel that flash attention has
        self.max_tokens_read = 0  # of index tensors that are not used here
        self.read_cache_limit = None
        self._batch: list[RequestTokens] = []
        self._slices: dict[tuple[int, int], RequestSlice] = {}
        self.refused = False
        """Whether a request found no room in this step. New ones wait then: they would only take the room of those
        that live, and of those before them in the queue."""

    # -- admission

    def expect(self, request: str, tokens: int) -> None:
        """Announce a request of so many tokens at the most: from now on weights leave the room that it needs alone.

        Raises `CapacityError` for one that never fits, `Overloaded` for one that does not while the limit is as it is.
        """
        with self.memory.lock:
            if request in self.ledger.most_tokens:
                return
            kv, needed = self.memory.kv, self.ledger.sectors_for(tokens) * self.memory.sector_pages
            size, maximum = kv.pool.page_bytes, kv.limits.maximum
            if needed > maximum:
                raise kv.pool.shortage(
                    f"a request of {tokens} tokens never fits the KV cache on {kv.pool.name}; shorten it, or give the "
                    "place a larger budget",
                    needed,
                    free=maximum,
                    total=maximum,
                )
            if needed > kv.limits.limit:
                raise Overloaded(
                    f"a request of {tokens} tokens needs {needed * size:,} bytes of KV cache on {kv.pool.name}, where "
                    f'the limit is {kv.limits.limit * size:,} now: raise it, kv.resize("max") to all there is, or '
                    "shorten the request",
                    retry_after_s=RETRY_AFTER_S,
                )
            self.ledger.announce(request, tokens)

    def begin_step(self) -> None:
        """Begin to put the next batch together."""
        self._batch, self._slices, self.refused = [], {}, False

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        """Give a request the blocks for its next tokens if it may have them; return whether it has them."""
        with self.memory.lock:
            name, allocators = state.request_id, self._allocators
            needed = [a.needs_new_blocks(name, state.current_len(), request_len) for a in allocators]
            new = not any(name in a.block_table for a in allocators)
            if new and self.refused:
                return False
            if not any(needed):
                return True
            if not self.ledger.is_safe(name, needed, self.memory.room(growing=not new)) or not self._provide(needed):
                self.refused = True
                return False
            for allocator in allocators:
                allocator.allocate_cache_to_request(name, state.current_len(), request_len)
            self.ledger.changed(name)
            return True

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Count the tokens at the beginning that the cache holds; they are the request's too, if it is admitted."""
        with self.memory.lock:
            if self.refused:
                return 0
            length: int = super().search_prefix_match(request_id, prompt_ids)
            self.ledger.reusable_changed()
            room = self.memory.room(growing=False) if length else 0
            if length and not self.ledger.is_safe(request_id, self.ledger.none, room):
                super().free_blocks(request_id)
                self.refused, length = True, 0
            self.ledger.changed(request_id)
            return length

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Have a request end: its blocks are free, or kept for reuse."""
        with self.memory.lock:
            super().free_blocks(request_id, no_cache)
            self.pool.try_to_free_sectors()
            self.ledger.end(request_id)

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Let other requests share the blocks that are full."""
        with self.memory.lock:
            super().mark_complete_blocks(state, complete_blocks)
            self.ledger.changed(state.request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Have all requests end, and keep no block for reuse."""
        with self.memory.lock:
            super().free_all_requests(clear_ledgers)
            self._evict_all()

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Return what is free, in bytes or as a share."""
        with self.memory.lock:
            free = self.memory.room(growing=False) * self.memory.sector_bytes
            return free / (self.num_sectors * self.memory.sector_bytes) if relative else free

    def close(self) -> None:
        """Give the memory back."""
        with self.memory.lock:
            self._slices = {}
            for allocator in self._allocators:
                allocator.layers = {}
            self.memory.close()

    # -- the forward pass

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: list[list[int]]
    ) -> None:
        """Add a request to the batch. What it reads is passed to attention in another way."""
        start = self._batch[-1].start + self._batch[-1].count if self._batch else 0
        self._batch.append(RequestTokens(request_id, past_length, start, query_length))
        super().extend_read_and_write_indices(request_id, past_length, query_length, None, write_index)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse other attention functions. Raises `ConfigError`."""
        return self.of_requests(0, len(self._batch)).update(*args, **kwargs)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        write_index: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Attend in one layer. query: [1, heads, new, dim], key and value: [1, kv_heads, new, dim].

        Returns [1, new, heads, dim]. All of them travel if the layer computes on another device than the blocks are.
        """
        whole = self.of_requests(0, len(self._batch))
        return whole.attend(layer, query, key, value, scaling, write_index)

    def new_tokens(self) -> list[int]:
        """Count the new tokens of each request of the batch, in order."""
        return [request.count for request in self._batch]

    def of_requests(self, start: int, stop: int) -> RequestSlice:
        """Return the cache as these requests of the batch see it, the same one throughout a step."""
        if (start, stop) not in self._slices:
            self._slices[start, stop] = RequestSlice(self, self._batch[start:stop])
        return self._slices[start, stop]

    # -- inside, under the lock

    def _provide(self, needed: Sequence[int]) -> bool:
        """Have so many free blocks of each kind, from blocks kept for reuse or from new sectors."""
        self._providing = True  # what is free for this request now is not for another kind of layers
        try:
            for count, allocator in zip(needed, self._allocators, strict=True):
                self._evict(allocator, count - self.pool.count_free_blocks(allocator.index))
                missing = count - self.pool.count_free_blocks(allocator.index)
                for _ in range(-(-missing // allocator.blocks_per_sector)):
                    self.pool.allocate_sector(allocator.index)
        except CapacityError:  # others were faster: the request waits
            return False
        finally:
            self._providing = False
        return True

    def _evict(self, allocator: Any, count: int) -> None:
        """Give up blocks kept for reuse, the oldest first."""
        ledger = allocator.ledger
        victims = list(ledger.cached_blocks)[: max(0, count)]
        for block in victims:
            del ledger.cached_blocks[block]
            del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
        self.pool.free_blocks(allocator.index, victims)
        self.ledger.reusable_changed()

    def _evict_all(self) -> None:
        """Give up all blocks kept for reuse, and the sectors that they alone held."""
        for allocator in self._allocators:
            self._evict(allocator, len(allocator.ledger.cached_blocks))
        if not self._providing:
            self.pool.try_to_free_sectors()
