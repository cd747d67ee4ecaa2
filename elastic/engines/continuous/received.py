"""Blocks that were taken for requests which may come from another engine, and what is in them so far."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import takewhile

from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.block_pool import BlockTable
from elastic.engines.core.kv_state import KVSource, SequenceKV
from elastic.engines.core.step import SequenceState
from elastic.engines.executor.kv_copy import BlockCopier, changed_blocks
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.errors import ConfigError, Overloaded, StateError
from elastic.kvcache.storage.paged import BlockMemory


@dataclass
class ReceivedKV:
    """Of one sequence."""

    state: SequenceState
    """As it was told first."""
    table: BlockTable
    computed: int
    """Tokens whose keys and values are here."""
    source: tuple[tuple[int, ...], ...] = ()
    """The blocks that they were copied from, by group."""

    def is_of(self, state: SequenceState, kv: SequenceKV | None = None) -> bool:
        """Return whether it is of that answer, and not of another with its name; and lies where it did, by `kv`."""
        if kv is not None and any(a[: len(b)] != b for a, b in zip(kv.blocks, self.source, strict=True)):
            return False
        theirs, ours = (replace(each.request, arrived_s=None) for each in (state, self.state))
        return (theirs, state.seed) == (ours, self.state.seed)

    def alike(self, kv: SequenceKV, block_tokens: int) -> int:
        """Count the first blocks that another sequence shares with it at their source; they are full."""
        pairs = zip(*(zip(a, b, strict=False) for a, b in zip(self.source, kv.blocks, strict=True)), strict=False)
        common = sum(1 for _ in takewhile(lambda groups: all(a == b for a, b in groups), pairs))
        return min(common, self.computed // block_tokens, kv.computed // block_tokens)


@dataclass
class _Reservation:
    """Of one request."""

    sequences: dict[str, ReceivedKV] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while something is copied, so that no block comes free under it."""
    wanted: bool = True


class ReceivedRequests:
    """Thread-safe. Copies run on the threads that ask for them, beside the engine's own."""

    def __init__(self, blocks: BlockManager, memory: BlockMemory, exchange: KVExchange) -> None:
        self._blocks = blocks
        self._memory = memory
        self._exchange, self._format = exchange, exchange.format
        self._lock = threading.Lock()  # of the two below
        self._requests: dict[str, _Reservation] = {}
        self._closed = False
        self.refusal = ""
        """Why nothing is received, nor handed over; empty: it may be."""

    def refuse(self, why: str) -> None:
        """Receive nothing more until `refusal` is empty. Raises `StateError` while something is received."""
        with self._lock:
            if self._requests:
                raise StateError(f"requests {sorted(self._requests)} are being received; try again when they are here")
            self.refusal = why

    def require_allowed(self) -> None:
        """Raise `StateError` where requests cannot move with their keys and values."""
        if self.refusal:
            raise StateError(f"no request can be moved with its keys and values: {self.refusal}")

    def receive(
        self,
        states: Sequence[SequenceState],
        kv: Sequence[SequenceKV],
        source: KVSource,
        *,
        coordinated: bool = False,
    ) -> int:
        """Copy what is not here yet; return bytes. Whatever it raises, nothing of the request is kept.

        `coordinated`: in chunks, behind what computes.
        """
        if source.format != self._format:
            raise ConfigError(f"keys and values of the form {source.format} cannot be taken; here it is {self._format}")
        request = states[0].request.id
        with self._lock:
            if self._closed:
                raise StateError("the engine has stopped; make a new one")
            self.require_allowed()
            reservation = self._requests.setdefault(request, _Reservation())
        with reservation.lock:
            try:
                by_name = {each.sequence: each for each in kv}
                if not self._goes_on(reservation, states, by_name):
                    self._free(reservation)
                peers, pace = self._exchange.peers, self._exchange.pace if coordinated else None
                copier = BlockCopier(self._memory, source, lambda: reservation.wanted, peers=peers, pace=pace)
                with closing(copier):
                    return sum(
                        self._receive(reservation, state, by_name[state.id], copier)
                        for state in states
                        if state.id in by_name
                    )
            except BaseException:
                with self._lock:
                    if self._requests.get(request) is reservation:
                        del self._requests[request]
                reservation.wanted = False
                self._free(reservation)
                raise

    def take(self, states: Sequence[SequenceState], kv: Sequence[SequenceKV]) -> dict[str, ReceivedKV]:
        """Return what was received of a request's sequences, as far as it is of use; it is the caller's now."""
        request = states[0].request.id
        with self._lock:
            reservation = self._requests.pop(request, None)
        if reservation is None:
            return {}
        with reservation.lock:
            by_name = {each.sequence: each for each in kv}
            taken = {}
            for state in states:
                received = reservation.sequences.get(state.id)
                if received is not None and self._usable(received, state, by_name.get(state.id)):
                    taken[state.id] = reservation.sequences.pop(state.id)
                    received.table.private = not by_name[state.id].exact
            reservation.wanted = False
            self._free(reservation)
            return taken

    def give_up(self, request: str) -> bool:
        """Free what was received for a request; return whether there was something."""
        with self._lock:
            reservation = self._requests.pop(request, None)
        if reservation is None:
            return False
        reservation.wanted = False  # a copy that is under way ends early
        with reservation.lock:
            self._free(reservation)
        return True

    def close(self) -> None:
        """Free everything, and take no more."""
        with self._lock:
            self._closed = True
            requests = list(self._requests)
        for request in requests:
            self.give_up(request)

    # -- inside, under the lock of the reservation

    def _goes_on(
        self, reservation: _Reservation, states: Sequence[SequenceState], kv: Mapping[str, SequenceKV]
    ) -> bool:
        """Return whether what is here is the beginning of what is there, and not of an earlier life of the request."""
        received = [(reservation.sequences[state.id], state) for state in states if state.id in reservation.sequences]
        return all(each.is_of(state, kv.get(state.id)) for each, state in received)

    def _receive(self, reservation: _Reservation, state: SequenceState, kv: SequenceKV, copier: BlockCopier) -> int:
        """Copy what is not here yet of one sequence; return bytes."""
        if not reservation.wanted:
            raise StateError(f"request {state.request.id!r} was given up while it was received")
        received = self._blocks_of(reservation, state, kv)
        if received is None:
            return 0
        start, copied = received.computed, 0
        for group, window in enumerate(self._format.windows):
            changed = changed_blocks(start, kv.computed, self._format.block_tokens, window)
            sources, targets = kv.blocks[group], received.table.blocks[group]
            if changed and changed[-1] >= len(sources):
                raise StateError(f"{kv.sequence!r} has {kv.computed} tokens, but only {len(sources)} blocks were told")
            copied += copier.copy(group, [(sources[i], targets[i]) for i in changed])
        received.computed, received.source = max(start, kv.computed), kv.blocks
        return copied

    def _blocks_of(self, reservation: _Reservation, state: SequenceState, kv: SequenceKV) -> ReceivedKV | None:
        """Return a sequence with blocks for so many tokens; None if it has to be computed anew anyhow."""
        request, computed = state.request, kv.computed
        if state.scores_prompt:
            return None  # those of its tokens so far are known where they were computed, and nowhere else
        if not computed:
            return None
        most = len(request.prompt) + request.max_tokens
        if not computed < most:
            raise ConfigError(f"{state.id!r} has {computed} computed tokens of {most}; one must be to come")
        received = reservation.sequences.get(state.id)
        if received is None:
            size, others = self._format.block_tokens, reservation.sequences.values()
            nearest = max(others, key=lambda other: other.alike(kv, size), default=None)
            like, alike = (None, 0) if nearest is None else (nearest.table, nearest.alike(kv, size))
            tokens = (*request.prompt, *state.generated)
            table, shared = self._blocks.reserve(most, tokens, computed, like, alike)
            received = reservation.sequences[state.id] = ReceivedKV(state, table, shared)
        elif computed > received.table.capacity and self._blocks.grow(received.table, computed) is None:
            raise Overloaded(f"there are no blocks for {computed} tokens of {state.id!r} now", retry_after_s=1.0)
        return received

    def _usable(self, received: ReceivedKV, state: SequenceState, kv: SequenceKV | None) -> bool:
        """Return whether a sequence can begin with what was received of it, and note how many tokens that are."""
        last = len(state.request.prompt) + len(state.generated) - 1
        if kv is None or not received.is_of(state):
            return False
        if any(window is not None for window in self._format.windows):
            # behind a window tokens take the places of those before them: it is all as it was then, or it is of no use
            return received.computed == kv.computed <= last
        received.computed = min(received.computed, last)
        return received.computed > 0

    def _free(self, reservation: _Reservation) -> None:
        for received in reservation.sequences.values():
            self._blocks.release(received.table)
        reservation.sequences.clear()
