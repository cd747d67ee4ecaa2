"""transformers' paged cache on elastic pages: its capacity is what the ledger says at any moment.

The stock cache is one tensor of a fixed size; where it has no block left, requests are thrown out and computed anew,
and where one request alone does not fit, all are failed. Here a request is admitted, and a block given, only while all
that live can still end one after another (`kvcache/storage/admission.py`); the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache, group_layers_by_attn_type
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import find_num_key_value_heads

from elastic.engines.continuous.allocators import ALLOCATORS
from elastic.engines.continuous.attention_inputs import RequestTokens
from elastic.engines.continuous.request_slice import RequestSlice
from elastic.engines.continuous.sector_pool import SectorPool
from elastic.errors import CapacityError, Overloaded
from elastic.kvcache.storage.admission import RequestDemand, reserved_sectors
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool

RETRY_AFTER_S = 5.0
"""What a request is told that the limit has no room for: somebody lowered it, and may raise it again."""


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
        self.cache_allocators = _allocators(config, dtype, block_tokens, share_prefixes)
        self.layer_to_allocator = {i: a for a in self.cache_allocators.values() for i in a.layer_indices}
        self.memory = BlockMemory(kv, [a.group() for a in self.cache_allocators.values()])
        self.memory.give_up_reusable = self._evict_all
        self.memory.reusable = self._count_reusable
        self.memory.promised = self._promised_sectors
        self.pool = SectorPool(self.memory)
        self.pool.on_change = self._sectors_changed
        for ranges, allocator in zip(self.memory.groups, self.cache_allocators.values(), strict=True):
            allocator.use(ranges, self.pool)
        self.bytes_per_sector, self.num_sectors = self.memory.sector_bytes, self.memory.sectors
        self.num_blocks = max(a.num_blocks for a in self.cache_allocators.values())
        self.allow_block_sharing = share_prefixes
        self.use_prefix_sharing = all(a.use_block_sharing for a in self.cache_allocators.values())
        self.max_blocks_per_request = self.max_decode_fast_path_length = 0  # of a kernel that flash attention has
        self.max_tokens_read = 0  # of index tensors that are not used here
        self.read_cache_limit = None
        self._most: dict[str, int] = {}  # request -> the most tokens that it will hold
        self._waiting: set[str] = set()  # those of them that hold nothing yet
        self._largest: int | None = 0  # tokens of the largest of these; None: to be found again
        self._known: dict[str, RequestDemand] = {}  # request -> its claim, until its blocks change
        self._known_at = 0
        self._reusable: list[int] | None = None  # by allocator, until blocks change
        self._promised: int | None = 0  # sectors, until blocks or sectors change
        self._providing = False
        self._parts: list[RequestTokens] = []
        self._seen: dict[tuple[int, int], RequestSlice] = {}
        self.refused = False
        """Whether a request found no room in this step. New ones wait then: they would only take the room of those
        that live, and of those before them in the queue."""

    # -- admission

    def sectors_for(self, tokens: int) -> int:
        """The sectors that one request of so many tokens needs for itself."""
        claim = RequestDemand(self._none, self._blocks(tokens))
        return reserved_sectors([claim], self._none, self._sizes)

    def expect(self, request: str, tokens: int) -> None:
        """A request will hold so many tokens at the most: from now on weights leave the room that it needs alone.

        Raises `CapacityError` for one that never fits, `Overloaded` for one that does not while the limit is as it is.
        """
        with self.memory.lock:
            if request in self._most:
                return
            kv, needed = self.memory.kv, self.sectors_for(tokens) * self.memory.sector_pages
            size, maximum = kv.pool.page_bytes, kv.limits.maximum
            if needed > maximum:
                raise CapacityError(
                    f"a request of {tokens} tokens never fits the KV cache on {kv.pool.name}; shorten it, or give the "
                    "place a larger budget",
                    requested_bytes=needed * size,
                    free_bytes=maximum * size,
                    total_bytes=maximum * size,
                )
            if needed > kv.limits.limit:
                raise Overloaded(
                    f"a request of {tokens} tokens needs {needed * size:,} bytes of KV cache on {kv.pool.name}, where "
                    f'the limit is {kv.limits.limit * size:,} now: raise it, kv.resize("max") to all there is, or '
                    "shorten the request",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._most[request] = tokens
            self._waiting.add(request)
            self._largest = self._promised = None

    def begin_step(self) -> None:
        """The next batch is put together."""
        self._parts, self._seen, self.refused = [], {}, False

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        """Whether a request may have the blocks for its next tokens; it has them then."""
        with self.memory.lock:
            name, allocators = state.request_id, self.cache_allocators.values()
            needed = [a.needs_new_blocks(name, state.current_len(), request_len) for a in allocators]
            new = not any(name in a.block_table for a in allocators)
            if new and self.refused:
                return False
            if not any(needed):
                return True
            if not self._safe(name, needed, new=new) or not self._provide(needed):
                self.refused = True
                return False
            for allocator in allocators:
                allocator.allocate_cache_to_request(name, state.current_len(), request_len)
            self._changed(name)
            return True

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Tokens at the beginning that the cache holds; they are the request's too, if it can be admitted."""
        with self.memory.lock:
            if self.refused:
                return 0
            length: int = super().search_prefix_match(request_id, prompt_ids)
            self._reusable = None
            if length and not self._safe(request_id, self._none, new=True):
                super().free_blocks(request_id)
                self.refused, length = True, 0
            if length:
                self._changed(request_id)
            self._known.pop(request_id, None)
            self._reusable = self._promised = None
            return length

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        with self.memory.lock:
            super().free_blocks(request_id, no_cache)
            self._most.pop(request_id, None)
            self.pool.try_to_free_sectors()
            self._changed(request_id)

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        with self.memory.lock:
            super().mark_complete_blocks(state, complete_blocks)
            self._changed(state.request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        with self.memory.lock:
            super().free_all_requests(clear_ledgers)
            self._evict_all()

    def compute_free_capacity(self, relative: bool = True) -> float:
        """What is free, in bytes or as a share."""
        with self.memory.lock:
            free = self.memory.room(growing=False) * self.memory.sector_bytes
            return free / (self.num_sectors * self.memory.sector_bytes) if relative else free

    def close(self) -> None:
        """Give the memory back."""
        with self.memory.lock:
            self._seen = {}
            for allocator in self.cache_allocators.values():
                allocator.drop()
            self.memory.close()

    # -- the forward pass

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: list[list[int]]
    ) -> None:
        """One more request of the batch. What it reads is told to attention in another way."""
        start = self._parts[-1].start + self._parts[-1].count if self._parts else 0
        self._parts.append(RequestTokens(request_id, past_length, start, query_length))
        super().extend_read_and_write_indices(request_id, past_length, query_length, None, write_index)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Asked by other attention functions. Raises `ConfigError`."""
        return self.of_requests(0, len(self._parts)).update(*args, **kwargs)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        write_index: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Attention of one layer. Query [1, heads, new, dim], key and value [1, kv_heads, new, dim].

        Returns [1, new, heads, dim]. All of them travel if the layer computes on another device than the blocks are.
        """
        whole = self.of_requests(0, len(self._parts))
        return whole.attend(layer, query, key, value, scaling, write_index)

    def new_tokens(self) -> list[int]:
        """Of each request of the batch, in order."""
        return [part.count for part in self._parts]

    def of_requests(self, start: int, stop: int) -> RequestSlice:
        """The cache as these requests of the batch see it, the same one throughout a step."""
        if (start, stop) not in self._seen:
            self._seen[start, stop] = RequestSlice(self, self._parts[start:stop])
        return self._seen[start, stop]

    # -- inside, under the lock

    def _safe(self, request: str, needed: Sequence[int], *, new: bool) -> bool:
        """Whether all that live could still end one after another if a request got some blocks."""
        claims = [*self._claims(but=request), self._claim(request, needed)]
        free = [f - n for f, n in zip(self._free_blocks(), needed, strict=True)]
        return reserved_sectors(claims, free, self._sizes) <= self.memory.room(growing=not new)

    def _provide(self, needed: Sequence[int]) -> bool:
        """Have so many free blocks of each kind, from blocks kept for reuse or from new sectors."""
        self._providing = True  # what is free for this request now is not for another kind of layers
        try:
            for count, allocator in zip(needed, self.cache_allocators.values(), strict=True):
                self._evict(allocator, count - self.pool.count_free_blocks(allocator.index))
                missing = count - self.pool.count_free_blocks(allocator.index)
                for _ in range(-(-missing // allocator.blocks_per_sector)):
                    self.pool.allocate_sector(allocator.index)
        except CapacityError:  # others were faster: the request waits
            return False
        finally:
            self._providing = False
        return True

    def _claims(self, but: str = "") -> list[RequestDemand]:
        version = sum(a.ledger.version for a in self.cache_allocators.values())
        if version != self._known_at:
            self._known, self._known_at = {}, version
        names = {name for a in self.cache_allocators.values() for name in a.block_table}
        for name in names - self._known.keys():
            self._known[name] = self._claim(name, self._none)
        return [self._known[name] for name in names if name != but]

    def _claim(self, request: str, more: Sequence[int]) -> RequestDemand:
        """Of a request that gets `more` blocks."""
        held, needed, shared = [], [], []
        most = self._blocks(self._most[request])
        for a, extra, total in zip(self.cache_allocators.values(), more, most, strict=True):
            table = a.block_table.get(request, ())
            shared.append(frozenset(block for block in table if block in a.ledger.shared_ref_counts))
            held.append(len(table) - len(shared[-1]) + extra)
            needed.append(max(0, total - len(table) - extra))
        return RequestDemand(tuple(held), tuple(needed), tuple(shared))

    def _largest_waiting(self) -> int:
        if self._largest is None:
            self._largest = max((self._most[name] for name in self._waiting), default=0)
        return self._largest

    def _changed(self, request: str) -> None:
        """The blocks of a request are not what they were."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._largest = None
        self._known.pop(request, None)
        self._reusable = self._promised = None

    def _sectors_changed(self) -> None:
        self._promised = None

    def _promised_sectors(self) -> int:
        """That live requests must still get, or the largest waiting one, alone."""
        if self._promised is None:
            promised = reserved_sectors(self._claims(), self._free_blocks(), self._sizes)
            used = self.memory.used_pages // self.memory.sector_pages
            self._promised = max(promised, self.sectors_for(self._largest_waiting()) - used)
        return self._promised

    def _reusable_sectors(self) -> list[int]:
        if self._reusable is None:
            self._reusable = [a.reusable_sectors() for a in self.cache_allocators.values()]
        return self._reusable

    def _count_reusable(self) -> int:
        return sum(self._reusable_sectors())

    def _blocks(self, tokens: int) -> tuple[int, ...]:
        return tuple(a._compute_blocks_needed(0, tokens, 0) for a in self.cache_allocators.values())

    def _free_blocks(self) -> list[int]:
        """In sectors that live requests need, blocks kept for reuse included."""
        return [
            self.pool.count_free_blocks(a.index) + len(a.ledger.cached_blocks) - reusable * a.blocks_per_sector
            for a, reusable in zip(self.cache_allocators.values(), self._reusable_sectors(), strict=True)
        ]

    def _evict(self, allocator: Any, count: int) -> None:
        """Give up blocks kept for reuse, the oldest first."""
        ledger = allocator.ledger
        victims = list(ledger.cached_blocks)[: max(0, count)]
        for block in victims:
            del ledger.cached_blocks[block]
            del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
        self.pool.free_blocks(allocator.index, victims)
        self._reusable = self._promised = None

    def _evict_all(self) -> None:
        for allocator in self.cache_allocators.values():
            self._evict(allocator, len(allocator.ledger.cached_blocks))
        if not self._providing:
            self.pool.try_to_free_sectors()

    @property
    def _sizes(self) -> list[int]:
        return [a.blocks_per_sector for a in self.cache_allocators.values()]

    @property
    def _none(self) -> tuple[int, ...]:
        return (0,) * len(self.cache_allocators)


def _allocators(config: Any, dtype: torch.dtype, block_tokens: int, share_prefixes: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    build: Callable[..., Any]
    for index, (kind, layers) in enumerate(group_layers_by_attn_type(config).items()):
        build = ALLOCATORS[kind]
        made[kind] = build(
            index=index,
            config=config,
            num_key_value_heads=find_num_key_value_heads(config),
            cache_dtype=dtype,
            page_size=block_tokens,
            layer_indices=layers,
            allow_block_sharing=share_prefixes,
        )
    return made
