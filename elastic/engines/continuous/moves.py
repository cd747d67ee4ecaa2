"""Requests that move between engines with their keys and values: the part of an engine that gives and takes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic.engines.base import Request
from elastic.engines.continuous.active_requests import ActiveRequests
from elastic.engines.continuous.received import ReceivedKV, ReceivedRequests
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.core.kv_state import KVSource, SequenceKV
from elastic.engines.core.sequence import Sequence as LiveSequence
from elastic.engines.core.step import SequenceState
from elastic.errors import CapacityError, ConfigError, ElasticError, Overloaded, StateError
from elastic.kvcache.storage.paged import BlockMemory

logger = logging.getLogger(__name__)
Departed = Callable[[str, CapacityError], object]
"""Told, on the engine's thread, of a request that has left, and why; other engines may go on with it."""


class MovingRequests:
    """What a rank asks of its engine. Thread-safe; not for listeners, which run on the engine's own thread.

    A request moves in rounds: the engine that gets it calls `receive` with what `locate` says, again and again while
    the other one goes on, then `hand_over` stops it there, one more `receive` copies the rest, and `adopt` begins it.
    The other one `release`s it then; or it is `take_back`, and the one that would have got it is told to `give_up`.
    """

    def __init__(
        self, loop: StepLoop, requests: ActiveRequests, received: ReceivedRequests, memory: BlockMemory
    ) -> None:
        self.held: dict[str, list[LiveSequence]] = {}
        """Requests that were handed over. For the loop's thread."""
        self.on_impossible: Departed | None = None
        """Set before the engine starts: told of a request that never fits here any more; None: it fails."""
        self.on_crowded_out: Departed | None = None
        """The same, of one that left because other models have taken pages of the place since it came."""
        self._loop, self._requests, self.received, self._memory = loop, requests, received, memory

    def locate(self, request: str) -> tuple[SequenceKV, ...]:
        """Say where the KV of a request's answers lies, between two steps; none: it is unknown, or has not begun."""

        def look() -> tuple[SequenceKV, ...]:
            self.received.require_allowed()
            scheduler = self._loop.scheduler
            sequences = (
                scheduler.sequences.get(name) or scheduler.held.get(name) for name in self._requests.sequences(request)
            )
            located = [sequence.kv() for sequence in sequences if sequence is not None]
            return tuple(kv for kv in located if kv.computed)

        return self._loop.between_steps(look)

    # -- where a request goes to

    def receive(
        self, states: Sequence[SequenceState], kv: Sequence[SequenceKV], source: KVSource, *, coordinated: bool = False
    ) -> int:
        """Copy the KV of a request that may come, beside the steps; return bytes. Later calls copy what has changed.

        `source` has the sectors of the blocks. `coordinated`: in chunks, behind what computes here; while the request
        goes on where it was, nobody waits for them. Until `adopt` or `give_up` the blocks are in use here, and what the
        request may still need is promised. Raises `Overloaded` and `CapacityError` where there is no room for it,
        `ConfigError` for another form of blocks, `StateError` where the memory cannot be read: nothing is kept then.
        """
        request = one_request(states).id
        if request in self._requests.active:
            raise ConfigError(f"request id {request!r} is in use here; it cannot be received")
        self._loop.require_started()
        try:
            return self.received.receive(states, kv, source, coordinated=coordinated)
        except ElasticError:
            self._loop.news.set()  # blocks may have come free
            raise

    def take_received(
        self, states: Sequence[SequenceState], kv: Sequence[SequenceKV], source: KVSource | None
    ) -> dict[str, ReceivedKV]:
        """Return the KV that a request comes with, by sequence; with a source it is copied now, if it can be read."""
        if kv and source is not None:
            try:
                self.receive(states, kv, source)
            except (CapacityError, Overloaded):
                raise
            except ElasticError as error:
                logger.warning("%s is computed anew: %s", states[0].request.id, error)
        return self.received.take(states, kv)

    def give_up(self, request: str) -> None:
        """Free what was received for a request that does not come; unknown: nothing happens."""
        if self.received.give_up(request):
            self._loop.news.set()

    # -- where it comes from

    def hand_over(self, request: str) -> tuple[tuple[SequenceState, ...], tuple[SequenceKV, ...]] | None:
        """Stop a request between two steps, for another engine to adopt; its listener gets no further word.

        A step that is in flight is waited for, its tokens are told. The blocks are held until `release` or `take_back`.
        Returns the answers that have not ended, and where the KV of those is that have some; None: it is unknown or
        has ended. Called again it says the same.
        """

        def leave() -> tuple[tuple[SequenceState, ...], tuple[SequenceKV, ...]] | None:
            if self._loop.ended:  # what was held is given back as it ends: nobody could copy it
                raise StateError("the engine has stopped; make a new one")
            self.received.require_allowed()
            if request not in self.held:
                self._loop.settle(self._requests.sequences(request))
                held = self._loop.scheduler.hold(self._requests.sequences(request))
                if not held:
                    return None
                self.held[request] = held
            held = self.held[request]
            kv = tuple(
                replace(each.kv(), exact=not (each.table.form or each.table.private)) for each in held if each.computed
            )
            return tuple(sequence.state() for sequence in held), kv

        return self._loop.between_steps(leave)

    def release(self, request: str) -> None:
        """Free the blocks of a request that was handed over; unknown: nothing happens."""

        def free() -> None:
            for sequence in self.held.pop(request, ()):
                self._loop.scheduler.release(sequence)
                self._requests.forget(request, "moved")

        self._loop.between_steps(free)

    def take_back(self, request: str) -> None:
        """Go on with a request that was handed over, as if nothing had been. Raises `StateError` if it was not."""

        def go_on() -> None:
            if request not in self.held:
                raise StateError(f"request {request!r} was not handed over, or was released; it cannot be taken back")
            self._loop.scheduler.resume(self.held.pop(request))

        self._loop.between_steps(go_on)

    # -- inside the engine

    def refuse(self, why: str) -> None:
        """Have no request move with its keys and values while `received.refusal` says why; `StateError` if one does."""
        self.received.refuse(why)
        if self.held:
            self.received.refusal = ""
            raise StateError(f"requests {sorted(self.held)} are being handed over; try again")

    def end_crowded_out(self) -> None:
        """Let go of what was taken before other models took pages of the place, and can never end now."""
        if self._memory.attainable < self._memory.kv.limits.maximum:
            self.end_impossible(self.on_crowded_out)

    def end_impossible(self, tell: Departed | None) -> None:
        """Let go of what was taken when there was room for it, and never fits here; `tell` of it, or have it fail."""
        scheduler = self._loop.scheduler
        for name, sequence in list(scheduler.sequences.items()):
            if name not in scheduler.sequences:
                continue  # it has left with another answer of its request
            try:
                scheduler.blocks.require_possible(sequence.table.most_tokens)
            except Overloaded:
                pass  # it waits
            except CapacityError as error:
                if tell is None:
                    self._loop.end(name, "failed", str(error))
                else:
                    request = sequence.request.id
                    for answer in self._requests.sequences(request):
                        scheduler.export(answer)
                    self._requests.forget(request, "moved")
                    tell(request, error)

    def close(self) -> None:
        """Free what was received, when the loop has ended: it has released what was handed over."""
        self.received.close()
        for request in list(self.held):
            self._requests.forget(request, "moved")
        self.held.clear()


def one_request(states: Sequence[SequenceState]) -> Request:
    """Return the request that sequences are answers of. Raises `ConfigError` where it is not one."""
    if not states or len({state.request.id for state in states}) > 1:
        raise ConfigError(f"{len(states)} sequences: give those of one request, at least one")
    names, answers = [state.id for state in states], [state.index for state in states]
    if min(len({*names}), len({*answers})) < len(states):
        raise ConfigError(f"{len(states)} sequences {names} are answers {answers}: one is given twice")
    return states[0].request
