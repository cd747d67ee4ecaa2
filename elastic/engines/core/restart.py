"""Scheduling for executors of several ranks: steps that are lost on their way, and copies of layers that share them.

What is lost is computed anew. A copy has cohorts of its own, whose sequences have their keys and values where that copy
is computed; so they share no blocks with those of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from elastic.engines.core.block_pool import BlockTable
from elastic.engines.core.scheduler import Scheduler
from elastic.engines.core.sequence import UNPLACED, Cohort, Sequence
from elastic.engines.core.step import Step

WrittenListener = Callable[[tuple[list[int], ...], int, int, int], None]
"""Blocks by group of layers, the first token, the one behind the last, the copy of the layers."""


class RestartingScheduler(Scheduler):
    """A scheduler for executors that can lose steps, and all that they had computed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.written: WrittenListener | None = None
        """Told the blocks of each sequence of a step that is over, and which tokens the step has written."""
        self._torn: set[Sequence] = set()  # void steps may have written over what was computed of them
        self._retained: list[BlockTable] = []  # of sequences that have ended

    def void(self, step: Step) -> None:
        """Take back a step that was lost on its way: nothing came of it, and no sequence ends.

        What executors know of its sequences is not sure then: `restart` or `keep` them before the next step.
        """
        _, sequences = self._close_step(step)
        for chunk, sequence in zip(step.chunks, sequences, strict=True):
            sequence.in_flight = 0
            if sequence.ended:
                self._free(sequence)
            else:
                sequence.computed = chunk.start
                stop = chunk.start + len(chunk.tokens)  # beyond a window it is in the place of the first tokens
                if stop > chunk.start + 1 and any(stop > (window or stop) for window in self.blocks.windows):
                    self._torn.add(sequence)

    @property
    def begun(self) -> list[Sequence]:
        """Those that live and have blocks, or that the executor knows, the oldest first."""
        return [sequence for sequence in self.sequences.values() if sequence.known or sequence.computed]

    def restart(self, sequences: Collection[Sequence] | None = None) -> int:
        """Have these, or all that live, be computed anew from their tokens, before others.

        Their blocks are free then, and what was kept for reuse is given up. No step is in flight. Returns how many
        tokens had been computed.
        """
        assert not self._steps, list(self._steps)
        begun = [sequence for sequence in self.begun if sequences is None or sequence in sequences]
        tokens = sum(sequence.computed for sequence in begun)
        for sequence in begun:
            self._leave_executor(sequence)
            self._torn.discard(sequence)
            self.blocks.forget(sequence.id)
            self.blocks.announce([sequence.id], sequence.table.most_tokens)
            sequence.restart(self.blocks.tables[sequence.id])
        self.blocks.forget_kept()
        self._waiting.extendleft(reversed(begun))
        return tokens

    def unkeepable(self) -> list[Sequence]:
        """Return those of which a void step has left too little, or that need more than keys and values to go on."""
        return [s for s in self.begun if s in self._torn or not s.computed or s.state().scores_prompt]

    def keep(self) -> None:
        """Have all go on from what is computed of them, with an executor that does not know them. No step is in flight.

        Blocks behind what is computed must be as new ones.
        """
        assert not self._steps, list(self._steps)
        for sequence in self.begun:
            self._leave_executor(sequence)
            sequence.cohort, sequence.known = UNPLACED, False
            self._placed.append(sequence)
        self._torn.clear()

    def _leave_executor(self, sequence: Sequence) -> None:
        sequence.cohort.remove(sequence)
        if sequence in self._placed:
            self._placed.remove(sequence)
        if sequence.known:
            self._removed.append(sequence.id)

    def set_cohorts(self, count: int, copies: int = 1) -> None:
        """Share the live sequences out among so many cohorts, as `set_copies` those of copies. No step is in flight."""
        assert not self._steps, list(self._steps)
        before = self.cohorts
        self.cohorts = [Cohort(number, copies) for number in range(count)]
        for sequence in (*self._placed, *self.held.values()):
            sequence.cohort = UNPLACED
        for old in before:
            for sequence in (*old.decoding, *old.prefilling):
                new = min(self.cohorts, key=len)
                (new.decoding if sequence in old.decoding else new.prefilling)[sequence] = None
                sequence.cohort = new

    # -- copies of layers

    def set_copies(self, copies: int, cohorts: int) -> None:
        """Share the live sequences out among cohorts, of which each goes by one of so many copies in turn.

        No step is in flight, and keys and values of all copies are at the same place. Blocks are not found again that
        were computed before.
        """
        self.set_cohorts(cohorts, copies)
        for number, sequence in enumerate(self._placed):
            sequence.cohort = self.cohorts[number % cohorts]
        self.blocks.forget_names()
        for sequence in self.begun:
            sequence.table.use_salt(sequence.cohort.salt)

    def retain(self) -> None:
        """Have the blocks of sequences that end be nobody else's until `let_go`."""
        self._release = self._retained.append

    def let_go(self) -> None:
        """Have them be free. Can be called twice."""
        self._release = self.blocks.release
        for table in self._retained:
            self.blocks.release(table)
        self._retained.clear()

    # -- inside

    def _close_step(self, step: Step) -> tuple[Cohort, list[Sequence]]:
        cohort, sequences = super()._close_step(step)
        if self.written is not None:
            for chunk, sequence in zip(step.chunks, sequences, strict=True):
                self.written(sequence.table.blocks, chunk.start, chunk.start + len(chunk.tokens), cohort.copy)
        return cohort, sequences
