"""What is computed next: live sequences first, then by arrival; nothing is evicted, restarted or computed twice."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from elastic.engines.base import FinishReason, SampledToken
from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.sequence import Sequence
from elastic.engines.core.step import Chunk, SequenceState, Step, StepResult


class Produced(NamedTuple):
    """A token that a step brought."""

    sequence: Sequence
    sampled: SampledToken
    finish: FinishReason | None
    """Why it is the last one of its sequence, which has ended then. "failed": there is no token, but an error."""


class _Cohort:
    """Live sequences of which one step at a time is in flight."""

    __slots__ = ("decoding", "in_flight", "number", "prefilling", "refused")

    def __init__(self, number: int) -> None:
        self.number = number
        self.decoding: dict[Sequence, None] = {}  # as sets in order
        self.prefilling: dict[Sequence, None] = {}
        self.in_flight = False
        self.refused = False  # whether a sequence found no room the last time

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)


class Scheduler:
    """A state machine without threads; its clock says seconds.

    Sequences that decode come first, then those whose prompt is being computed, in chunks that fill the step up to
    `max_batch_tokens`, then new ones, while at most `max_requests` live. Where one finds no room, new ones wait: they
    would only take the room of those that live, and of those before them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_requests: int,
        max_batch_tokens: int,
        cohorts: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.blocks = blocks
        self.sequences: dict[str, Sequence] = {}
        """All that have not ended."""
        self.stalled = 0
        """Live sequences that were left out of the last step for want of blocks."""
        self.short_of_kv_s = 0.0
        """A clock that stands still while every sequence that could be computed has the blocks it asks for: by how
        much it went on is how long one that waited meanwhile has waited for blocks, not for its turn."""
        self._max_requests, self._max_batch_tokens = max_requests, max_batch_tokens
        self._clock = clock
        self._last_s = clock()
        self._cohorts = [_Cohort(number) for number in range(cohorts)]
        self._waiting: deque[Sequence] = deque()  # some may have ended
        self._followers: dict[Sequence, list[Sequence]] = {}  # they wait for the prompt's blocks of the key
        self._steps: dict[int, tuple[_Cohort, list[Sequence]]] = {}  # in flight, by number
        self._next_step = 0
        self._removed: list[str] = []
        self._ending: dict[str, Sequence] = {}  # those that have ended, of which a step is in flight

    @property
    def has_work(self) -> bool:
        """True while a sequence has not ended, or a step is in flight."""
        return bool(self.sequences or self._steps)

    def add(self, states: SequenceOf[SequenceState]) -> None:
        """Queue the answers of one request; the later ones share the blocks of the prompt that the first computes.

        Raises `CapacityError` and `Overloaded` like `BlockManager.expect`, and nothing is queued.
        """
        request = states[0].request
        self.blocks.expect([state.id for state in states], len(request.prompt) + request.max_tokens)
        added = [Sequence(state, self.blocks.table(state.id), self.short_of_kv_s) for state in states]
        self.sequences.update((sequence.id, sequence) for sequence in added)
        if self.blocks.shares and len(request.prompt) > self.blocks.block_tokens:
            self._waiting.append(added[0])
            self._followers[added[0]] = added[1:]
        else:
            self._waiting.extend(added)

    def cancel(self, sequence: str) -> Sequence | None:
        """End a sequence; return it. Unknown or ended: None. What a step in flight uses comes free with the step."""
        found = self.sequences.get(sequence)
        if found is not None:
            self._end(found)
        return found

    def export(self, sequence: str) -> SequenceState | None:
        """End a sequence here so that another engine goes on with it; a token that is in flight is dropped."""
        found = self.cancel(sequence)
        return None if found is None else found.state()

    def schedule(self) -> Step | None:
        """Choose the next step, of a cohort that has none in flight; None if nothing can go on now."""
        now = self._clock()
        if any(cohort.refused for cohort in self._cohorts):
            self.short_of_kv_s += now - self._last_s
        self._last_s = now
        self.stalled = 0
        for cohort in sorted(self._cohorts, key=len) if len(self._cohorts) > 1 else self._cohorts:
            if not cohort.in_flight and (step := self._step_of(cohort, now)):
                return step
        return None

    def update(self, step: Step, result: StepResult) -> list[Produced]:
        """Note what came of a step; return its tokens, in order. Sequences that ended meanwhile bring none."""
        cohort, sequences = self._steps.pop(step.number)
        cohort.in_flight = False
        produced: list[Produced] = []
        sampled = iter(result.sampled)
        size = self.blocks.block_tokens
        shares = self.blocks.shares
        for chunk, sequence in zip(step.chunks, sequences, strict=True):
            token = next(sampled) if chunk.samples else None
            sequence.in_flight = False
            if sequence.ended:
                self._free(sequence)
                continue
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.extend(result.prompt_logprobs.get(sequence.id, ()))
            if shares and sequence.computed // size > sequence.table.shared:
                self.blocks.share_computed(sequence.table, sequence.tokens, sequence.computed)
            if token is None:
                continue
            if token.error is not None:
                produced.append(Produced(sequence, token, "failed"))
                self._end(sequence)
                continue
            if sequence in cohort.prefilling:
                del cohort.prefilling[sequence]
                cohort.decoding[sequence] = None
                self._waiting.extendleft(reversed(self._followers.pop(sequence, [])))
            finish = sequence.append(token.token)
            produced.append(Produced(sequence, token, finish))
            if finish is not None:
                self._end(sequence)
        return produced

    def fail(self, step: Step) -> list[Sequence]:
        """End the sequences of a step that failed; return those that had not ended meanwhile."""
        cohort, sequences = self._steps.pop(step.number)
        cohort.in_flight = False
        failed = [sequence for sequence in sequences if not sequence.ended]
        for sequence in sequences:
            sequence.in_flight = False
            if sequence.ended:
                self._free(sequence)
            else:
                self._end(sequence)
        return failed

    def take_removed(self) -> tuple[str, ...]:
        """Return the sequences that the executor can forget; they will be in no step then."""
        removed = tuple(self._removed)
        self._removed.clear()
        return removed

    # -- inside

    def _step_of(self, cohort: _Cohort, now: float) -> Step | None:
        cohort.refused = False
        chunks: list[Chunk] = []
        sequences: list[Sequence] = []
        budget = self._add_live(cohort, chunks, sequences)
        first_new = len(sequences)
        if self._waiting and not any(other.refused for other in self._cohorts):
            self._add_new(cohort, chunks, sequences, budget, now)
        if not chunks:
            return None
        for sequence in sequences:
            sequence.in_flight = True
        added = tuple(sequence.state() for sequence in sequences[first_new:])
        step = Step(self._next_step, cohort.number, tuple(chunks), added, self.take_removed())
        self._next_step += 1
        cohort.in_flight = True
        self._steps[step.number] = cohort, sequences
        return step

    def _add_live(self, cohort: _Cohort, chunks: list[Chunk], sequences: list[Sequence]) -> int:
        """Append the chunks of live sequences; return how many tokens the step has room for besides."""
        budget = self._max_batch_tokens
        no_blocks = self.blocks.no_blocks
        for sequence in (*cohort.decoding, *cohort.prefilling):
            if not budget:
                break
            start, tokens = sequence.computed, sequence.tokens
            total = len(tokens)
            stop = total if total - start <= budget else start + budget
            blocks = no_blocks
            if stop > sequence.table.capacity:
                more = self.blocks.grow(sequence.table, stop)
                if more is None:
                    cohort.refused = True
                    self.stalled += 1
                    continue
                blocks = more
            chunks.append(Chunk(sequence.id, start, tuple(tokens[start:stop]), stop == total, blocks))
            sequences.append(sequence)
            sequence.computed = stop
            budget -= stop - start
        return budget

    def _add_new(
        self, cohort: _Cohort, chunks: list[Chunk], sequences: list[Sequence], budget: int, now: float
    ) -> None:
        """Append the first chunks of sequences that wait, in order, while there is room for the first of them."""
        live = sum(map(len, self._cohorts))
        share = -(-len(self.sequences) // len(self._cohorts))  # so that cohorts have as many sequences each
        while self._waiting and budget and live < self._max_requests and len(cohort) < share:
            sequence = self._waiting[0]
            if sequence.ended:
                self._waiting.popleft()
                continue
            if sequence.id in self._ending:  # the executor has to forget that one first
                return
            tokens, table = sequence.tokens, sequence.table
            start = self.blocks.admit(sequence.id, tokens, budget, share=sequence.prompt_logprobs is None)
            if start is None:
                cohort.refused = True
                return
            self._waiting.popleft()
            cohort.prefilling[sequence] = None
            live += 1
            sequence.cohort = cohort.number
            sequence.scheduled_s = now
            sequence.waited_for_kv_s = self.short_of_kv_s - sequence.short_of_kv_s
            sequence.cached_tokens = start
            stop = sequence.computed = min(start + budget, len(tokens))
            blocks = tuple(map(tuple, table.blocks))
            chunks.append(Chunk(sequence.id, start, tuple(tokens[start:stop]), stop == len(tokens), blocks))
            sequences.append(sequence)
            budget -= stop - start

    def _end(self, sequence: Sequence) -> None:
        """End a sequence. What it has comes free now, or with the step that is in flight."""
        sequence.ended = True
        del self.sequences[sequence.id]
        if sequence.scheduled_s is not None:
            cohort = self._cohorts[sequence.cohort]
            cohort.decoding.pop(sequence, None)
            cohort.prefilling.pop(sequence, None)
        followers = [follower for follower in self._followers.pop(sequence, []) if not follower.ended]
        if followers:  # the next one computes the prompt, in its place
            place = self._waiting.index(sequence) if sequence.scheduled_s is None else 0
            self._waiting.insert(place, followers[0])
            self._followers[followers[0]] = followers[1:]
        if sequence.in_flight:
            self._ending[sequence.id] = sequence
            self.blocks.detach(sequence.id)
        else:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Free what a sequence has that has ended, and of which no step is in flight."""
        if self._ending.get(sequence.id) is sequence:
            del self._ending[sequence.id]
            self.blocks.release(sequence.table)
        else:
            self.blocks.forget(sequence.id)
        if sequence.scheduled_s is not None:
            self._removed.append(sequence.id)
