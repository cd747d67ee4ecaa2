"""Moving a request to another instance while it generates (live migration; Llumnix, section 4.2)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from elastic import clock
from elastic.cluster.control.messages import (
    Cancel,
    FreeBlocks,
    GiveUp,
    HandedOver,
    HandOver,
    Locate,
    Question,
    Receive,
    Submit,
    TakeBack,
)
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.fleet.records.requests import RequestRecord, Resumption
from elastic.cluster.fleet.refusals import not_there
from elastic.engines.core.kv_state import KVSource, SequenceKV
from elastic.errors import ElasticError, NotFound, Overloaded, RankLost, StateError

logger = logging.getLogger(__name__)
MOST_ROUNDS = 8
ANSWER_S, FENCED_S = 300.0, 5.0
"""How long a rank may take to answer, and to be given up. One that is dead or hangs is noticed before."""


@dataclass(frozen=True)
class Moved:
    """A request that goes on at another instance."""

    request: str
    source: str
    target: str
    moved_bytes: int
    """KV that was copied while it generated; the last few tokens, copied when it had stopped, are not counted."""
    rounds: int
    stalled_ms: float
    """From its last token there to its first here."""
    recomputed_tokens: int = 0
    """Tokens that are computed again, where the target could read neither a memory file of the source's nor, by a
    connection to it, its memory."""


class _Move:
    """One request on its way. `source` computes it until `handed` is set; the flip makes it the target's."""

    def __init__(self, record: RequestRecord, source: Instance, target: Instance) -> None:
        self.record, self.source, self.target = record, source, target
        self.request = record.request.id
        self.memory = source.memory.hold() if source.memory is not None else None
        self.by_file = self.memory is not None and source.hello.host == target.hello.host
        """Whether the target finds the source's memory file."""
        memory = source.hello.memory
        self.reachable = self.by_file or (memory is not None and memory.memory is not None)
        """Whether the target finds that, or the source itself; false where they cannot be introduced."""
        self.states = tuple(answer.state for answer in record.live)
        self.handed = self.flipped = self.received = False
        self.told = 0
        self.moved_bytes, self.rounds, self.copy_s = 0, 0, 0.0
        self.resumption = Resumption(1, left={self.request})

    @property
    def reads(self) -> bool:
        """Whether the target can copy what the source has computed, and use it."""
        return (
            self.reachable
            and self.source.directory is not None
            and self.source.kv_format == self.target.kv_format
            and (self.record.request.prompt_logprobs is None or bool(self.record.answers[0].tokens))
        )

    @property
    def settled(self) -> bool:
        """Whether the target has gone on with it, or never will. Under the fleet's lock."""
        return not self.resumption.left or self.record.instance != self.target.name

    def view(self, kv: tuple[SequenceKV, ...]) -> KVSource:
        """Say where the target finds these. Under the fleet's lock."""
        assert self.source.directory is not None
        sectors = self.source.directory.sectors_of(kv)
        if self.by_file and self.memory is not None:
            return replace(self.memory.source, sectors=sectors)
        source = self.source.hello.memory
        assert source is not None
        assert source.memory is not None
        return replace(source, file=None, sectors=sectors, memory=replace(source.memory, rank=self.source.name))


class Mover:
    """Moves requests, each on the calling thread, which must be none that reads from ranks."""

    def __init__(self, dispatcher: Dispatcher, log: EventLog, introduce: Callable[[Iterable[str]], None]) -> None:
        """`introduce` has ranks know where each other listens; it raises where they cannot reach each other."""
        self._dispatcher = dispatcher
        self._lock = dispatcher.lock
        self._log, self._introduce = log, introduce

    def move(self, request: str, target: str) -> Moved:
        """Move all answers of a request to an instance; return when it has its next token, or has ended.

        Its KV is copied in rounds while it generates, the rest when it has stopped between two steps: from a memory
        file of the host, else over a connection of the two ranks. Whatever fails before it goes on there, it goes on
        where it was; if both are lost, elsewhere. Raises `ConfigError` for a request or an instance that is not there,
        `StateError` for one that waits, ends meanwhile or is being moved, `Overloaded` where there is no room,
        `RankLost` if the target is lost.
        """
        move = self._begin(request, target)
        try:
            self._meet(move)
            self._copy(move)
            self._hand_over(move)
            self._wait(move)
        except BaseException as error:  # also what ends the calling thread: the request goes on
            self._undo(move)
            why = str(error) or type(error).__name__
            self._log.add("move failed", instance=target, rank=move.source.name, request=request, why=why)
            raise
        finally:
            self._settle(move)
        moved = Moved(
            request, move.source.name, target, move.moved_bytes, move.rounds,
            move.resumption.stalled_s * 1000, move.resumption.recomputed_tokens,
        )  # fmt: skip
        self._log.count(moved=1, moved_bytes=moved.moved_bytes)
        self._log.add(
            "moved", instance=target, rank=moved.source, request=request, requests=1, moved_bytes=moved.moved_bytes,
            recomputed_tokens=moved.recomputed_tokens, stalled_ms=moved.stalled_ms, copy_s=move.copy_s,
        )  # fmt: skip
        return moved

    def drain(self, instance: Instance, timeout_s: float | None) -> None:
        """Have the requests of an instance that gets no more move, or end where they do not fit elsewhere."""
        dispatcher = self._dispatcher
        until_s = math.inf if timeout_s is None else dispatcher.clock() + timeout_s
        while dispatcher.clock() < until_s:
            with self._lock:
                records = list(instance.records.values())
                if not records and not instance.moves:
                    return
            for record in records:
                target = self._next_target(instance, record)
                if target is None or dispatcher.clock() >= until_s:
                    continue
                try:
                    self.move(record.request.id, target.name)
                except ElasticError as error:
                    logger.debug("request %s stays at %s: %s", record.request.id, instance.name, error)
            with self._lock:  # what did not move gets on meanwhile, or makes room elsewhere
                dispatcher.changed.wait_for(lambda: not instance.records and not instance.moves, 0.2)

    def _next_target(self, leaving: Instance, record: RequestRecord) -> Instance | None:
        """Return where a request of an instance that gets no more goes: to the freest of those that refused it the
        longest ago, or never. None: nowhere now, or it has left or ended."""
        dispatcher = self._dispatcher
        with self._lock:
            if record.instance != leaving.name:
                return None
            now = dispatcher.clock()
            targets = [each for each in dispatcher.serving() if each.may_get(record, now) and not each.group]
            targets = [each for each in targets if each.holds(record, 0)]
            return max(targets, key=lambda each: (-record.refused.get(each.name, 0.0), each.freeness), default=None)

    def _begin(self, request: str, target: str) -> _Move:
        dispatcher = self._dispatcher
        with self._lock:
            record, goal = dispatcher.records.get(request), dispatcher.instances.get(target)
            if record is None:
                raise NotFound(f"request {request!r} is not served here, or has ended")
            if goal is None:
                raise not_there(f"instance {target!r}", dispatcher.instances)
            if record.moving or record.instance is None:
                raise StateError(f"request {request!r} {'is being moved' if record.moving else 'waits in the queue'}")
            if record.instance == target:
                raise StateError(f"request {request!r} is at instance {target!r} already")
            if goal.state != "serving":
                raise StateError(f"instance {target!r} takes no requests: it is {goal.state}")
            source = dispatcher.instances[record.instance]
            if grouped := [instance.name for instance in (source, goal) if instance.group]:
                raise StateError(
                    f"requests of {', '.join(grouped)} stay: other ranks compute layers of them; restore them first"
                )
            if not goal.may_get(record, dispatcher.clock()) or not goal.holds(record, 0):
                why = "gets nothing while its limit changes: not" if goal.limit_changes else "has just refused"
                why = why if goal.holds(record, 0) else "has no room for"
                raise Overloaded(
                    f"instance {target!r} {why} request {request!r}", retry_after_s=dispatcher.retry_after_s
                )
            record.moving = True
            goal.reserve(record)
            source.moves, goal.moves = source.moves + 1, goal.moves + 1
            return _Move(record, source, goal)

    def _meet(self, move: _Move) -> None:
        """Have the target be able to ask the source for what it finds in no file."""
        if move.by_file:
            return
        move.reachable = move.reads  # what becomes of use in the middle of the move is computed again
        try:
            if move.reachable:
                self._introduce((move.source.name, move.target.name))
        except ElasticError as error:
            logger.info("request %s is computed anew at %s: %s", move.request, move.target.name, error)
            move.reachable = False

    def _copy(self, move: _Move) -> None:
        """Copy what is computed, while more is, until little is left."""
        copied, least = 0, move.source.kv_format.block_tokens
        while move.reads and move.rounds < MOST_ROUNDS:
            with self._lock:
                self._require_alive(move.source)
                if not move.record.left or move.record.cancelled:
                    raise StateError(f"request {move.request!r} ended before it was moved")
                kv = kv_of(move.source, move.record)
                source = move.view(kv)
            computed = sum(sequence.computed for sequence in kv)
            if computed - copied <= least * len(kv):
                return
            move.received = True
            began_s = clock.now()
            move.moved_bytes += self._ask(move.target, Receive(move.states, kv, source))
            move.copy_s += clock.now() - began_s
            move.rounds += 1
            copied = computed

    def _hand_over(self, move: _Move) -> None:
        """Stop the request at its source, and have it go on at its target."""
        handed: HandedOver | None = self._ask(move.source, HandOver(move.request))
        if handed is None:
            raise StateError(f"request {move.request!r} ended before it was moved")
        move.handed = True
        if move.reads and not move.by_file:  # nothing waits for the source but a thread that is there for this
            self._receive_rest(move, handed.kv)
        record = move.record
        with self._lock:
            self._require_alive(move.target)
            if record.instance is None:
                raise self._lost(move.source)
            states = record.states()
            same = {state.id: state.generated for state in handed.states} == {s.id: s.generated for s in states}
            kv = handed.kv if same and move.reads else ()
            move.told = sum(len(answer.tokens) for answer in record.answers)
            record.had = {answer.state.index: answer.computed for answer in record.live}
            if record.resumption is not None:  # of a rank that was lost: what is left of that is this move's
                record.resumption.heard(move.request)
            record.resumption = move.resumption
            source = move.view(kv) if kv and move.by_file else None
            now = self._dispatcher.clock()
            move.target.client.send(Submit(states, now - record.arrived_s, kv, source))
            barrier = move.target.client.ask(Locate(move.request))
            move.source.take(record)
            move.target.give(record, 0, now)
            move.flipped = True
        self._result(move.target, barrier)

    def _receive_rest(self, move: _Move, kv: tuple[SequenceKV, ...]) -> None:
        """Copy what is left of a request that was handed over."""
        with self._lock:
            self._require_alive(move.source)
            source = move.view(kv)
        move.received = True
        self._ask(move.target, Receive(move.states, kv, source, coordinated=False))

    def _wait(self, move: _Move) -> None:
        """Return when the request has gone on at its target; then the source needs its blocks no more."""
        with self._lock:
            self._dispatcher.changed.wait_for(lambda: move.settled, ANSWER_S)
            if move.record.left and move.record.instance is None:
                if move.target.name in self._dispatcher.instances:
                    raise Overloaded(f"instance {move.target.name!r} refused request {move.request!r}", retry_after_s=1)
                raise self._lost(move.target)
        self._release(move)

    # -- when it comes to nothing

    def _undo(self, move: _Move) -> None:
        """Have the request go on at its source, if that is there."""
        if not move.flipped and move.received:
            with suppress(ElasticError):  # it was lost, and what it had received with it
                self._ask(move.target, GiveUp(move.request))
        if not move.handed:
            return
        record = move.record
        with self._lock:
            if move.flipped and move.target.client.lost:
                gone = self._dispatcher.changed.wait_for(lambda: record.instance != move.target.name, FENCED_S)
                logger.debug("rank %s was given up: %s", move.target.name, gone)
            told = sum(len(answer.tokens) for answer in record.answers)
            there = record.instance if move.flipped else None
            back = there is None and bool(record.left) and (not move.flipped or told == move.told)
            if there is not None:  # it may be copying yet
                self._dispatcher.changed.wait_for(lambda: move.settled, ANSWER_S)
        if not back:
            self._release(move)
            return
        with self._lock:
            had, resumption = record.had, record.resumption
            returns = move.source.name in self._dispatcher.instances and record.instance is None
            if returns:  # its next token may come before the answer is seen here
                move.source.take_back(record)
                record.had, record.resumption = {}, None
        try:
            self._ask(move.source, TakeBack(move.request))
        except ElasticError as error:
            logger.warning("request %s cannot go on at %s: %s", move.request, move.source.name, error)
            with self._lock:
                if returns and record.instance == move.source.name:
                    move.source.take(record)
                    record.had, record.resumption = had, resumption
            self._release(move)
            return
        with self._lock:
            if returns and (record.instance == move.source.name or not record.left):
                if resumption is not None:
                    resumption.heard(move.request)
                record.forget_kv()

    def _release(self, move: _Move) -> None:
        try:
            self._ask(move.source, FreeBlocks(move.request))
        except ElasticError as error:  # it was lost, and its blocks with it
            logger.debug("the blocks of request %s were not freed: %s", move.request, error)

    def _settle(self, move: _Move) -> None:
        """Let others handle the request again: what was asked of it meanwhile is done now."""
        record = move.record
        with Delivery(self._lock) as delivery:
            record.moving = False
            for instance in (move.source, move.target):
                instance.moves -= 1
            self._dispatcher.changed.notify_all()
            if record.instance != move.target.name:
                move.target.unheard.pop(move.request, None)
            if record.left and record.instance is None:
                self._dispatcher.requeue([record], delivery)
            elif record.left and record.instance is not None:
                client = self._dispatcher.instances[record.instance].client
                for index in record.cancelled & {answer.state.index for answer in record.live}:
                    client.send(Cancel(move.request, index))
            self._dispatcher.dispatch()
        if move.memory is not None:
            move.memory.close()

    # -- asking

    def _ask(self, instance: Instance, question: Question) -> Any:
        return self._result(instance, instance.client.ask(question))

    def _result(self, instance: Instance, answer: Future[Any]) -> Any:
        try:
            return answer.result(ANSWER_S)
        except FutureTimeout as error:
            instance.client.kill(f"it did not answer in {ANSWER_S:.0f} s")
            raise RankLost(f"rank {instance.name!r} did not answer in {ANSWER_S:.0f} s", rank=instance.name) from error
        except StateError as error:
            if instance.client.lost:
                raise self._lost(instance) from error
            raise

    def _require_alive(self, instance: Instance) -> None:
        if instance.name not in self._dispatcher.instances:
            raise self._lost(instance)

    @staticmethod
    def _lost(instance: Instance) -> RankLost:
        return RankLost(
            f"rank {instance.name!r} was lost while a request was moved; the request goes on elsewhere",
            rank=instance.name,
        )


def kv_of(instance: Instance, record: RequestRecord) -> tuple[SequenceKV, ...]:
    """Return where the KV of a request is at an instance, as far as it told. Under the fleet's lock."""
    if instance.directory is None:
        return ()
    prompt = len(record.request.prompt)
    computed = (instance.directory.of(answer.state.id, prompt + len(answer.tokens)) for answer in record.live)
    return tuple(kv for kv in computed if kv is not None)
