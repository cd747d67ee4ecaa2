"""The keys and values of all layers in blocks, and the view of them that a forward pass is given.

Sequences write blocks of their own, and blocks that they share are only read. So parts of one batch may attend at the
same time, each in the thread of its place; keys and values stay where the cache is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.engines.executor.attention import attend
from elastic.engines.executor.attention_metadata import AttentionMetadata, MetadataBuilder
from elastic.engines.executor.block_layout import BlockLayout
from elastic.engines.executor.input_batch import BatchTokens, BlockTable, Ints
from elastic.engines.executor.layer_groups import LayerGroup
from elastic.kvcache.storage.sector_space import SectorSpace
from elastic.memory.copy_engine import to_device


class PagedCache:
    """The address space of those of a model's layers whose KV is here. Only mapped blocks may be touched."""

    def __init__(
        self,
        memory: SectorSpace,
        groups: Sequence[LayerGroup],
        tables: Sequence[BlockTable],
        layout: BlockLayout,
        dtype: torch.dtype,
    ) -> None:
        self.device = memory.kv.device
        self.layout = layout
        self.builders = [MetadataBuilder(layout, table, self.device, dtype) for table in tables]
        self.layers: dict[int, tuple[int, torch.Tensor]] = {}
        """Layer -> its group, its elements."""
        assert [group.layers for group in groups] == [ranges.group.layers for ranges in memory.groups]
        self._memory = memory
        self._dtype = dtype
        self.refresh()

    def refresh(self) -> None:
        """Show the layers that are here now, and no others: layers have come or gone. No step is in flight."""
        memory, layers = self._memory, {}
        for index, ranges in enumerate(memory.groups):
            elements = memory.sectors * memory.blocks_per_sector(index) * self.layout.shape.elements
            for layer in ranges.layers:
                layers[layer] = index, ranges.view(layer, self._dtype)[:elements]
        self.layers = layers

    def clear(self, group: int, blocks: Ints) -> None:
        """Fill blocks [count] with zeros in every layer of a group that is here.

        Slots that nobody wrote weigh 0, and 0 times NaN, which bytes of an earlier owner may be, is NaN.
        """
        index = torch.from_numpy(blocks).to(self.device)
        for layer in self._memory.groups[group].layers:
            self.layout.clear(self.layers[layer][1], index)

    def close(self) -> None:
        """Drop the tensors over the memory, which can then be given back."""
        self.layers = {}


class RequestSlice:
    """The cache as consecutive sequences of a batch see it; what a forward pass is given as `cache`."""

    def __init__(self, cache: PagedCache, batch: BatchTokens) -> None:
        self._cache = cache
        self._batch = batch
        self._metadata: dict[int, AttentionMetadata] = {}  # by group of layers
        self._parts: dict[tuple[int, int], RequestSlice] = {}

    def new_tokens(self) -> list[int]:
        """Count the new tokens of each sequence, in order."""
        counts: list[int] = self._batch.counts.tolist()
        return counts

    def of_requests(self, start: int, stop: int) -> RequestSlice:
        """Return the cache as these sequences see it, the same one throughout a step."""
        if (start, stop) == (0, len(self._batch.rows)):
            return self
        if (start, stop) not in self._parts:
            self._parts[start, stop] = RequestSlice(self._cache, self._batch.part(start, stop))
        return self._parts[start, stop]

    def prepare(self) -> None:
        """Make what all layers need of the batch, for steps that may go on while tables change."""
        for group in {group for group, _ in self._cache.layers.values()}:
            self.metadata(group)

    def metadata(self, group: int) -> AttentionMetadata:
        """Make what the layers of a group need of the batch."""
        made = self._metadata[group] = self._cache.builders[group].build(self._batch)
        return made

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attend in one layer. query: [1, heads, new, dim], key and value: [1, kv_heads, new, dim], on any device.

        Returns [1, new, heads, dim]. All of them travel if the layer computes on another device than the blocks are.
        """
        cache = self._cache
        group, elements = cache.layers[layer]
        batch = self._metadata.get(group) or self.metadata(group)
        if query.device == cache.device:
            return attend(query[0], key[0], value[0], elements, cache.layout, batch, scaling)[None]
        q, k, v = (to_device(states[0], cache.device) for states in (query, key, value))
        return attend(q, k, v, elements, cache.layout, batch, scaling)[None].to(query.device)
