"""Blocks of another engine's memory, copied into blocks here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import TypeVar

import torch

from elastic.engines.core.kv_state import KVSource, LayersKV
from elastic.errors import StateError
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.sector_space import SectorSpace
from elastic.memory.backends.rank_memory import MemoryReader, Peers, open_memory, read_into, staging
from elastic.memory.backends.streams import finish_current_stream, finish_queued_work
from elastic.memory.rate_limit import YieldingPace

Pairs = Sequence[tuple[int, int]]
"""Blocks there, and the ones here that get what is in them."""
Item = TypeVar("Item")
AT_ONCE = 4 << 20
"""Bytes that are read at once, without a pace."""
TURN = 1 << 20
"""Bytes of scattered blocks of a file that are read in one turn behind what computes."""


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
    """Copies from the memory of a source, which is open until `close`.

    It holds no lock, and the interpreter's only between two system calls.
    """

    def __init__(
        self,
        memory: BlockMemory,
        source: KVSource,
        wanted: Callable[[], bool],
        *,
        peers: Peers | None = None,
        pace: YieldingPace | None = None,
    ) -> None:
        """`wanted` is asked again and again; once it is not, `copy` raises `StateError`.

        `peers` and `pace`: see `copy_layers`. Raises `StateError` where the memory cannot be read, `RankLost` where the
        rank that has it is gone.
        """
        self._memory, self._device = memory, memory.kv.device
        self._block_bytes = source.format.block_bytes
        self._wanted, self._pace = wanted, pace
        self._sources: dict[int, tuple[LayersKV, MemoryReader]] = {}  # by layer
        with ExitStack() as stack:
            for each in source.by_layers():
                if layers := [layer for layer, sectors in each.pages.items() if sectors]:
                    opened = open_memory(each.file, each.memory, peers, self._device, coordinated=pace is not None)
                    reader = stack.enter_context(closing(opened))
                    self._sources.update(dict.fromkeys(layers, (each, reader)))
            finish_queued_work(self._device)  # what was in the blocks may still be read
            self.close = stack.pop_all().close

    def copy(self, group: int, pairs: Pairs) -> int:
        """Copy blocks in all layers of a group; return bytes. Raises as `__init__` where they cannot be read."""
        layers = self._memory.groups[group].group.layers if pairs else ()
        if lost := [layer for layer in layers if layer not in self._sources]:
            raise StateError(
                f"keys and values of {len(lost)} of {len(layers)} layers, or parts of layers, were at a rank that is "
                "lost, or whose memory cannot be read"
            )
        for layer in layers:
            stretches, most = self._stretches(group, layer, pairs), _at_once(self._sources[layer][1], self._pace)
            for batch in _batches(stretches, lambda stretch: stretch[0].nbytes, most):
                self._read(layer, batch)
        return len(pairs) * len(layers) * self._block_bytes

    def _stretches(self, group: int, layer: int, pairs: Pairs) -> Iterator[tuple[torch.Tensor, list[tuple[int, int]]]]:
        """List what blocks of a layer go to, [bytes], no more than a chunk each, and the pieces that come there."""
        source, _ = self._sources[layer]
        local = self._memory.groups[group].view(layer, torch.uint8)
        size, nbytes = source.sector_blocks(layer), self._block_bytes
        for first, target, count in _runs(pairs, size):
            sector, place = divmod(first, size)
            pages = source.pages[layer].get(sector)
            if pages is None:
                raise StateError(f"sector {sector} of group {group} was not told: block {first} cannot be found")
            for done, some in _chunks([(0, count)], nbytes, self._pace):
                pieces = _pieces(pages, source.page_bytes, (place + done) * nbytes, some * nbytes)
                yield local[(target + done) * nbytes :][: some * nbytes], pieces

    def _read(self, layer: int, stretches: Sequence[tuple[torch.Tensor, list[tuple[int, int]]]]) -> None:
        """Read pieces into each tensor, [bytes], when it may be; of another rank with one question."""
        if not self._wanted():
            raise StateError("the blocks that keys and values were copied to were given up")
        _, reader = self._sources[layer]
        nbytes = sum(target.nbytes for target, _ in stretches)
        with nullcontext() if self._pace is None else self._pace.copying(nbytes):
            if not reader.waits or len(stretches) == 1:
                for target, pieces in stretches:
                    read_into(reader, target, pieces)
                return
            parts = _ask(reader, self._device, [pieces for _, pieces in stretches])
            for (target, _), part in zip(stretches, parts, strict=True):
                target.copy_(part)
            finish_current_stream(self._device)  # steps that read the blocks are queued on others


def copy_layers(
    memory: SectorSpace,
    source: LayersKV,
    layers: Iterable[int],
    blocks: Sequence[Sequence[int]] | None = None,
    wanted: Callable[[], bool] = lambda: True,
    *,
    peers: Peers | None = None,
    pace: YieldingPace | None = None,
) -> int:
    """Copy the keys and values of layers from the memory of another rank into the same sectors here; return bytes.

    `blocks`: of each group, those to copy; None: all sectors that are mapped on both sides. Sectors that are not mapped
    there, as blocks which were freed meanwhile are in, are passed over. It may run beside steps, and may be repeated:
    what is written here is so under the lock of the memory, so that no sector is unmapped meanwhile. With a `pace` it
    goes in chunks, behind what computes. Raises `StateError` where the memory cannot be read, the form is another, a
    layer is not on both sides, a block's sector is not mapped here, or once it is not `wanted` any more; `RankLost`
    where it is read over the network (`peers`), and that rank has gone.
    """
    copied = 0
    device, nbytes = memory.kv.device, source.format.block_bytes
    with closing(open_memory(source.file, source.memory, peers, device, coordinated=pace is not None)) as reader:
        finish_queued_work(device)  # what was in the blocks may still be read
        for layer in layers:
            group = memory.group_of(layer)
            stretches = _stretches(memory, source, layer, None if blocks is None else blocks[group])
            chunks = _chunks(stretches, nbytes, pace)
            for batch in _batches(chunks, lambda chunk: chunk[1] * nbytes, _at_once(reader, pace)):
                if not wanted():
                    raise StateError(f"the copy of the KV of layer {layer} was given up")
                with nullcontext() if pace is None else pace.copying(sum(count for _, count in batch) * nbytes):
                    copied += _copy_stretches(memory, source, reader, layer, batch, blocks is not None)
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


def _chunks(
    stretches: Iterable[tuple[int, int]], block_bytes: int, pace: YieldingPace | None
) -> Iterator[tuple[int, int]]:
    """Cut stretches of blocks (first, count) into what is copied at once."""
    for first, count in stretches:
        stop = first + count
        while first < stop:
            most = stop - first if pace is None else max(1, pace.chunk // block_bytes)
            yield first, min(most, stop - first)
            first += most


def _at_once(reader: MemoryReader, pace: YieldingPace | None) -> int:
    """Return how many bytes are read in one turn."""
    if pace is None:
        return AT_ONCE
    return pace.chunk if reader.waits else min(pace.chunk, TURN)


def _batches(items: Iterable[Item], nbytes: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Put items together as long as they have no more bytes than `most`; else each is by itself."""
    batch: list[Item] = []
    size = 0
    for item in items:
        if batch and size + nbytes(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes(item)
    if batch:
        yield batch


def _copy_stretches(
    memory: SectorSpace,
    source: LayersKV,
    reader: MemoryReader,
    layer: int,
    stretches: Sequence[tuple[int, int]],
    must_be_here: bool,
) -> int:
    """Copy stretches of blocks, each in one sector, in a layer; return bytes, of the sectors that are mapped here."""
    group = memory.group_of(layer)
    ranges, nbytes = memory.groups[group], source.format.block_bytes
    places = [(first, count, *divmod(first, memory.blocks_per_sector(group))) for first, count in stretches]
    pieces = {
        first: _pieces(source.pages[layer][sector], source.page_bytes, place * nbytes, count * nbytes)
        for first, count, sector, place in places
    }
    asked = [first for first, _, sector, _ in places if reader.waits and sector in ranges.mapped]
    parts = _ask(reader, memory.kv.device, [pieces[first] for first in asked]) if asked else ()
    staged = dict(zip(asked, parts, strict=True))
    copied = 0
    with memory.lock if staged else nullcontext():  # of a file each stretch by itself, for steps that need the lock
        for first, count, sector, _ in places:
            with memory.lock:
                target = ranges.view(layer, torch.uint8)
                if sector not in ranges.mapped or (reader.waits and first not in staged):
                    if must_be_here:
                        raise StateError(
                            f"sector {sector} of group {group} is not mapped here: block {first} cannot be copied"
                        )
                    continue
                shown = target[first * nbytes : (first + count) * nbytes]
                if reader.waits:
                    shown.copy_(staged[first])
                else:
                    read_into(reader, shown, pieces[first])
                copied += shown.nbytes
        if staged:
            finish_current_stream(memory.kv.device)  # so that no copy is queued on a sector that is unmapped
    return copied


def _ask(
    reader: MemoryReader, device: torch.device, stretches: Sequence[list[tuple[int, int]]]
) -> tuple[torch.Tensor, ...]:
    """Read stretches, each in pieces, from a rank that answers, with one question; return their [bytes]."""
    sizes = [sum(nbytes for _, nbytes in pieces) for pieces in stretches]
    staged = staging(reader, sum(sizes), device)
    reader.read(staged.data_ptr(), [piece for pieces in stretches for piece in pieces])
    return torch.split(staged, sizes)


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


def _pieces(pages: Sequence[int], page_bytes: int, start: int, nbytes: int) -> list[tuple[int, int]]:
    """List the stretches of the file that pages show from byte `start` on, as (offset, bytes), so many bytes in all."""
    pieces = []
    first, skip = divmod(start, page_bytes)
    while nbytes and first < len(pages):
        stop = first + 1
        while stop < len(pages) and pages[stop] == pages[stop - 1] + 1:
            stop += 1
        count = min(nbytes, (stop - first) * page_bytes - skip)
        pieces.append((pages[first] * page_bytes + skip, count))
        first, skip, nbytes = stop, 0, nbytes - count
    return pieces
