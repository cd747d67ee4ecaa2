"""What changes of where the KV cache of sequences lies, told after each step, before it matters.

The order is what makes it sound that another process goes on from the memory of one that was killed: it knows what was
told, and what was told is still there. For that two things must hold. A block that comes free has no other owner, and
its page none, before it was told that it is free: so the tables of sequences that ended wait here, in use, until the
report is out. And a step writes nothing that was told as computed: it writes behind it, in blocks of the sequence or in
ones that were not told yet (of layers with a sliding window see `KVDirectory.of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from elastic.engines.core.block_pool import BlockTable
from elastic.engines.core.kv_state import KVReport, SectorPages, SequenceKV
from elastic.engines.core.sequence import Sequence
from elastic.engines.core.step import ScheduledChunk

logger = logging.getLogger(__name__)


class KVJournal:
    """For the thread of an engine's loop."""

    def __init__(
        self,
        listener: Callable[[KVReport], None],
        mapped: Callable[[], Iterable[SectorPages]],
        release: Callable[[BlockTable], None],
        epoch: int | None = None,
    ) -> None:
        """`mapped` gives the sectors that were mapped since it was asked before, `release` frees a table's blocks.

        `epoch`: see `KVReport`; the first word has it.
        """
        self._listener = listener
        self._mapped = mapped
        self._release = release
        self._epoch = epoch
        self.sequences: dict[str, SequenceKV] = {}
        """The new blocks of sequences, and how much of these is computed."""
        self._ended: list[str] = []
        self._tables: list[BlockTable] = []

    def note_chunk(self, sequence: Sequence, chunk: ScheduledChunk) -> None:
        """Note what a step has computed of a sequence."""
        blocks = chunk.blocks
        if sequence.noted is not None:
            blocks = tuple(tuple(b[n:]) for b, n in zip(sequence.table.blocks, sequence.noted, strict=True))
            sequence.noted = None
        self.sequences[sequence.id] = SequenceKV(sequence.id, sequence.computed, blocks, not sequence.in_prompt)

    def note_computed(self, sequences: Iterable[Sequence]) -> None:
        """Note, between two steps, all that is computed of sequences."""
        for sequence in sequences:
            if sequence.computed:
                self.sequences[sequence.id] = sequence.kv()
                sequence.noted = tuple(map(len, sequence.table.blocks))

    def note_moved(self, sequences: Iterable[Sequence]) -> None:
        """Note, between two steps, that blocks of sequences are others: what was told of these means nothing more."""
        for sequence in sequences:
            self.note_computed([sequence])
            self._ended.append(sequence.id)

    def end(self, sequence: str, table: BlockTable) -> None:
        """Note that a sequence has ended; its blocks come free when that is told."""
        self.sequences.pop(sequence, None)
        self._ended.append(sequence)
        self._tables.append(table)

    def stop(self, sequences: Iterable[str]) -> None:
        """Tell that the memory of these sequences, all that live, is not to be relied on any more."""
        self.sequences.clear()
        self._ended.extend(sequences)
        self.tell(always=True)

    def tell(self, *, always: bool) -> bool:
        """Tell what has changed, if anything has, or `always`; then have what ended be free.

        Returns whether anything came free: whoever heard of its end did not hear of that.
        """
        if not (always or self.sequences or self._ended):
            return False
        report = KVReport(tuple(self._mapped()), tuple(self.sequences.values()), tuple(self._ended), self._epoch)
        tables, self._epoch = self._tables, None
        self.sequences, self._ended, self._tables = {}, [], []
        try:
            self._listener(report)
        except Exception:  # whoever hears it may be gone: its engine goes on
            logger.exception("the listener of an engine's steps failed")
        for table in tables:
            self._release(table)
        return bool(tables)
