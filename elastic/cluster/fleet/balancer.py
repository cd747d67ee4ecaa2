"""Requests move so that all instances have room (Llumnix, section 4.4)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from elastic import clock
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.instance import Instance, all_blocks, blocks_of
from elastic.cluster.fleet.moves import Mover
from elastic.cluster.fleet.planning.balance import InstanceBooks, Movable, Move, plan_moves
from elastic.cluster.fleet.planning.router import freeness
from elastic.errors import ElasticError

logger = logging.getLogger(__name__)
REST_S = 5.0
"""How long a request stays after a move, or after one that came to nothing."""


class Balancer:
    """Makes one move at a time."""

    def __init__(self, dispatcher: Dispatcher, mover: Mover) -> None:
        self._dispatcher, self._mover = dispatcher, mover
        self._rests: dict[str, float] = {}  # request -> until when it stays

    def tick(self) -> None:
        """Have a request move, if that helps."""
        move = self.next_move()
        if move is None:
            return
        try:
            self._mover.move(move.request, move.target)
        except ElasticError as error:
            logger.debug("request %s stays at %s: %s", move.request, move.source, error)
        finally:
            self._rests[move.request] = clock.now() + REST_S

    def next_move(self) -> Move | None:
        """Return the move that helps the most now."""
        now = clock.now()
        self._rests = {request: until for request, until in self._rests.items() if until > now}
        with self._dispatcher.lock:
            serving = [each for each in self._dispatcher.serving() if not each.group and not each.limit_changes]
            if len(serving) < 2:
                return None
            head = self._dispatcher.queue[0] if self._dispatcher.queue else None
            waiting = all_blocks(serving[0].kv_format, head) if head is not None else None
            if waiting is None:
                serving = _furthest_apart(serving)
            books = [self._books(instance) for instance in serving]
        return next(iter(plan_moves(books, waiting)), None)

    def _books(self, instance: Instance) -> InstanceBooks:
        """Return what an instance has to do, and which of it may move."""
        kv, requests, now = instance.kv_format, list[Movable](), self._dispatcher.clock()
        for request, record in instance.records.items():
            prompt = len(record.request.prompt)
            held = sum(blocks_of(kv, prompt + len(answer.tokens)) for answer in record.live)
            steady = record.begun and not record.moving and not record.cancelled and request not in self._rests
            barred = frozenset(name for name, until_s in record.refused.items() if until_s > now)
            requests.append(Movable(request, held, all_blocks(kv, record), record.left, steady, barred))
        return InstanceBooks(instance.name, instance.load.total_blocks, tuple(requests), instance.hello.max_requests)


def _furthest_apart(instances: Sequence[Instance]) -> list[Instance]:
    """Return the least free instance and the freest other one, the only ones between which anything moves."""
    freeness_of = [_freeness(instance) for instance in instances]
    least = min(range(len(instances)), key=freeness_of.__getitem__)
    most = max((number for number in range(len(instances)) if number != least), key=freeness_of.__getitem__)
    return [instances[least], instances[most]]


def _freeness(instance: Instance) -> float:
    """Return its freeness as books have it: by all that its requests may need."""
    records, total = instance.records, instance.load.total_blocks
    if not records:
        return freeness(total, 0)
    needed = sum([all_blocks(instance.kv_format, record) for record in records.values()])
    return freeness(total - needed, instance.sequences)
