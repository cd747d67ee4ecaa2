"""Steps as what a wrapped model is called with: tokens, positions, and its cache in blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from elastic.engines.core.kv_state import KVFormat
from elastic.engines.core.step import ScheduledChunk
from elastic.engines.executor.block_layout import layout_of
from elastic.engines.executor.input_batch import BatchBlockTable, BatchTokens
from elastic.engines.executor.paged_cache import PagedCache, RequestSlice
from elastic.kvcache.storage.sector_space import SectorSpace
from elastic.weights.decoder import PAGED_CACHE


class BatchRunner:
    """What any rank that computes layers of an instance keeps of its sequences. For one thread.

    Logical blocks are the physical ones here: ranks of an instance have the same, each for its own layers.
    """

    def __init__(self, model: Any, memory: SectorSpace, form: KVFormat) -> None:
        self.tables = [BatchBlockTable(form.block_tokens, window) for window in form.windows]
        self.rows: dict[str, int] = {}
        """Sequence -> row of the tables."""
        self._free_rows: list[int] = []
        self.cache = PagedCache(memory, self.tables, layout_of(form, model.dtype), model.dtype)
        self._device = model.device
        # attention knows what each token sees: a finished mask keeps the model from building one of all against all
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)

    def remove(self, sequences: Collection[str]) -> None:
        """Forget sequences; unknown ones: nothing happens."""
        for sequence in sequences:
            row = self.rows.pop(sequence, None)
            if row is not None:
                self._free_rows.append(row)

    def add(self, sequence: str, blocks: Sequence[Sequence[int]] | None = None) -> None:
        """Know a sequence; `blocks`, by group, are such as hold what was computed of it elsewhere."""
        row = self.rows[sequence] = self._free_rows.pop() if self._free_rows else len(self.rows)
        for table in self.tables:
            table.begin(row)
        for table, own in zip(self.tables, blocks or (), strict=bool(blocks)):
            table.extend(row, np.array(own, np.int64))

    def sequences(self) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
        """Return all known sequences and their blocks by group."""
        return tuple(
            (name, tuple(tuple(table.blocks[row, : table.counts[row]].tolist()) for table in self.tables))
            for name, row in self.rows.items()
        )

    @torch.no_grad()
    def inputs(self, chunks: Sequence[ScheduledChunk], *, eager: bool = False) -> dict[str, Any]:
        """Return what the model is called with: [1, tokens] each. New blocks are added to the tables before.

        `eager`: nothing of the tables is read any more when the model is called, so that the next step can be begun.
        """
        self._extend_tables(chunks)
        rows = self.rows
        batch = BatchTokens(
            np.array([rows[chunk.sequence] for chunk in chunks], np.int64),
            np.array([chunk.start for chunk in chunks], np.int64),
            np.array([len(chunk.tokens) for chunk in chunks], np.int64),
        )
        ids = np.array(list(chain.from_iterable([chunk.tokens for chunk in chunks])), np.int64)
        seen = RequestSlice(self.cache, batch)
        if eager:
            seen.prepare()
        return {
            "input_ids": torch.from_numpy(ids)[None].to(self._device),
            "position_ids": torch.from_numpy(batch.positions)[None].to(self._device),
            "attention_mask": self._mask,
            PAGED_CACHE: seen,
            "use_cache": False,
        }

    def _extend_tables(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Add the chunks' new blocks to the tables.

        Of a sequence's new blocks only the last is read before it is full: it begins as zeros.
        """
        for group, table in enumerate(self.tables):
            cleared = []
            for chunk in chunks:
                new = chunk.blocks[group]
                if new:
                    row = self.rows[chunk.sequence]
                    table.extend(row, np.array(new, np.int64))
                    first_slot = (int(table.counts[row]) - 1) * table.block_tokens
                    if first_slot >= chunk.start:  # else it came with tokens in it
                        cleared.append(new[-1])
            if cleared:
                self.cache.clear(group, np.array(cleared, np.int64))
