"""Steps that are lost on their way, as when other ranks compute a part of them: what had been computed is, again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.engines.core.scheduler import Cohort, Scheduler
from elastic.engines.core.sequence import Sequence
from elastic.engines.core.step import Step

WrittenListener = Callable[[tuple[list[int], ...], int, int], None]
"""Blocks by group of layers, the first token, the one behind the last."""


class RestartingScheduler(Scheduler):
    """A scheduler for executors that can lose steps, and all that they had computed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.written: WrittenListener | None = None
        """Told the blocks of each sequence of a step that is over, and which tokens the step has written."""

    def void(self, step: Step) -> None:
        """Take back a step that was lost on its way: nothing came of it, and no sequence ends.

        What executors know of its sequences is not sure then: `restart` them before the next step.
        """
        _, sequences = self._close_step(step)
        for chunk, sequence in zip(step.chunks, sequences, strict=True):
            sequence.in_flight = 0
            if sequence.ended:
                self._free(sequence)
            else:
                sequence.computed = chunk.start

    def restart(self) -> int:
        """Have all that live be computed anew from their tokens, before others; return how many had been computed.

        Their blocks are free then, and what was kept for reuse is given up. No step is in flight.
        """
        assert not self._steps, list(self._steps)
        begun = [sequence for sequence in self.sequences.values() if sequence.known or sequence.computed]
        tokens = sum(sequence.computed for sequence in begun)
        for sequence in begun:
            self._leave_cohort(sequence)
            if sequence in self._placed:
                self._placed.remove(sequence)
            if sequence.known:
                self._removed.append(sequence.id)
            self.blocks.forget(sequence.id)
            self.blocks.announce([sequence.id], sequence.table.most_tokens)
            sequence.restart(self.blocks.table(sequence.id))
        with self.blocks.memory.lock:
            self.blocks.give_up_reusable(self.blocks.reusable_sectors())
        self._waiting.extendleft(reversed(begun))
        return tokens

    def set_cohorts(self, count: int) -> None:
        """Share the live sequences out among so many cohorts. No step is in flight."""
        assert not self._steps, list(self._steps)
        before = self._cohorts
        self._cohorts = [Cohort(number) for number in range(count)]
        for sequence in (*self._placed, *self.held.values()):
            sequence.cohort = None
        for old in before:
            for sequence in (*old.decoding, *old.prefilling):
                new = min(self._cohorts, key=len)
                (new.decoding if sequence in old.decoding else new.prefilling)[sequence] = None
                sequence.cohort = new.number

    def _close_step(self, step: Step) -> tuple[Cohort, list[Sequence]]:
        cohort, sequences = super()._close_step(step)
        if self.written is not None:
            for chunk, sequence in zip(step.chunks, sequences, strict=True):
                self.written(sequence.table.blocks, chunk.start, chunk.start + len(chunk.tokens))
        return cohort, sequences
