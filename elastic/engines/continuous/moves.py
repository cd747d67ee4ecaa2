"""Requests that move between engines with their keys and values: the part of an engine that gives and takes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from elastic.clock import settle
from elastic.engines.base import Request
from elastic.engines.continuous.active_requests import ActiveRequests
from elastic.engines.continuous.received import ReceivedKV, ReceivedRequests
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.kv_journal import KVJournal
from elastic.engines.core.kv_state import KVFormat, KVReport, KVSource, SectorPages, SequenceKV
from elastic.engines.core.load import EngineLoad
from elastic.engines.core.sequence import Sequence as LiveSequence
from elastic.engines.core.step import SequenceState
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.engines.executor.kv_room import KVHeadroom, kv_room
from elastic.engines.pipeline.home import HomeExecutor
from elastic.errors import CapacityError, ConfigError, ElasticError, Overloaded, StateError
from elastic.kvcache.storage.paged import BlockMemory
from elastic.types import RankMemory

logger = logging.getLogger(__name__)
T = TypeVar("T")


class MovingRequests:
    """What a rank asks of its engine. Thread-safe; not for listeners, which run on the engine's own thread.

    A request moves in rounds: the engine that gets it calls `receive` with what `locate` says, again and again while
    the other one goes on, then `hand_over` stops it there, one more `receive` copies the rest, and `adopt` begins it.
    The other one `release`s it then; or it is `take_back`, and the one that would have got it is told to `give_up`.
    """

    kv_format: KVFormat
    on_step: Callable[[KVReport | None], None] | None = None
    """Set before `start`: told what has changed after each step, once its outputs were told and before any block that
    came free has another owner; on the engine's thread, which waits for it. None while layers change their rank, or
    have copies: then nobody can go on from what is here."""
    on_room: Callable[[], object] | None = None
    """Set before `start`: told, on the engine's thread, when blocks came free behind what `on_step` was told, and no
    step follows with which that could be told."""

    _blocks: BlockManager
    _memory: BlockMemory
    _loop: StepLoop
    _requests: ActiveRequests
    _received: ReceivedRequests
    _thread: threading.Thread | None
    _kv_exchange: KVExchange
    _home: HomeExecutor
    _held: dict[str, list[LiveSequence]]  # requests that were handed over: for the loop's thread
    _load = EngineLoad()

    # -- what is where

    def kv_source(self) -> KVSource:
        """Say where others can read the KV cache: processes of the host, unless it is a GPU's, and ranks."""
        pool, rank = self._memory.kv.pool, self._home.path.home
        file = pool.backend.shared_file()
        return KVSource(file, pool.page_bytes, self.kv_format, memory=RankMemory(rank, pool.name))

    def load(self) -> EngineLoad:
        """Return how much there is to do; of before, where somebody moves memory just now. It never waits."""
        memory, steps = self._memory, self._loop.scheduler.steps
        error = self._loop.lost
        lost = error.rank if error is not None else ""
        if not memory.lock.acquire(blocking=False):
            return replace(self._load, steps=steps, lost_rank=lost)
        try:
            total = memory.capacity * memory.blocks_per_sector(0)
            blocks = self._blocks
            self._load = EngineLoad(blocks.running, blocks.waiting, blocks.free_blocks(), total, steps, lost)
            return self._load
        finally:
            memory.lock.release()

    def kv_room(self) -> KVHeadroom:
        """Return what the memory of the KV cache could hold."""
        with self._memory.lock:
            return kv_room(self._memory, [pool.held for pool in self._blocks.pools])

    def locate(self, request: str) -> tuple[SequenceKV, ...]:
        """Say where the KV of a request's answers lies, between two steps; none: it is unknown, or has not begun."""

        def look() -> tuple[SequenceKV, ...]:
            self._received.require_allowed()
            scheduler = self._loop.scheduler
            sequences = (
                scheduler.sequences.get(name) or scheduler.held.get(name) for name in self._requests.sequences(request)
            )
            located = [sequence.kv() for sequence in sequences if sequence is not None]
            return tuple(kv for kv in located if kv.computed)

        return self._between_steps(look)

    def check(self) -> None:
        """Recount the blocks of all sequences, and of those that were handed over or may come; see `BlockManager`."""
        self._blocks.check()

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
        if request in self._requests:
            raise ConfigError(f"request id {request!r} is in use here; it cannot be received")
        if self._thread is None:
            raise StateError("the engine is not serving; start it first")
        try:
            return self._received.receive(states, kv, source, coordinated=coordinated)
        except ElasticError:
            self._loop.wake()  # blocks may have come free
            raise

    def give_up(self, request: str) -> None:
        """Free what was received for a request that does not come; unknown: nothing happens."""
        if self._received.give_up(request):
            self._loop.wake()

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
            self._received.require_allowed()
            if request not in self._held:
                self._loop.settle(self._requests.sequences(request))
                held = self._loop.scheduler.hold(self._requests.sequences(request))
                if not held:
                    return None
                self._held[request] = held
            held = self._held[request]
            kv = tuple(replace(each.kv(), exact=each.table.exact) for each in held if each.computed)
            return tuple(sequence.state() for sequence in held), kv

        return self._between_steps(leave)

    def release(self, request: str) -> None:
        """Free the blocks of a request that was handed over; unknown: nothing happens."""

        def free() -> None:
            for sequence in self._held.pop(request, ()):
                self._loop.scheduler.release(sequence)
                self._requests.forget(request, "moved")

        self._between_steps(free)

    def take_back(self, request: str) -> None:
        """Go on with a request that was handed over, as if nothing had been. Raises `StateError` if it was not."""

        def go_on() -> None:
            if request not in self._held:
                raise StateError(f"request {request!r} was not handed over, or was released; it cannot be taken back")
            self._loop.scheduler.resume(self._held.pop(request))

        self._between_steps(go_on)

    # -- inside

    def _between_steps(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do something between two steps; return or raise what it does."""
        if threading.current_thread() is self._thread:
            raise StateError("a listener cannot ask its engine to move a request; use another thread")
        if self._thread is None:
            raise StateError("the engine is not serving; start it first")
        done: Future[T] = Future()
        self._loop.post(partial(settle, done, work))
        return done.result()

    def _take_received(
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
        return self._received.take(states, kv)

    def _end_moves(self) -> None:
        """Free what was received, when the loop has ended: it has released what was handed over."""
        self._received.close()
        for request in list(self._held):
            self._requests.forget(request, "moved")
        self._held.clear()

    # -- what others are told of the KV cache, on the loop's thread

    def _tell_kv(self) -> None:
        """Tell from now on what changes of the KV cache, first all that there is, unless that is told already.

        It is told of what is computed here alone: of the other layers only who computes them knows. Where layers have
        several copies nothing is: which of them a sequence goes by is not known elsewhere.
        """
        scheduler, path = self._loop.scheduler, self._home.path
        if self.on_step is None or scheduler.journal is not None or path.copies > 1:
            return
        with self._memory.lock:
            self._memory.log = list(self._memory.mapped_sectors)
        journal = KVJournal(self.on_step, self._mapped_since, self._blocks.release, path.epoch)
        journal.note_computed(scheduler.sequences.values())
        scheduler.journal = journal
        self._loop.on_step, self._loop.on_room = None, self.on_room

    def _tell_no_kv(self) -> None:
        """Tell that what was told of the KV cache means nothing any more, and nothing of it until `_tell_kv`."""
        scheduler = self._loop.scheduler
        journal, scheduler.journal = scheduler.journal, None
        if journal is not None:
            assert self.on_step is not None
            journal.stop(scheduler.sequences)
            self._memory.log = None
            self._loop.on_step = partial(self.on_step, None)

    def _mapped_since(self) -> list[SectorPages]:
        """Take the log of sectors: return where those are that are mapped, in the layers that are computed here."""
        memory, own = self._memory, self._kv_exchange.places_of(self._own_parts)
        with memory.lock:
            log, memory.log = memory.log or [], []
            told = []
            for index, sector in dict.fromkeys(log):
                group = memory.groups[index]
                if sector in group.mapped:
                    layers = tuple(layer for layer in group.layers if layer in own)
                    told.append(SectorPages(index, sector, group.pages_of(sector, layers), layers))
            return told

    @property
    def _own_parts(self) -> frozenset[int]:
        """The parts of the KV cache that this rank's own steps write."""
        path = self._home.path
        return self._kv_exchange.parts_of(path.shards_of(path.home), path.shards)


def one_request(states: Sequence[SequenceState]) -> Request:
    """Return the request that sequences are answers of. Raises `ConfigError` where it is not one."""
    if not states or len({state.request.id for state in states}) > 1:
        raise ConfigError(f"{len(states)} sequences: give those of one request, at least one")
    return states[0].request
