"""Many decode steps at once, where each would be as the one before but for one more token of every sequence."""

from __future__ import annotations

import math
from typing import NamedTuple

from elastic.engines.core.kv_state import SequenceKV
from elastic.engines.core.restart import RestartingScheduler
from elastic.engines.core.sequence import Sequence


class Stretch(NamedTuple):
    """Steps that follow each other, each so much longer than the one before."""

    begin_s: float
    steps: int
    first_s: float
    more_s: float

    @property
    def end_s(self) -> float:
        """When the last one is over."""
        return self.begin_s + self.steps * self.first_s + self.more_s * self.steps * (self.steps - 1) / 2

    def until(self, now: float) -> Stretch:
        """Return it without the steps that begin after now."""
        passed, linear = now - self.begin_s, self.first_s - self.more_s / 2
        if abs(self.more_s) < 1e-12:
            done = passed / self.first_s
        else:
            done = (math.sqrt(max(0.0, linear * linear + 2 * self.more_s * passed)) - linear) / self.more_s
        return self._replace(steps=min(self.steps, math.floor(done + 1e-9) + 1))


class StretchingScheduler(RestartingScheduler):
    """A scheduler that can be told that steps were computed, instead of being asked for each one."""

    copied = 0
    """Of how many tokens keys and values went to the host, or came back, since somebody looked."""

    def alike_steps(self, ends: dict[str, int]) -> int:
        """Return how many of the next steps bring each live sequence a token, and end none; 0 where others may begin.

        Whatever the order, all have room for that. `ends`: sequence -> its tokens at its end, where that is before the
        most that it may have.
        """
        (cohort,) = self.cohorts if len(self.cohorts) == 1 else (None,)
        if cohort is None or cohort.in_flight or cohort.prefilling or not cohort.decoding:
            return 0
        if self._waiting or self._placed or self._followers or self._ending or self.held:
            return 0
        if any(sequence.in_flight or not sequence.known for sequence in cohort.decoding):
            return 0
        budget = self.budget.tokens((s.computed for s in cohort.decoding), ())
        if len(cohort.decoding) > budget or not self.blocks.all_fit():
            return 0
        return min(ends.get(s.id, s.table.most_tokens) - len(s.tokens) for s in cohort.decoding) - 1

    def skip(self, steps: int, token: int) -> list[tuple[Sequence, int]]:
        """Have so many steps be computed, with the same token for all; return who got them, with the tokens before."""
        got = []
        tokens = [token] * steps
        size = self.blocks.block_tokens
        for sequence in self.cohorts[0].decoding:
            got.append((sequence, len(sequence.tokens) - len(sequence.request.prompt)))
            sequence.tokens.extend(tokens)
            sequence.computed += steps
            if sequence.computed > sequence.table.capacity:
                blocks = self.blocks.grow(sequence.table, sequence.computed)
                assert blocks is not None, sequence.id
                if self.journal is not None:
                    self.journal.sequences[sequence.id] = SequenceKV(sequence.id, sequence.computed, blocks, True)
            if self.blocks.shares and sequence.computed // size > sequence.table.shared:
                self.blocks.share_computed(sequence.table, sequence.tokens, sequence.computed)
        self.steps += steps
        self._last_s = self._clock()
        return got
