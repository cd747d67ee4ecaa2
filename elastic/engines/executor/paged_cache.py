"""The keys and values of all layers in blocks, and the view of them that a forward pass is given.

Sequences write blocks of their own, and blocks that they share are only read. So parts of one batch may attend at the
same time, each in the thread of its place; keys and values stay where the cache is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import pad

from elastic.engines.core.block_pool import BlockMoves
from elastic.engines.executor.attention import BlockAttention
from elastic.engines.executor.attention_metadata import AttentionMetadata, MetadataBuilder
from elastic.engines.executor.block_layout import BlockLayout, CacheParts
from elastic.engines.executor.input_batch import BatchBlockTable, BatchTokens, Ints
from elastic.engines.executor.kernels.paged_attention import compiled_attention
from elastic.errors import ConfigError, StateError
from elastic.kvcache.score_terms import ScoreTerms
from elastic.kvcache.storage.sector_space import SectorSpace
from elastic.memory.backends.streams import finish_current_stream, finish_queued_work
from elastic.memory.copy_engine import to_device
from elastic.planning.sharding.heads import heads_of, kv_parts

Heads = slice | torch.Tensor
"""Which heads of a tensor."""


@dataclass(frozen=True)
class HeadChoice:
    """The heads that are attended for in a layer."""

    parts: CacheParts
    """Of the layer's cache, with all keys and values for it."""
    kv: Heads
    """Those of the keys and values that are in these parts."""
    query: Heads
    own: torch.Tensor | None = None
    """Those of `query` that were asked for, where others are computed along; None: all."""


@dataclass(frozen=True)
class CachedLayer:
    """The cache of one decoder layer."""

    group: int
    elements: torch.Tensor
    """Of all of its parts, one behind another."""
    parts: tuple[int, ...]
    """Those that are here."""
    choices: dict[tuple[tuple[int, ...] | None, int, int], HeadChoice] = field(default_factory=dict)
    """What was attended for: shards, of how many, of how many query heads."""


class PagedCache:
    """The address space of those of a model's layers whose KV is here. Only mapped blocks may be touched."""

    def __init__(
        self,
        memory: SectorSpace,
        tables: Sequence[BatchBlockTable],
        layout: BlockLayout,
        dtype: torch.dtype,
    ) -> None:
        self.device = memory.kv.device
        self.layout = layout
        self.kv_shards = memory.groups[0].group.kv_shards
        """Parts of a layer's cache."""
        kernel = compiled_attention(layout, dtype, self.device)
        self.attention = BlockAttention(layout, kernel)
        self.builders = [
            MetadataBuilder(layout, table, self.device, dtype, self.kv_shards, compiled=kernel is not None)
            for table in tables
        ]
        self.layers: dict[int, CachedLayer] = {}
        """By decoder layer."""
        self._memory, self._tables = memory, tables
        self._dtype = layout.stored or dtype
        self._part_blocks = [memory.sectors * memory.blocks_per_sector(group) for group in range(len(memory.groups))]
        self._parts: dict[tuple[int, tuple[int, ...]], CacheParts] = {}  # group, parts
        self.refresh()

    def refresh(self) -> None:
        """Show the layers that are here now, and no others: layers have come or gone.

        Steps may be in flight in layers that stay.
        """
        layers: dict[int, CachedLayer] = {}
        for index, ranges in enumerate(self._memory.groups):
            parts_here: dict[int, list[int]] = {}
            for number in ranges.layers:
                parts_here.setdefault(number // self.kv_shards, []).append(number % self.kv_shards)
            size = self.kv_shards * self._part_blocks[index] * self.layout.block_elements
            for layer, parts in parts_here.items():
                elements = ranges.view_parts(layer, self._dtype)[:size]
                layers[layer] = CachedLayer(index, elements, tuple(parts))
        self.layers = layers

    def clear(self, group: int, blocks: Ints) -> None:
        """Fill blocks [count] with zeros in every layer of a group that is here.

        Slots that nobody wrote weigh 0, and 0 times NaN, which bytes of an earlier owner may be, is NaN.
        """
        for elements, index in self._places(group, blocks):
            elements.index_fill_(0, index, 0)

    def copy(self, moves: BlockMoves) -> None:
        """Copy what is in blocks to others, in every layer that is here. Returns when it is done."""
        for group, of in enumerate(moves):
            ways = (self._places(group, np.array(blocks, np.int64)) for blocks in ([*of], [*of.values()]))
            for (elements, source), (_, target) in zip(*ways, strict=True):
                elements.index_copy_(0, target, elements.index_select(0, source))
        finish_queued_work(self.device)

    def renumber(self, moves: BlockMoves) -> None:
        """Have rows of the tables have these others."""
        for table, of in zip(self._tables, moves, strict=True):
            if of:
                table.renumber(of)

    def _places(self, group: int, blocks: Ints) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer of a group that is here [blocks, elements], and where in it blocks are, of all its parts."""
        given = torch.from_numpy(blocks).to(self.device)
        indices: dict[tuple[int, ...], torch.Tensor] = {}
        for cached in self.layers.values():
            if cached.group == group:
                index = indices.get(cached.parts)
                if index is None:
                    first = self.parts(group, cached.parts).first_blocks
                    index = indices[cached.parts] = (first[:, None] + given).view(-1)
                yield cached.elements.view(-1, self.layout.block_elements), index

    def parts(self, group: int, parts: tuple[int, ...]) -> CacheParts:
        """Describe parts as they lie in each layer of a group; equal ones by the same object."""
        views = self._parts.get((group, parts))
        if views is None:
            first = torch.tensor(parts, device=self.device) * self._part_blocks[group]
            views = self.layout.parts(first)
            finish_current_stream(self.device)  # threads of other places may read them before this one is joined
            self._parts[group, parts] = views
        return views

    def choose(self, layer: int, shards: tuple[int, ...] | None, of: int, query_heads: int) -> HeadChoice:
        """Return the heads of a decoder layer that shards attend for; None: all.

        Raises `StateError` where keys and values for them are not here, `ConfigError` for shards that they are not cut
        by.
        """
        cached = self.layers[layer]
        choice = cached.choices.get((shards, of, query_heads))
        if choice is None:
            if of % self.kv_shards and shards is not None:
                raise ConfigError(f"of={of} shards: each layer of this cache has {self.kv_shards} parts")
            numbers = tuple(range(self.kv_shards)) if shards is None else kv_parts(shards, of, self.kv_shards)
            absent = sorted(set(numbers) - set(cached.parts))
            if absent:
                raise StateError(f"parts {absent} of the KV of layer {layer} are not here; {cached.parts} are")
            own = list(range(query_heads)) if shards is None else heads_of(shards, of, query_heads)
            choice = self._choice(self.parts(cached.group, numbers), numbers, own, query_heads)
            finish_current_stream(self.device)
            cached.choices[shards, of, query_heads] = choice
        return choice

    def close(self) -> None:
        """Drop the tensors over the memory, which can then be given back."""
        self.layers = {}

    def _choice(self, parts: CacheParts, numbers: tuple[int, ...], own: list[int], query_heads: int) -> HeadChoice:
        """Choose own query heads: all of the parts' where they would be unequally many for the parts' KV heads."""
        inside = self.layout.shape.heads
        kv = [part * inside + head for part in numbers for head in range(inside)]
        each = query_heads // (self.kv_shards * inside)
        counts = {sum(query // each == head for query in own) for head in kv}
        if own and len(counts) == 1:
            return HeadChoice(parts, self._heads(kv), self._heads(own))
        query = [head * each + i for head in kv for i in range(each)]
        asked = torch.tensor([query.index(head) for head in own], dtype=torch.int64, device=self.device)
        return HeadChoice(parts, self._heads(kv), self._heads(query), asked)

    def _heads(self, heads: list[int]) -> Heads:
        """Return heads in a form that copies nothing where they lie side by side."""
        if heads == list(range(heads[0], heads[0] + len(heads))):
            return slice(heads[0], heads[0] + len(heads))
        return torch.tensor(heads, device=self.device)


class RequestSlice:
    """The cache as consecutive sequences of a batch see it; what a forward pass is given as `cache`."""

    def __init__(self, cache: PagedCache, batch: BatchTokens) -> None:
        self.cache = cache
        """Of all sequences."""
        self.batch = batch
        self._metadata: dict[int, AttentionMetadata] = {}  # by group of layers
        self._parts: dict[tuple[int, int], RequestSlice] = {}

    def new_tokens(self) -> list[int]:
        """Count the new tokens of each sequence, in order."""
        counts: list[int] = self.batch.counts.tolist()
        return counts

    def of_requests(self, start: int, stop: int) -> RequestSlice:
        """Return the cache as these sequences see it, the same one throughout a step."""
        if (start, stop) == (0, len(self.batch.rows)):
            return self
        if (start, stop) not in self._parts:
            some, batch = slice(start, stop), self.batch
            part = BatchTokens(batch.rows[some], batch.starts[some], batch.counts[some])
            self._parts[start, stop] = RequestSlice(self.cache, part)
        return self._parts[start, stop]

    def prepare(self) -> None:
        """Make what all layers need of the batch, for steps that may go on while tables change."""
        for group in {cached.group for cached in self.cache.layers.values()}:
            self.metadata(group)

    def metadata(self, group: int) -> AttentionMetadata:
        """Make what the layers of a group need of the batch."""
        made = self._metadata[group] = self.cache.builders[group].build(self.batch)
        return made

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        shards: tuple[int, ...] | None = None,
        of: int = 1,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        """Attend in one layer. query: [1, heads, new, dim], key and value: [1, kv_heads, new, dim], on any device.

        Values may have fewer elements than keys (MLA): blocks have zeros behind them. `terms` are of all query heads.
        Returns [1, new, heads, value dim]. All of them travel if the layer computes on another device than the blocks
        are. With `shards`, some of the `of` that the layer is cut into, keys and values are written of the parts that
        these need and no others, and what is returned is of their heads (`heads_of`). See `PagedCache.choose`. New
        tokens behind those of the batch (`StepGraphs`) are nobody's: nothing is written of them, and zeros come out.
        """
        cache = self.cache
        cached = cache.layers[layer]
        batch = self._metadata.get(cached.group) or self.metadata(cached.group)
        heads = cache.choose(layer, shards, of, query.shape[1])
        tokens = len(self.batch.positions)
        padding = query.shape[2] - tokens
        q, k, v = (states[0, :, :tokens] for states in (query, key, value))
        if shards is not None:
            q, k, v = q[heads.query], k[heads.kv], v[heads.kv]
        if query.device != cache.device:
            q, k, v = (to_device(states, cache.device) for states in (q, k, v))
        if terms is not None:
            terms = terms.of_heads(heads.query, cache.device)
        fewer = k.shape[-1] - v.shape[-1]
        if fewer:
            v = pad(v, (0, fewer))
        out = cache.attention.attend(q, k, v, cached.elements, heads.parts, batch, scaling, terms)
        if heads.own is not None:
            out = out[:, heads.own]
        if fewer:
            out = out[..., :-fewer]
        if padding:
            out = pad(out, (0, 0, 0, 0, 0, padding))
        return out[None].to(query.device)
