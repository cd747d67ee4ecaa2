"""What is computed next: live sequences first, then by arrival; nothing is evicted, restarted or computed twice."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import chain

from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.block_pool import BlockTable
from elastic.engines.core.kv_journal import KVJournal
from elastic.engines.core.sequence import UNPLACED, Cohort, Produced, Sequence
from elastic.engines.core.step import ScheduledChunk, SequenceState, Step, StepResult
from elastic.engines.core.step_budget import StepBudget, TokenBudget, short_step
from elastic.planning.pipeline import chunk_cost


class Scheduler:
    """A state machine without threads; its clock says seconds.

    Sequences that decode come first, then those whose prompt is being computed, in chunks that fill the step up to
    its `budget`, then new ones, while at most `max_requests` live. Where one finds no room, new ones wait: they would
    only take the room of those that live, and of those before them.
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
        self.budget: StepBudget = TokenBudget(max_batch_tokens)
        """How many tokens a step may have."""
        self.short_until_s = 0.0
        """Until when, by the clock, steps have fewer tokens of prompts, since somebody waits for their ends."""
        self.sequences: dict[str, Sequence] = {}
        """All that have not ended."""
        self.held: dict[str, Sequence] = {}
        """Those that have stopped, with what they have, for another engine to go on with."""
        self.journal: KVJournal | None = None
        """Where changes of blocks are noted, if somebody wants to know; it frees those of sequences that ended."""
        self.weights: Callable[[], tuple[int, bytes]] = lambda: (0, b"")
        """Says how often the weights have changed, and the name of their present form; empty: the full weights."""
        self.stalled = 0
        """Live sequences that were left out of the last step for want of blocks."""
        self.short_of_kv_s = 0.0
        """A clock that stands still while every sequence that could be computed has the blocks it asks for: by how
        much it went on is how long one that waited meanwhile has waited for blocks, not for its turn."""
        self._max_requests = max_requests
        self._clock = clock
        self._last_s = clock()
        self._weights = 0, b""
        self.cohorts = [Cohort(number) for number in range(cohorts)]  # as many as steps may be in flight
        self._waiting: deque[Sequence] = deque()  # some may have ended
        self._placed: deque[Sequence] = deque()  # they have blocks, and are of no cohort yet; some may have ended
        self._followers: dict[Sequence, list[Sequence]] = {}  # the last first: they wait for blocks of the key
        self._steps: dict[int, tuple[Cohort, list[Sequence]]] = {}  # in flight, by number
        self.steps = 0
        """How many were begun."""
        self._removed: list[str] = []
        self._ending: dict[str, Sequence] = {}  # those that have ended, of which a step is in flight
        self._release: Callable[[BlockTable], object] = blocks.release  # told of what has ended, without a journal

    @property
    def has_work(self) -> bool:
        """True while a sequence has not ended, or a step is in flight."""
        return bool(self.sequences or self._steps)

    def add(self, states: SequenceOf[SequenceState], computed: Mapping[str, int] | None = None) -> None:
        """Queue the answers of one request; the later ones share the blocks of the prompt that the first computes.

        `computed`: of those that have blocks already, by name, how many tokens have keys and values in these. Raises
        `CapacityError` and `Overloaded` like `BlockManager.expect`, and nothing is queued.
        """
        request = states[0].request
        self.blocks.expect([state.id for state in states], len(request.prompt) + request.max_tokens)
        added = [Sequence(state, self.blocks.tables[state.id], self.short_of_kv_s) for state in states]
        for sequence in added if computed else ():
            sequence.computed = sequence.cached_tokens = (computed or {}).get(sequence.id, 0)
            if sequence.computed:
                self._note_blocks(sequence)
                sequence.table.private |= bool(self._weights[1])
        self._queue(added)

    def cancel(self, sequence: str) -> Sequence | None:
        """End a sequence; return it. Unknown or ended: None. What a step in flight uses comes free with the step."""
        cancelled = self.sequences.get(sequence)
        if cancelled is not None:
            self._end(cancelled)
        return cancelled

    def export(self, sequence: str) -> SequenceState | None:
        """End a sequence here so that another engine goes on with it; a token that is in flight is dropped."""
        cancelled = self.cancel(sequence)
        return None if cancelled is None else cancelled.state()

    def hold(self, sequences: SequenceOf[str]) -> list[Sequence]:
        """Stop sequences of one request, of which no step is in flight; those that are unknown are left out.

        They keep what they have, and are told of as if they lived, until `resume` or `release`.
        """
        held = [self.sequences[name] for name in sequences if name in self.sequences]
        for sequence in held:
            assert not sequence.in_flight, sequence.id
            del self.sequences[sequence.id]
            self.held[sequence.id] = sequence
            self._followers.pop(sequence, None)
            sequence.cohort.remove(sequence)
            for queue in (self._waiting, self._placed):
                if sequence in queue:
                    queue.remove(sequence)
        return held

    def resume(self, sequences: SequenceOf[Sequence]) -> None:
        """Go on with sequences that were held together."""
        for sequence in sequences:
            del self.held[sequence.id]
        self._queue(sequences, front=True)

    def release(self, sequence: Sequence) -> None:
        """End a sequence that was held."""
        del self.held[sequence.id]
        sequence.ended = True
        self._free(sequence)

    def schedule(self) -> Step | None:
        """Choose the next step, of a cohort that has none in flight; None if nothing can go on now."""
        self._note_weights()
        now = self._clock()
        if any(cohort.refused for cohort in self.cohorts):
            self.short_of_kv_s += now - self._last_s
        self._last_s = now
        if self._placed:
            self._place(now)
        step = self._first_step(now)
        for _ in range(len(self._placed)):
            if step is not None or self._steps:
                break
            self._exchange_places(now)
            step = self._first_step(now)
        return step

    def _first_step(self, now: float) -> Step | None:
        self.stalled = 0
        for cohort in sorted(self.cohorts, key=len) if len(self.cohorts) > 1 else self.cohorts:
            if not cohort.in_flight and (step := self._step_of(cohort, now)):
                return step
        return None

    def update(self, step: Step, result: StepResult) -> list[Produced]:
        """Note what came of a step; return its tokens, in order. Sequences that ended meanwhile bring none."""
        self._note_weights()
        cohort, sequences = self._close_step(step)
        produced: list[Produced] = []
        sampled = iter(result.sampled)
        size, shares = self.blocks.block_tokens, self.blocks.shares
        journal, no_blocks = self.journal, self.blocks.no_blocks
        for chunk, sequence in zip(step.chunks, sequences, strict=True):
            token = next(sampled) if chunk.samples else None
            sequence.in_flight = 0
            if sequence.ended:
                self._free(sequence)
                continue
            if journal is not None and (chunk.blocks is not no_blocks or len(chunk.tokens) > 1 or not chunk.samples):
                journal.note_chunk(sequence, chunk)
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
                self._waiting.extendleft(self._followers.pop(sequence, []))
            finish = sequence.append(token.token)
            produced.append(Produced(sequence, token, finish))
            if finish is not None:
                self._end(sequence)
        return produced

    def fail(self, step: Step) -> list[Sequence]:
        """End the sequences of a step that failed; return those that had not ended meanwhile."""
        _, sequences = self._close_step(step)
        failed = [sequence for sequence in sequences if not sequence.ended]
        for sequence in sequences:
            sequence.in_flight = 0
            (self._free if sequence.ended else self._end)(sequence)
        return failed

    def take_removed(self) -> tuple[str, ...]:
        """Return the sequences that the executor can forget; they will be in no step then."""
        removed, self._removed = tuple(self._removed), []
        return removed

    # -- inside

    def _note_weights(self) -> None:
        """Where the weights have changed, have nobody share what a step computes now of sequences that live."""
        weights = self.weights()
        if weights != self._weights:
            self._weights = weights
            for sequence in chain(self.sequences.values(), self.held.values()):
                sequence.table.private |= sequence.table.capacity > 0

    def _close_step(self, step: Step) -> tuple[Cohort, list[Sequence]]:
        """Have a step be in flight no more; return whose it was."""
        cohort, sequences = self._steps.pop(step.number)
        cohort.in_flight = False
        return cohort, sequences

    def _step_of(self, cohort: Cohort, now: float) -> Step | None:
        cohort.refused = False
        chunks: list[ScheduledChunk] = []
        sequences: list[Sequence] = []
        added: list[Sequence] = []
        budget = self._add_live(cohort, chunks, sequences, added)
        first_new = len(sequences)
        if self._waiting and not any(other.refused for other in self.cohorts):
            self._add_new(cohort, chunks, sequences, budget, now)
        if not chunks:
            return None
        for chunk, sequence in zip(chunks, sequences, strict=True):
            sequence.in_flight = len(chunk.tokens)
        added += sequences[first_new:]
        for sequence in added:
            sequence.known = True
        states = tuple(sequence.state() for sequence in added)
        step = Step(self.steps, cohort.number, tuple(chunks), states, self.take_removed())
        self.steps += 1
        cohort.in_flight = True
        self._steps[step.number] = cohort, sequences
        return step

    def _queue(self, sequences: SequenceOf[Sequence], *, front: bool = False) -> None:
        """Have the answers of one request be computed: those that have blocks as soon as they can, others in turn."""
        request = sequences[0].request
        self.sequences.update((sequence.id, sequence) for sequence in sequences)
        begun = [sequence for sequence in sequences if sequence.computed]
        new = [sequence for sequence in sequences if not sequence.computed]
        self._placed.extend(begun)
        if new and self.blocks.shares and len(request.prompt) > self.blocks.block_tokens:
            leader = next((sequence for sequence in begun if sequence.computed < len(request.prompt)), None)
            if leader is not None:
                self._followers[leader], new = new[::-1], []
            elif not begun:
                self._followers[new[0]], new = new[:0:-1], new[:1]
        if front:
            self._waiting.extendleft(reversed(new))
        else:
            self._waiting.extend(new)

    def _place(self, now: float) -> None:
        """Have sequences that have blocks join cohorts, in order, while at most `max_requests` live."""
        live = sum(map(len, self.cohorts))
        while self._placed and live < self._max_requests:
            sequence = self._placed[0]
            if not sequence.ended:
                if sequence.id in self._ending:  # the executor has to forget that one first
                    return
                if sequence.cohort is UNPLACED:
                    sequence.cohort = min(self.cohorts, key=len)
                cohort = sequence.cohort
                if cohort.salt != sequence.table.salt:
                    sequence.table.use_salt(cohort.salt)
                (cohort.prefilling if sequence.in_prompt else cohort.decoding)[sequence] = None
                if not sequence.in_prompt:  # those that wait for its prompt wait for no step
                    self._waiting.extendleft(self._followers.pop(sequence, []))
                if sequence.scheduled_s is None:
                    sequence.scheduled_s = now
                live += 1
            self._placed.popleft()

    def _exchange_places(self, now: float) -> None:
        """Have the first one without a place in a cohort get that of one which lacks blocks: it may have those."""
        stalled = next(sequence for cohort in self.cohorts for sequence in (*cohort.decoding, *cohort.prefilling))
        stalled.cohort.remove(stalled)
        self._place(now)
        self._placed.append(stalled)

    def _note_blocks(self, sequence: Sequence) -> None:
        """Have others share the blocks of a sequence that begins with some, and be told of them."""
        if self.blocks.shares:
            self.blocks.share_computed(sequence.table, sequence.tokens, sequence.computed)
        if self.journal is not None:
            self.journal.note_computed([sequence])

    def _add_live(
        self, cohort: Cohort, chunks: list[ScheduledChunk], sequences: list[Sequence], added: list[Sequence]
    ) -> int:
        """Append the chunks of live sequences; return how many tokens the step has room for besides.

        Those that the executor does not know yet are `added`.
        """
        budget = self.budget.tokens((sequence.computed for sequence in cohort.decoding), self._queue_of(cohort))
        budget = short_step(budget, len(cohort.decoding)) if self._last_s < self.short_until_s else budget
        no_blocks = self.blocks.no_blocks
        for sequence in (*cohort.decoding, *cohort.prefilling):
            if not budget:
                break
            start, tokens, total = sequence.computed, sequence.tokens, len(sequence.tokens)
            stop = total if total - start <= budget else start + budget
            blocks = self.blocks.grow(sequence.table, stop) if stop > sequence.table.capacity else no_blocks
            if blocks is None:
                cohort.refused = True
                self.stalled += 1
                continue
            if not sequence.known:
                blocks = tuple(map(tuple, sequence.table.blocks))
                added.append(sequence)
            chunks.append(ScheduledChunk(sequence.id, start, tuple(tokens[start:stop]), stop == total, blocks))
            sequences.append(sequence)
            sequence.computed = stop
            budget -= stop - start
        return budget

    def _queue_of(self, cohort: Cohort) -> Iterator[chunk_cost.Chunk]:
        """Give what is left of the prompts that a cohort may compute, in order."""
        for sequence in chain(cohort.prefilling, self._waiting):
            if not sequence.ended:
                yield chunk_cost.Chunk(sequence.id, sequence.computed, len(sequence.tokens) - sequence.computed)

    def _add_new(
        self, cohort: Cohort, chunks: list[ScheduledChunk], sequences: list[Sequence], budget: int, now: float
    ) -> None:
        """Append the first chunks of sequences that wait, in order, while there is room for the first of them."""
        live = sum(map(len, self.cohorts))
        most = -(-len(self.sequences) // len(self.cohorts))  # so that cohorts have as many sequences each
        while self._waiting and budget and live < self._max_requests and len(cohort) < most:
            sequence = self._waiting[0]
            if sequence.ended:
                self._waiting.popleft()
                continue
            if sequence.id in self._ending:  # the executor has to forget that one first
                return
            tokens, table = sequence.tokens, sequence.table
            share, salt = sequence.prompt_logprobs is None, cohort.salt
            start = self.blocks.admit(sequence.id, tokens, budget, share=share, salt=salt, form=self._weights[1])
            if start is None:
                cohort.refused = True
                return
            self._waiting.popleft()
            cohort.prefilling[sequence] = None
            live += 1
            sequence.cohort = cohort
            sequence.scheduled_s = now
            sequence.waited_for_kv_s = self.short_of_kv_s - sequence.short_of_kv_s
            sequence.cached_tokens = start
            stop = sequence.computed = min(start + budget, len(tokens))
            blocks = tuple(map(tuple, table.blocks))
            chunks.append(ScheduledChunk(sequence.id, start, tuple(tokens[start:stop]), stop == len(tokens), blocks))
            sequences.append(sequence)
            budget -= stop - start

    def _end(self, sequence: Sequence) -> None:
        """End a sequence. What it has comes free now, or with the step that is in flight."""
        sequence.ended = True
        del self.sequences[sequence.id]
        sequence.cohort.remove(sequence)
        followers = self._followers.pop(sequence, [])
        while followers and followers[-1].ended:
            followers.pop()
        if followers:  # the next one computes the prompt, in its place
            self._waiting.insert(self._waiting.index(sequence) if sequence in self._waiting else 0, followers[-1])
            self._followers[followers.pop()] = followers
        if len(self._waiting) > 2 * len(self.sequences) + 64:  # most have ended
            self._waiting = deque(each for each in self._waiting if not each.ended)
        if sequence.in_flight:
            self._ending[sequence.id] = sequence
            self.blocks.detach(sequence.id)
        else:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Free what a sequence has that has ended, and of which no step is in flight."""
        if self._ending.get(sequence.id) is sequence:
            del self._ending[sequence.id]
        else:
            self.blocks.detach(sequence.id)
        if self.journal is not None:
            self.journal.end(sequence.id, sequence.table)
        else:
            self._release(sequence.table)
        if sequence.known:
            self._removed.append(sequence.id)
