"""Requests of a simulated rank that go on at another one, with their keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic.cluster.control.messages import (
    FreeBlocks,
    GiveUp,
    HandedOver,
    HandOver,
    Locate,
    Receive,
    Submit,
    TakeBack,
)
from elastic.engines.core.block_pool import BlockTable
from elastic.engines.core.kv_journal import KVJournal
from elastic.engines.core.kv_state import KVSource, LayersKV, SectorPages, SequenceKV
from elastic.engines.core.sequence import Sequence as LiveSequence
from elastic.engines.core.step import SequenceState
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ElasticError, Overloaded, StateError
from elastic.sim.mechanisms.books import Guest
from elastic.sim.mechanisms.instance import RankInstance
from elastic.sim.mechanisms.wires import Wires

MOVES = Receive | GiveUp | HandOver | Locate | FreeBlocks | TakeBack


@dataclass
class _Received:
    table: BlockTable
    computed: int


class RequestMoves:
    """What is asked at both ends of a move; `report` first, or requests move without their keys and values."""

    def __init__(self, instance: RankInstance, wires: Wires) -> None:
        self._instance, self._wires = instance, wires
        self._received: dict[str, dict[str, _Received]] = {}
        self._held: dict[str, list[LiveSequence]] = {}
        self._reports = False
        instance.take_kv = self._take

    def report(self) -> None:
        """Tell from now on, after each step, what has changed of where keys and values are."""
        self._reports = True
        self.tell_kv(LayerPath.alone(self._instance.name, self._instance.model.layers, self._instance.model.shards))

    def tell_kv(self, path: LayerPath) -> None:
        """Tell so, first all that there is, unless that is told already: of the layers that are computed here alone."""
        scheduler, memory = self._instance.scheduler, self._instance.memory
        if not self._reports or scheduler.journal is not None:
            return
        memory.log = sorted(memory.mapped)
        mapped = partial(self._mapped_since, self._instance.model.kv_parts(path.shards_of(path.home)))
        journal = KVJournal(self._instance.note, mapped, self._instance.blocks.release, path.epoch)
        journal.note_computed(scheduler.sequences.values())
        scheduler.journal = journal

    def tell_no_kv(self) -> None:
        """Tell that what was told means nothing any more, and nothing of it until `tell_kv`."""
        scheduler = self._instance.scheduler
        journal, scheduler.journal = scheduler.journal, None
        if journal is not None:
            journal.stop(scheduler.sequences)
            self._instance.memory.log = None
            self._instance.tell([], [])

    def kept_layers(self, guest: Guest, sectors: Iterable[int]) -> LayersKV:
        """Say where the keys and values of one that has gone are kept here, of so many sectors in each part."""
        model, memory = self._instance.model, self._instance.hello.memory
        pages = dict.fromkeys(sectors, tuple(range(model.part_pages)))
        file = None if memory is None else memory.file
        return LayersKV(file, model.page_bytes, model.kv, dict.fromkeys(model.kv_parts(guest.shards), pages))

    def answer(self, question: MOVES) -> Any:
        """Answer. Raises errors of Elastic."""
        match question:
            case Receive(states, kv):
                return self._receive_between(states, kv)
            case GiveUp(request):
                return self._give_up(request)
            case HandOver(request):
                return self._instance.do_between(partial(self._hand_over, request))
            case Locate(request):
                return self._instance.do_between(partial(self._locate, request))
            case FreeBlocks(request):
                return self._instance.do_between(partial(self._release, request))
            case TakeBack(request):
                return self._instance.do_between(partial(self._take_back, request))

    def receive(self, states: Sequence[SequenceState], kv: Sequence[SequenceKV]) -> Future[int]:
        """Have blocks for a request that may come, and copy what is not here yet; return bytes."""
        request, tokens = states[0].request.id, 0
        there, received = {sent.sequence: sent for sent in kv}, self._received.setdefault(request, {})
        try:
            for state in states:
                if state.id in there and there[state.id].computed:
                    tokens += self._room_for(received, state, there[state.id].computed)
        except ElasticError:
            self._give_up(request)
            raise
        form, done = self._instance.model.kv, Future[int]()
        nbytes = tokens * form.block_bytes * len(form.groups[0][0]) // form.block_tokens
        self._wires.copy((self._instance.name,), nbytes, lambda: done.set_result(nbytes))
        return done

    # -- inside

    def _receive_between(self, states: Sequence[SequenceState], kv: Sequence[SequenceKV]) -> Future[int]:
        """Take the blocks between two steps, for those in flight may need some."""
        done: Future[int] = Future()

        def begin() -> None:
            try:
                self.receive(states, kv).add_done_callback(lambda copied: done.set_result(copied.result()))
            except ElasticError as error:
                done.set_exception(error)

        self._instance.between_steps(begin)
        return done

    def _room_for(self, by_sequence: dict[str, _Received], state: SequenceState, computed: int) -> int:
        """Have blocks for so many tokens of a sequence; return those that are not copied yet."""
        blocks, request = self._instance.blocks, state.request
        if state.id not in by_sequence:
            tokens = (*request.prompt, *state.generated)
            table, _ = blocks.reserve(len(request.prompt) + request.max_tokens, tokens, computed)
            by_sequence[state.id] = _Received(table, 0)
        received = by_sequence[state.id]
        if computed > received.table.capacity and blocks.grow(received.table, computed) is None:
            raise Overloaded(f"there are no blocks for {computed} tokens of {state.id!r} now", retry_after_s=1.0)
        before, received.computed = received.computed, max(received.computed, computed)
        return received.computed - before

    def _take(self, message: Submit) -> Future[dict[str, int]]:
        """Have what a request comes with be its own: what was received, or is copied now."""
        done: Future[dict[str, int]] = Future()
        if message.source is None:
            done.set_result(self._attach(message.states))
            return done

        def copied(received: Future[int]) -> None:
            error = received.exception()
            if error is not None:  # there is no room now: the fleet asks again
                done.set_exception(error)
            else:
                done.set_result(self._attach(message.states))

        kv = [each for each in message.kv if is_told(message.source, each)]
        self._receive_between(message.states, kv).add_done_callback(copied)
        return done

    def _attach(self, states: Sequence[SequenceState]) -> dict[str, int]:
        computed, request = {}, states[0].request.id
        waiting = self._received.pop(request, {})
        for state in states:
            received = waiting.pop(state.id, None)
            if received is not None:
                self._instance.blocks.attach(state.id, received.table)
                computed[state.id] = received.computed
        for received in waiting.values():
            self._instance.blocks.release(received.table)
        return computed

    def _give_up(self, request: str) -> None:
        for received in self._received.pop(request, {}).values():
            self._instance.blocks.release(received.table)
        self._instance.wake()

    def _sequences(self, request: str) -> list[LiveSequence]:
        return [s for s in self._instance.scheduler.sequences.values() if s.request.id == request]

    def _hand_over(self, request: str) -> HandedOver | None:
        if self._instance.executor is not self._instance.local:
            raise StateError(f"requests of {self._instance.name!r} stay: other ranks compute layers with it")
        if request not in self._held:
            held = self._instance.scheduler.hold([sequence.id for sequence in self._sequences(request)])
            if not held:
                return None
            self._held[request] = held
        held = self._held[request]
        kv = tuple(sequence.kv() for sequence in held if sequence.computed)
        return HandedOver(tuple(sequence.state() for sequence in held), kv)

    def _locate(self, request: str) -> tuple[SequenceKV, ...]:
        sequences = [*self._sequences(request), *self._held.get(request, ())]
        return tuple(kv for sequence in sequences if (kv := sequence.kv()).computed)

    def _release(self, request: str) -> None:
        for sequence in self._held.pop(request, ()):
            self._instance.scheduler.release(sequence)

    def _take_back(self, request: str) -> None:
        if request not in self._held:
            raise StateError(f"request {request!r} was not handed over, or was released; it cannot be taken back")
        self._instance.scheduler.resume(self._held.pop(request))

    def _mapped_since(self, parts: tuple[int, ...]) -> list[SectorPages]:
        """Take the log of sectors: return where they are in the parts that are computed here."""
        memory = self._instance.memory
        log, memory.log = memory.log or [], []
        pages = tuple(range(len(parts) * self._instance.model.part_pages))
        return [SectorPages(group, sector, pages, parts) for group, sector in log]


def is_told(source: KVSource, kv: SequenceKV) -> bool:
    """Return whether all that is computed of a sequence can be found, in every layer."""
    layers = {layer: each for each in source.by_layers() for layer, sectors in each.pages.items() if sectors}
    for group, (parts, _) in enumerate(source.format.groups):
        blocks = kv.blocks[group][: -(-kv.computed // source.format.block_tokens)]
        for part in parts:
            if part not in layers:
                return False
            size, sectors = layers[part].sector_blocks(part), layers[part].pages[part]
            if any(block // size not in sectors for block in blocks):
                return False
    return True
