"""Address space for the blocks of one engine on one place: a range per layer, in which sectors are mapped.

A block holds some tokens of one request, in each layer of a group (all layers of one kind of attention). Sectors are
what pages come and go in: as many blocks as make whole pages in every layer. Where all layers are here, sectors of all
groups are of the same size, so a sector that one no longer needs another may have (docs/design.md). Which layers are
here may change: sectors and blocks keep their numbers, and a sector has pages in the layers that are here.

Where decoder layers are cut, what is called a layer here is one part of the KV heads of one, numbered
`layer * kv_shards + part`. Parts have blocks and pages of their own, and come and go each by itself: no byte of another
one moves. Those of a decoder layer lie one behind another in its range, so that attention reads them at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from elastic.errors import IntegrityError, StateError
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.backends.base import runs
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.memory.pages.virtual_range import VirtualRange, map_all, unmap_all

Sector = tuple[int, int]
"""(group, sector)."""
Part = tuple[VirtualRange, int, int]
"""(range, first slot, slots)."""


@dataclass(frozen=True)
class BlockGroup:
    """Layers whose caches grow together."""

    layers: tuple[int, ...]
    block_bytes: int
    """Of one block in one layer: keys and values."""
    kv_shards: int = 1
    """In how many parts a decoder layer is: so many of `layers` share an address range."""


def sector_layer_pages(groups: Sequence[BlockGroup], page_bytes: int) -> list[int]:
    """Count, for each group, the pages that a sector has in one layer.

    They are the fewest that hold whole blocks, and whole pages, in every layer of every group.
    """
    group_bytes = (len(group.layers) * math.lcm(group.block_bytes, page_bytes) for group in groups)
    sector_pages = math.lcm(*group_bytes) // page_bytes
    return [sector_pages // len(group.layers) for group in groups]


class GroupRanges:
    """The memory of one group: in each layer that is here the same sectors are mapped."""

    def __init__(self, kv: KVPool, group: BlockGroup, sectors: int, layer_pages: int) -> None:
        """Have no layer here yet."""
        self.group = group
        self.layer_pages = layer_pages
        self.layers: tuple[int, ...] = ()
        """Those that are here, in order."""
        self.sector_pages = 0
        """Pages of a sector in these layers."""
        self.mapped: dict[int, None] = {}  # sector ids, as a set in order
        self._kv = kv
        self._slots = sectors * layer_pages
        self._ranges: dict[int, tuple[VirtualRange, MappedStorage]] = {}  # of decoder layers that are here, or were

    def view(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """View all address space of a layer as [elements] of `dtype`. Only mapped sectors may be written.

        Raises `StateError` for a layer that is not here.
        """
        if layer not in self.layers:
            raise StateError(f"the KV cache of layer {layer} is not here; those of layers {self.layers} are")
        decoder_layer, part = divmod(layer, self.group.kv_shards)
        return self.view_parts(decoder_layer, dtype).view(self.group.kv_shards, -1)[part]

    def view_parts(self, decoder_layer: int, dtype: torch.dtype) -> torch.Tensor:
        """View the address space of all parts of a decoder layer, [elements], one behind another; some are here."""
        return self._ranges[decoder_layer][1].tensor(dtype)

    def map(self, sector: int, pages: Sequence[int]) -> None:
        """Map a sector in every layer, or in none. Raises `CapacityError`."""
        map_parts(self.parts(self.layers, (sector,)), pages)
        self.mapped[sector] = None

    def unmap(self, sector: int) -> list[int]:
        """Take a sector out of every layer, or of none; return its pages."""
        pages = unmap_all(self.parts(self.layers, (sector,)))
        del self.mapped[sector]
        return pages

    def pages_of(self, sector: int, layers: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return the pages of a mapped sector in layers that are here, None: in all; those of the first layer first."""
        chosen = self.layers if layers is None else layers
        return tuple(page for layer in chosen for page in self.layer_pages_of(layer, sector))

    def layer_pages_of(self, layer: int, sector: int) -> tuple[int, ...]:
        """Return the pages of a mapped sector in a layer that is here, in order."""
        layer_range, start = self._range(layer)
        slots = range(start + sector * self.layer_pages, start + (sector + 1) * self.layer_pages)
        return tuple(map(layer_range.slots.__getitem__, slots))

    def parts(self, layers: Iterable[int], sectors: Collection[int]) -> Iterator[Part]:
        """List where sectors lie in layers, which have a range, consecutive ones together."""
        stretches = runs(sorted(sectors))
        for layer in layers:
            layer_range, start = self._range(layer)
            for first, count in stretches:
                yield layer_range, start + first * self.layer_pages, count * self.layer_pages

    def set_layers(self, layers: Collection[int]) -> None:
        """Have these be here, whose sectors are mapped, and no others, whose are not."""
        for layer in layers:
            self._range(layer)
        self.layers = tuple(layer for layer in self.group.layers if layer in layers)
        self.sector_pages = len(self.layers) * self.layer_pages

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        for decoder_layer, (layer_range, _) in self._ranges.items():
            for part in range(self.group.kv_shards):
                layer = decoder_layer * self.group.kv_shards + part
                shown = sum(slot // self._slots == part for slot in layer_range.slots)
                sectors = len(self.mapped) if layer in self.layers else 0
                if shown != sectors * self.layer_pages:
                    raise IntegrityError(f"layer {layer} shows {shown} pages of {sectors} sectors")

    def close(self) -> None:
        """Give everything back: no layer is here then."""
        for layer_range, storage in self._ranges.values():
            storage.drop()
            layer_range.close()
        self.set_layers(())
        self.mapped.clear()

    def _range(self, layer: int) -> tuple[VirtualRange, int]:
        """Return the range that a layer is in, and the first of its slots.

        The range is reserved when a part of the decoder layer comes here for the first time.
        """
        decoder_layer, part = divmod(layer, self.group.kv_shards)
        if decoder_layer not in self._ranges:
            readable = self._kv.device.type == "cpu"  # so that printing a tensor over it does not crash
            slots = self.group.kv_shards * self._slots
            new = VirtualRange(self._kv.pool, slots, readable_gaps=readable)
            self._ranges[decoder_layer] = new, new.storage(0, slots * self._kv.pool.page_bytes, lambda: None)
        return self._ranges[decoder_layer][0], part * self._slots


class SectorSpace:
    """The sectors of one engine in the layers that are on one place. Guarded by the lock of its KV pool, `lock`."""

    def __init__(self, kv: KVPool, groups: Sequence[BlockGroup], sectors: int) -> None:
        """Reserve addresses for so many sectors; no layer is here yet."""
        self.kv = kv
        self.lock = kv.lock
        self.sectors = sectors
        """How many numbers there are: sectors of all groups together are never more."""
        sizes = sector_layer_pages(groups, kv.pool.page_bytes)
        self.groups = [GroupRanges(kv, group, sectors, size) for group, size in zip(groups, sizes, strict=True)]
        self._group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}

    @property
    def layers(self) -> tuple[int, ...]:
        """Those whose KV is here."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    @property
    def sector_pages(self) -> int:
        """Pages that a sector has here: where groups have several sizes, the largest; 0 without a layer."""
        return max(group.sector_pages for group in self.groups)

    @property
    def mapped_count(self) -> int:
        """Sectors that are mapped."""
        return sum(len(group.mapped) for group in self.groups)

    @property
    def mapped_pages(self) -> int:
        """Pages of all mapped sectors."""
        return sum(len(group.mapped) * group.sector_pages for group in self.groups)

    @property
    def mapped_sectors(self) -> tuple[Sector, ...]:
        """Those that are mapped, with the group that has each."""
        return tuple((index, sector) for index, group in enumerate(self.groups) for sector in group.mapped)

    def group_of(self, layer: int) -> int:
        """Return the group of a layer, wherever its KV is. Raises `StateError` for one that the model has not."""
        if layer not in self._group_of:
            raise StateError(f"there is no layer {layer}; blocks are of layers {sorted(self._group_of)}")
        return self._group_of[layer]

    def blocks_per_sector(self, group: int) -> int:
        """Count the blocks that a sector has in each layer of a group."""
        ranges = self.groups[group]
        return ranges.layer_pages * self.kv.pool.page_bytes // ranges.group.block_bytes

    def layer_pages(
        self, layers: Iterable[int], sectors: Iterable[Sector] | None = None
    ) -> dict[int, dict[int, tuple[int, ...]]]:
        """Return, for each of these layers, the pages of each mapped sector, or of these, which are mapped.

        Raises `StateError` if a layer is not here.
        """
        with self.lock:
            chosen = self._require(layers, present=True)
            wanted = self.mapped_sectors if sectors is None else tuple(sectors)
            pages = {}
            for layer in chosen:
                index = self._group_of[layer]
                group = self.groups[index]
                pages[layer] = {sector: group.layer_pages_of(layer, sector) for g, sector in wanted if g == index}
            return pages

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        for group in self.groups:
            group.check()

    # -- inside, under the lock

    def _require(self, layers: Iterable[int], *, present: bool) -> frozenset[int]:
        """Return layers that are here, or that are not. Raises `StateError` for others."""
        chosen = frozenset(layers)
        wrong = sorted(layer for layer in chosen if (layer in self.groups[self.group_of(layer)].layers) is not present)
        if wrong:
            where = "not here" if present else "here already"
            raise StateError(f"the KV cache of layers {wrong} is {where}; here is that of layers {self.layers}")
        return chosen

    def _size_with(self, layers: frozenset[int]) -> int:
        """Count the pages that a sector has with these layers too: `sector_pages` once they are here."""
        return max(g.sector_pages + len(layers.intersection(g.group.layers)) * g.layer_pages for g in self.groups)

    def _growth_with(self, layers: frozenset[int]) -> int:
        """Count the pages that the mapped sectors need in these layers."""
        return sum(len(g.mapped) * len(layers.intersection(g.group.layers)) * g.layer_pages for g in self.groups)

    def _put_in(self, layers: Collection[int], pages: Sequence[int]) -> None:
        """Map all mapped sectors in layers that come here, all or none. Raises `CapacityError`."""
        chosen = [(g, [layer for layer in g.group.layers if layer in layers]) for g in self.groups]
        map_parts((part for g, new in chosen for part in g.parts(new, g.mapped)), pages)
        for g, new in chosen:
            g.set_layers({*g.layers, *new})

    def _take_out(self, layers: Collection[int]) -> list[int]:
        """Unmap all sectors in layers that leave, all or none; return their pages."""
        chosen = [(g, [layer for layer in g.layers if layer in layers]) for g in self.groups]
        pages = unmap_all(part for g, old in chosen for part in g.parts(old, g.mapped))
        for g, old in chosen:
            g.set_layers({*g.layers} - {*old})
        return pages


def map_parts(parts: Iterable[Part], pages: Sequence[int]) -> None:
    """Show pages in parts of ranges, one after another; all or none. Raises `CapacityError`."""

    def with_pages() -> Iterator[tuple[VirtualRange, int, Sequence[int]]]:
        done = 0
        for layer_range, slot, count in parts:
            yield layer_range, slot, pages[done : done + count]
            done += count

    map_all(with_pages())
