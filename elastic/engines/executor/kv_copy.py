"""Blocks of another engine's memory file, copied into blocks here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from elastic.engines.core.kv_state import KVSource, LayersKV
from elastic.errors import StateError
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.sector_space import SectorSpace
from elastic.memory.backends.shared_file import OpenFile, open_shared
from elastic.memory.backends.streams import finish_queued_work

Pairs = Sequence[tuple[int, int]]
"""Blocks there, and the ones here that get what is in them."""


def changed_blocks(start: int, stop: int, block_tokens: int, window: int | None) -> list[int]:
    """List which blocks of a sequence, counted in its table, the tokens [start, stop) were written to."""
    if stop <= start:
        return []
    if window is None:
        return list(range(start // block_tokens, -(-stop // block_tokens)))
    blocks = -(-min(stop, window) // block_tokens)
    if stop - start >= window:
        return list(range(blocks))
    first, last = (position % window // block_tokens for position in (start, stop - 1))
    if start % window <= (stop - 1) % window:
        return list(range(first, last + 1))
    return sorted({*range(first, blocks), *range(last + 1)})


class BlockCopier:
    """Copies from one open memory file. It holds no lock, and the interpreter's only between two system calls."""

    def __init__(self, memory: BlockMemory, source: KVSource, file: OpenFile, wanted: Callable[[], bool]) -> None:
        """`wanted` is asked again and again; once it is not, `copy` raises `StateError`."""
        self._memory = memory
        self._source = source
        self._file = file
        self._wanted = wanted
        self._sectors = {(sector.group, sector.sector): sector.pages for sector in source.sectors}
        self._sizes = {sector.group: len(sector.pages) for sector in source.sectors}
        finish_queued_work(memory.kv.device)  # what was in the blocks may still be read

    def copy(self, group: int, pairs: Pairs) -> int:
        """Copy blocks in all layers of a group; return bytes. Raises `StateError` where they cannot be read."""
        ranges, nbytes = self._memory.groups[group], self._source.format.block_bytes
        layers = ranges.group.layers
        for first, target, count in _runs(pairs, self._blocks_per_sector(group) if pairs else 1):
            pages, start = self._find(group, first)
            layer_pages = len(pages) // len(layers)
            for i, layer in enumerate(layers):
                if not self._wanted():
                    raise StateError("the blocks that keys and values were copied to were given up")
                pieces = _pieces(pages[i * layer_pages : (i + 1) * layer_pages], self._source.page_bytes, start)
                shown = ranges.view(layer, torch.uint8)[target * nbytes : (target + count) * nbytes]
                _read(self._file, shown, pieces)
        if self._memory.kv.device.type == "cuda":
            torch.cuda.current_stream(self._memory.kv.device).synchronize()
        return len(pairs) * len(layers) * nbytes

    def _blocks_per_sector(self, group: int) -> int:
        layers = len(self._memory.groups[group].group.layers)
        layer_pages = self._sizes.get(group, 0) // layers
        if not layer_pages:
            raise StateError(f"the sectors of group {group} were not told: its blocks cannot be found")
        return layer_pages * self._source.page_bytes // self._source.format.block_bytes

    def _find(self, group: int, block: int) -> tuple[tuple[int, ...], int]:
        """Return the pages of the sector that a block is in, and where in each layer's it begins, in bytes."""
        sector, start = self._source.sector_of(group, block, self._sizes[group])
        pages = self._sectors.get((group, sector))
        if pages is None:
            raise StateError(f"sector {sector} of group {group} was not told: block {block} cannot be found")
        return pages, start


def copy_layers(
    memory: SectorSpace,
    source: LayersKV,
    layers: Iterable[int],
    blocks: Sequence[Sequence[int]] | None = None,
    wanted: Callable[[], bool] = lambda: True,
) -> int:
    """Copy the keys and values of layers from another memory file into the same sectors here; return bytes.

    `blocks`: of each group, those to copy; None: all sectors that are mapped on both sides. Sectors that are not mapped
    there, as blocks which were freed meanwhile are in, are passed over. It may run beside steps, and may be repeated:
    a sector is copied under the lock of the memory, so that it is not unmapped meanwhile. Raises `StateError` where the
    file cannot be read, the form is another, a layer is not on both sides, a block's sector is not mapped here, or once
    it is not `wanted` any more.
    """
    copied = 0
    with open_shared(source.file) as file:
        finish_queued_work(memory.kv.device)  # what was in the blocks may still be read
        for layer in layers:
            group = memory.group_of(layer)
            for first, count in _stretches(memory, source, layer, None if blocks is None else blocks[group]):
                if not wanted():
                    raise StateError(f"the copy of the KV of layer {layer} was given up")
                copied += _copy_stretch(memory, source, file, layer, first, count, must_be_here=blocks is not None)
    if memory.kv.device.type == "cuda":
        torch.cuda.current_stream(memory.kv.device).synchronize()
    return copied


def _stretches(
    memory: SectorSpace, source: LayersKV, layer: int, blocks: Sequence[int] | None
) -> Iterator[tuple[int, int]]:
    """List blocks (first, count) to copy in a layer: no stretch is in two sectors, all are in sectors of the source."""
    group = memory.group_of(layer)
    ranges, size, there = memory.groups[group], memory.blocks_per_sector(group), source.pages.get(layer)
    if there is None:
        raise StateError(f"the KV of layer {layer} is not at its source, which has layers {sorted(source.pages)}")
    if source.format.block_bytes != ranges.group.block_bytes:
        raise StateError(f"blocks there have {source.format.block_bytes} bytes, here {ranges.group.block_bytes}")
    sector_bytes = ranges.layer_pages * memory.kv.pool.page_bytes
    for sector, pages in there.items():
        if len(pages) * source.page_bytes != sector_bytes:
            raise StateError(
                f"sector {sector} has {len(pages) * source.page_bytes} bytes in layer {layer} at its source, here "
                f"{sector_bytes}: both sides need one page_bytes, block_tokens and dtype"
            )
    if blocks is None:
        return iter([(sector * size, size) for sector in sorted(there)])
    pairs = [(block, block) for block in sorted(set(blocks)) if block // size in there]
    return ((first, count) for first, _, count in _runs(pairs, size))


def _copy_stretch(
    memory: SectorSpace, source: LayersKV, file: OpenFile, layer: int, first: int, count: int, *, must_be_here: bool
) -> int:
    """Copy consecutive blocks of one sector in one layer; return bytes, 0 where the sector is not mapped here."""
    group = memory.group_of(layer)
    ranges, nbytes = memory.groups[group], source.format.block_bytes
    sector, place = divmod(first, memory.blocks_per_sector(group))
    with memory.lock:
        target = ranges.view(layer, torch.uint8)
        if sector not in ranges.mapped:
            if must_be_here:
                raise StateError(f"sector {sector} of group {group} is not mapped here: block {first} cannot be copied")
            return 0
        pieces = _pieces(source.pages[layer][sector], source.page_bytes, place * nbytes)
        _read(file, target[first * nbytes : (first + count) * nbytes], pieces)
    return count * nbytes


def _read(file: OpenFile, target: torch.Tensor, pieces: Iterator[tuple[int, int]]) -> None:
    """Read pieces of a file, (offset, most bytes), one after another until the target [bytes] is full."""
    on_host = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
    address, left = on_host.data_ptr(), target.nbytes
    for offset, most in pieces:
        count = min(left, most)
        file.read_into(address, offset, count)
        address, left = address + count, left - count
        if not left:
            break
    if on_host is not target:
        target.copy_(on_host)


def _runs(pairs: Pairs, blocks_per_sector: int) -> Iterator[tuple[int, int, int]]:
    """Join pairs of blocks that lie one behind another on both sides, in one sector there: (there, here, count)."""
    i = 0
    while i < len(pairs):
        (first, target), count = pairs[i], 1
        while i + count < len(pairs) and pairs[i + count] == (first + count, target + count):
            if (first + count) % blocks_per_sector == 0:
                break
            count += 1
        yield first, target, count
        i += count


def _pieces(pages: Sequence[int], page_bytes: int, start: int) -> Iterator[tuple[int, int]]:
    """List the stretches of the file that pages show from byte `start` on, as (offset, bytes)."""
    first, skip = divmod(start, page_bytes)
    while first < len(pages):
        stop = first + 1
        while stop < len(pages) and pages[stop] == pages[stop - 1] + 1:
            stop += 1
        yield pages[first] * page_bytes + skip, (stop - first) * page_bytes - skip
        first, skip = stop, 0
