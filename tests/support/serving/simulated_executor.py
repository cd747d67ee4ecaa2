"""An executor and its memory without a model: what is written to a block says which tokens it was computed from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from elastic.engines.base import SampledToken
from elastic.engines.core.step import ScheduledChunk, SequenceState, Step, StepResult
from elastic.errors import CapacityError, Overloaded

VOCABULARY = 7
Content = tuple[int, int] | None
"""Position, and the hash of all tokens up to there."""


def next_token(seed: int, tokens: list[int]) -> int:
    """What the simulated model says after `tokens`: it depends on all of them."""
    return hash((seed, *tokens)) % VOCABULARY


class SimulatedMemory:
    """Sectors that are only counted: a `SectorMemory`. `limit` binds new sequences, `maximum` those that live."""

    def __init__(
        self,
        total: int,
        blocks_per_sector: tuple[int, ...],
        *,
        promised: Callable[[], int],
        reusable: Callable[[], int],
        give_up_reusable: Callable[[int], object],
    ) -> None:
        self.lock = threading.RLock()
        self.total = self.limit = self.maximum = total
        self.promised, self.reusable, self.give_up_reusable = promised, reusable, give_up_reusable
        self.allocated: list[set[int]] = [set() for _ in blocks_per_sector]
        self._free = list(range(total))
        self._sizes = blocks_per_sector

    @property
    def used_sectors(self) -> int:
        return sum(map(len, self.allocated)) - self.reusable()

    @property
    def reusable_limit(self) -> int:
        return self.total // 2

    def blocks_per_sector(self, group: int) -> int:
        return self._sizes[group]

    def room(self, *, growing: bool) -> int:
        return max(0, (self.maximum if growing else min(self.limit, self.maximum)) - self.used_sectors)

    def require_possible(self, sectors: int, what: str) -> None:
        if sectors > self.maximum:
            raise CapacityError(f"{what} never fits", requested_bytes=sectors, free_bytes=0, total_bytes=self.maximum)
        if sectors > self.limit:
            raise Overloaded(what, retry_after_s=1.0)

    def allocate(self, group: int) -> int:
        excess = sum(map(len, self.allocated)) + 1 - self.maximum
        if excess > 0:
            self.give_up_reusable(excess)
        if sum(map(len, self.allocated)) >= self.maximum:
            raise CapacityError("no sector", requested_bytes=1, free_bytes=0, total_bytes=self.maximum)
        sector = self._free.pop()
        self.allocated[group].add(sector)
        return sector

    def free(self, group: int, sector: int) -> None:
        self.allocated[group].remove(sector)
        self._free.append(sector)

    def take(self, sectors: int) -> bool:
        """Have weights take sectors, if live sequences can do without."""
        if self.used_sectors + self.promised() + sectors > self.maximum:
            return False
        self.maximum -= sectors
        self.give_up_reusable(sum(map(len, self.allocated)) - self.maximum)
        return True

    def give(self, sectors: int) -> None:
        """Have weights give back what they took."""
        self.maximum += sectors

    def check(self) -> None:
        """Raise `AssertionError` where more is allocated than there is."""
        mapped = [sector for group in self.allocated for sector in group]
        assert len(mapped) <= self.maximum
        assert sorted([*mapped, *self._free]) == list(range(self.total))

    def close(self) -> None:
        """Hold nothing."""


@dataclass
class _Running:
    state: SequenceState
    tokens: list[int]
    blocks: list[list[int]]
    computed: int = 0


@dataclass
class SimulatedExecutor:
    """Computes a step when told to, in order; raises `AssertionError` where a step makes no sense."""

    windows: tuple[int | None, ...]
    block_tokens: int
    computed: dict[str, int] = field(default_factory=dict)
    """Tokens computed of each sequence since it was added."""
    running: dict[str, _Running] = field(default_factory=dict)
    _content: dict[tuple[int, int, int], Content] = field(default_factory=dict)
    _queue: deque[tuple[Step, Future[StepResult]]] = field(default_factory=deque)

    def execute(self, step: Step) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._queue.append((step, future))
        return future

    def remove(self, sequences: tuple[str, ...]) -> None:
        for sequence in sequences:
            self.running.pop(sequence, None)

    def compute(self, *, fail: bool = False) -> tuple[Step, StepResult | None]:
        """Compute the oldest step; None: it fails, and what it wrote makes no sense."""
        step, future = self._queue.popleft()
        self.remove(step.removed)
        for state in step.added:
            assert state.id not in self.running, f"{state.id} was not removed"
            tokens = [*state.request.prompt, *state.generated]
            self.computed[state.id] = 0
            self.running[state.id] = _Running(state, tokens, [[] for _ in self.windows])
        assert len({chunk.sequence for chunk in step.chunks}) == len(step.chunks)
        sampled = [self._compute(chunk, fail=fail) for chunk in step.chunks]
        if fail:
            self.remove(tuple(chunk.sequence for chunk in step.chunks))
            return step, None
        result = StepResult(tuple(token for token in sampled if token is not None))
        future.set_result(result)
        return step, result

    def _compute(self, chunk: ScheduledChunk, *, fail: bool) -> SampledToken | None:
        sequence = self.running[chunk.sequence]
        for held, more in zip(sequence.blocks, chunk.blocks, strict=True):
            held += more
        first = not sequence.computed
        assert first or chunk.start == sequence.computed
        stop = chunk.start + len(chunk.tokens)
        assert tuple(sequence.tokens[chunk.start : stop]) == chunk.tokens
        for group, window in enumerate(self.windows):
            past = range(0 if window is None else max(0, chunk.start - window + 1), chunk.start)
            for position in past:
                expected = position, hash(tuple(sequence.tokens[: position + 1]))
                assert self._content.get(self._slot(sequence, group, position)) == expected
            for position in range(chunk.start, stop):
                content = None if fail else (position, hash(tuple(sequence.tokens[: position + 1])))
                self._content[self._slot(sequence, group, position)] = content
        sequence.computed = stop
        self.computed[chunk.sequence] += len(chunk.tokens)
        assert chunk.samples is (stop == len(sequence.tokens))
        if not chunk.samples or fail:
            return None
        sequence.tokens.append(next_token(sequence.state.seed, sequence.tokens))
        return SampledToken(sequence.tokens[-1])

    def _slot(self, sequence: _Running, group: int, position: int) -> tuple[int, int, int]:
        window = self.windows[group]
        block, place = divmod(position if window is None else position % window, self.block_tokens)
        return group, sequence.blocks[group][block], place
