"""Index tensors of one batch for attention: which tokens are whose, and where their keys and values are.

A compiled kernel computes all sequences with few new tokens at once. torch's operators compute those with one in groups
whose lengths differ by less than two, on a CPU in runs of so many as the caches of the processor have room for, and the
others, prompts or parts of them, one by one. Block tables are padded to the length of the longest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from elastic.engines.executor.block_layout import BlockLayout, CacheParts
from elastic.engines.executor.input_batch import BatchBlockTable, BatchTokens, Ints
from elastic.engines.executor.kernels.paged_attention import NewTokens

READ_BYTES, MOST_READ_BYTES = 2 << 20, 8 << 20
"""Keys and values that are read at once on a CPU: by each thread of a decode step, and at all. More fall out of the
processor's caches before they are attended to; and larger memory the allocator (glibc: from 32 MiB on at the latest)
gives back to the system each time, whose pages fault again at the next."""
FEW_TOKENS, MOST_TOKENS, MOST_SEEN = 16, 128, 384
"""New tokens of a sequence that the kernel attends for: few, or more where all that they see is short. For others the
matrix products of torch's operators make good what these copy."""


def bytes_at_once(device: torch.device, *, decode: bool) -> int:
    """Return how many bytes of keys and values are read at once; of one head of a sequence all are.

    A prompt computes for so long with what it reads that caches do not matter.
    """
    if device.type != "cpu":
        return sys.maxsize
    return min(MOST_READ_BYTES, READ_BYTES * torch.get_num_threads()) if decode else MOST_READ_BYTES


def are_few(counts: Ints, seen: Ints) -> NDArray[np.bool_]:
    """Return for which sequences with so many new tokens, that see so many, the kernel is the faster one."""
    few: NDArray[np.bool_] = (counts <= FEW_TOKENS) | (counts <= MOST_TOKENS) & (seen <= MOST_SEEN)
    return few


class PartsIndex:
    """An index of a layout for parts of a layer's cache: for each choice of these made when it is first asked for.

    What it is made of it has itself: the tables may change meanwhile.
    """

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`make` is given what the layout calls the `places` of parts."""
        self._make = make
        self._made: dict[CacheParts, torch.Tensor] = {}

    def of(self, parts: CacheParts) -> torch.Tensor:
        """Return the index for parts, [2, requests, places, blocks]: see `BlockLayout.read_index`."""
        index = self._made.get(parts)
        if index is None:
            index = self._made[parts] = self._make(parts.places)
        return index


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each."""

    at: slice | torch.Tensor | None
    """[sequences]: their tokens in the batch; None: all of it, in order."""
    read: PartsIndex
    """Of their blocks, each table padded with its first."""
    mask: torch.Tensor
    """[sequences, 1, 1, blocks * tokens per block]: 0 for seen tokens, else minus infinity."""


@dataclass(frozen=True)
class PromptChunk:
    """A sequence with several new tokens."""

    at: slice
    """Its tokens in the batch."""
    read: PartsIndex | None
    """Of its blocks; None: it holds no token yet."""
    seen: torch.Tensor | slice
    """The slots of what the new tokens see in these, in the order of the text."""
    mask: torch.Tensor | None
    """[new, past + new]: whether each is seen; None: every token before it, with no past."""


@dataclass(frozen=True)
class AttentionMetadata:
    """One batch, as the layers of one group see it."""

    in_place: NewTokens | None
    """Those that the kernel attends for."""
    decodes: tuple[DecodeGroup, ...]
    prompts: tuple[PromptChunk, ...]
    """Those that see the cache as it was before the new tokens are written, and these beside it."""
    continued: tuple[PromptChunk, ...]
    """Those that see it, and the new tokens in it, afterwards: nothing of it has to be copied once more."""
    blocks: torch.Tensor
    """[written]: where the new tokens are written."""
    slots: torch.Tensor
    """[written]: in these blocks."""
    write: PartsIndex
    """Of both."""
    written: torch.Tensor | None
    """[written]: those of the batch that are written; None: all."""


class MetadataBuilder:
    """Makes the metadata of a group of layers; what did not change since the step before is used again."""

    def __init__(
        self,
        layout: BlockLayout,
        table: BatchBlockTable,
        device: torch.device,
        dtype: torch.dtype,
        kv_shards: int = 1,
        *,
        compiled: bool = False,
    ) -> None:
        """`dtype`: of attention; `kv_shards`: parts of a layer's cache; `compiled`: a kernel attends where it can."""
        self._layout = layout
        self._table = table
        self._device = device
        self._dtype = dtype
        shape = layout.shape  # of a layer's block, as it is read:
        self._block_bytes = kv_shards * 2 * shape.tokens * shape.heads * shape.dim * dtype.itemsize
        self._compiled = compiled
        self._reads: dict[tuple[bytes, int], tuple[torch.Tensor, PartsIndex]] = {}  # of decode groups: rows, blocks
        self._version = -1  # of the table, when these were made

    def build(self, batch: BatchTokens) -> AttentionMetadata:
        """Return the metadata of a batch. Its parts may be made in several threads at a time."""
        blocks, slots, written = self._write_slots(batch)
        write = PartsIndex(partial(self._layout.write_index, blocks, slots))
        in_place = self._in_place(batch)
        several = [] if batch.only_single else np.flatnonzero((batch.counts > 1) & ~in_place).tolist()
        continued = [] if self._table.window is not None else [i for i in several if batch.starts[i]]
        return AttentionMetadata(
            self._new_tokens(batch, np.flatnonzero(in_place)) if in_place.any() else None,
            () if self._compiled else self._decode_groups(batch),
            tuple(self._prompt(batch, i) for i in several if i not in continued),
            tuple(self._continued(batch, i) for i in continued),
            blocks,
            slots,
            write,
            written,
        )

    def _in_place(self, batch: BatchTokens) -> NDArray[np.bool_]:
        """Return which sequences, [sequences], the kernel attends for."""
        if not self._compiled:
            return np.zeros(len(batch.counts), np.bool_)
        counts, seen = batch.counts, batch.starts + batch.counts
        few = are_few(counts, seen)
        if self._table.window is not None:  # several tokens overwrite what the first of them see, once a window is full
            few &= (counts == 1) | (seen <= self._table.window)
        return few

    def _new_tokens(self, batch: BatchTokens, some: Ints) -> NewTokens:
        """Say of these sequences of a batch what the kernel is told."""
        rows, seen = batch.rows[some], batch.starts[some] + batch.counts[some]
        if self._table.window is not None:
            seen = np.minimum(seen, self._table.window)
        tables, _ = self._read_index(rows, int(self._table.counts[rows].max()))
        if batch.only_single and len(some) == len(batch.rows):
            return NewTokens(tables, self._to_device(seen))
        return NewTokens(tables, *map(self._to_device, (seen, batch.first[some], batch.counts[some])))

    def _decode_groups(self, batch: BatchTokens) -> tuple[DecodeGroup, ...]:
        counts = self._table.counts[batch.rows]
        if batch.only_single and int(counts.min()).bit_length() == int(counts.max()).bit_length():
            alike = [np.arange(len(counts))]
        else:
            bits = np.where(batch.counts == 1, np.frexp(counts)[1], 0)  # the length of a count in bits
            alike = [np.flatnonzero(bits == length) for length in np.unique(bits[bits > 0])]
        decoded = []
        for group in alike:  # each is cut into those whose blocks are read at once
            longest = int(counts[group].max()) * self._block_bytes
            most = max(1, bytes_at_once(self._device, decode=True) // longest)
            decoded += [self._decode(batch, group[start : start + most]) for start in range(0, len(group), most)]
        return tuple(decoded)

    def _decode(self, batch: BatchTokens, run: Ints) -> DecodeGroup:
        table, rows, starts = self._table, batch.rows[run], batch.starts[run]
        tables, read = self._read_index(rows, int(table.counts[rows].max()))
        seen = self._to_device(starts + 1 if table.window is None else np.minimum(starts + 1, table.window))
        slots = torch.arange(tables.shape[1] * table.block_tokens, device=self._device)
        mask = torch.zeros(len(rows), len(slots), dtype=self._dtype, device=self._device)
        mask.masked_fill_(slots >= seen[:, None], -torch.inf)
        return DecodeGroup(self._tokens(batch, run), read, mask[:, None, None])

    def _tokens(self, batch: BatchTokens, run: Ints) -> slice | torch.Tensor | None:
        """Say where the tokens of sequences with one each are; those in a row in a form that copies nothing."""
        tokens = batch.first[run]
        first, last = int(tokens[0]), int(tokens[-1])
        if last - first + 1 != len(run):
            return self._to_device(tokens)
        return None if batch.only_single and len(run) == len(batch.rows) else slice(first, last + 1)

    def _read_index(self, rows: Ints, blocks: int) -> tuple[torch.Tensor, PartsIndex]:
        """Return so many blocks of each row, and the index that reads them."""
        table = self._table
        if table.version != self._version:
            self._reads, self._version = {}, table.version
        key = rows.tobytes(), blocks
        read = self._reads.get(key)
        if read is None:
            numbers = table.blocks[rows, :blocks]
            if (table.counts[rows] < blocks).any():
                numbers = np.where(np.arange(blocks) < table.counts[rows, None], numbers, numbers[:, :1])
            tables = self._to_device(numbers)
            read = self._reads[key] = tables, PartsIndex(partial(self._layout.read_index, tables))
        return read

    def _prompt(self, batch: BatchTokens, i: int) -> PromptChunk:
        table, row, first = self._table, int(batch.rows[i]), int(batch.first[i])
        start, count = int(batch.starts[i]), int(batch.counts[i])
        window = table.window
        at = slice(first, first + count)
        past = 0 if window is None else min(start, window - 1)
        if window is None or (not past and count <= window):
            return PromptChunk(at, None, slice(0, 0), None)
        read = self._chunk_index(row, int(table.counts[row])) if past else None
        seen = self._to_device(table.slots(np.arange(start - past, start)))
        ago = past + torch.arange(count)[:, None] - torch.arange(past + count)
        visible = (ago >= 0) & (ago < window)
        return PromptChunk(at, read, seen, visible.to(self._device))

    def _continued(self, batch: BatchTokens, i: int) -> PromptChunk:
        """Describe a sequence that goes on, of layers that see all of it."""
        row, first = int(batch.rows[i]), int(batch.first[i])
        start, count = int(batch.starts[i]), int(batch.counts[i])
        length = start + count
        read = self._chunk_index(row, -(-length // self._table.block_tokens))
        visible = torch.arange(length) <= torch.arange(start, length)[:, None]
        return PromptChunk(slice(first, first + count), read, slice(0, length), visible.to(self._device))

    def _chunk_index(self, row: int, blocks: int) -> PartsIndex:
        table = self._to_device(self._table.blocks[[row], :blocks])  # a copy
        return PartsIndex(partial(self._layout.read_index, table))

    def _write_slots(self, batch: BatchTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the blocks and slots of the tokens that are written, and which: of more than a window, the last."""
        table, counts = self._table, batch.counts
        positions = batch.positions
        rows = batch.rows if batch.only_single else np.repeat(batch.rows, counts)
        written = None
        if table.window is not None and (counts > table.window).any():
            kept = np.flatnonzero(positions >= np.repeat(batch.starts + counts - table.window, counts))
            positions, rows, written = positions[kept], rows[kept], self._to_device(kept)
        blocks, slots = np.divmod(table.slots(positions), table.block_tokens)
        return self._to_device(table.blocks[rows, blocks]), self._to_device(slots), written

    def _to_device(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
