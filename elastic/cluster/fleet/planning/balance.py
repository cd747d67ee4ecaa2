"""Which requests should go to another instance: a pure planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from elastic.cluster.fleet.planning.router import freeness

WORTH = 1.25
"""A move must raise the lesser freeness of its two instances by this factor and one block: none undoes another."""


@dataclass(frozen=True, slots=True)
class Movable:
    """A running request."""

    request: str
    held: int
    """Blocks that it has: what a move copies."""
    needed: int
    """All that it may need, which its instance keeps for it."""
    sequences: int = 1
    steady: bool = True
    """Whether it may be moved now."""
    barred: frozenset[str] = frozenset()
    """The instances that have refused it."""


@dataclass(frozen=True, slots=True)
class InstanceBooks:
    """What one instance has to do."""

    name: str
    total_blocks: int
    requests: tuple[Movable, ...]
    max_requests: int

    @property
    def free_blocks(self) -> int:
        """Blocks after promises; below zero, where more was promised than can be had at once."""
        return self.total_blocks - sum(request.needed for request in self.requests)

    @property
    def sequences(self) -> int:
        """Sequences that live here."""
        return sum(request.sequences for request in self.requests)


@dataclass(frozen=True, slots=True)
class Move:
    """A request that should go from one instance to another."""

    request: str
    source: str
    target: str


def plan_moves(instances: Sequence[InstanceBooks], waiting_blocks: int | None = None) -> list[Move]:
    """Return the moves that help, the first of which should be made before asking again.

    `waiting_blocks` is what the head of the queue needs, if there is one. Where no instance has so much but all
    together have, requests leave the one that can make the room with the fewest blocks copied (de-fragmentation;
    Llumnix, section 4.4.2); nothing else moves until it has gone there. Without a queue the one move from the least
    free instance to the freest that raises the lesser freeness of both the most, if by `WORTH`; among equal ones the
    request with the fewest blocks.
    """
    if waiting_blocks is not None:
        if any(books.free_blocks >= waiting_blocks for books in instances):
            return []
        plans = [plan for books in instances if (plan := _empty(books, instances, waiting_blocks)) is not None]
        return min(plans, key=lambda plan: plan[0], default=(0, []))[1]
    if len(instances) < 2:
        return []
    source = min(instances, key=_freeness)
    target = max((books for books in instances if books is not source), key=_freeness)
    before, slots = _freeness(source), target.max_requests - target.sequences
    best: tuple[float, int, Move] | None = None
    for request in source.requests:
        fits = request.needed <= target.free_blocks and request.sequences <= slots
        if not request.steady or not fits or target.name in request.barred:
            continue
        after = min(_freeness(source, -1, request), _freeness(target, 1, request))
        if after >= before + 1 + (WORTH - 1) * max(0.0, before) and (best is None or (after, -request.held) > best[:2]):
            best = after, -request.held, Move(request.request, source.name, target.name)
    return [best[2]] if best is not None else []


def _freeness(books: InstanceBooks, change: int = 0, request: Movable | None = None) -> float:
    """Return an instance's freeness, with a request more or less."""
    blocks, sequences = (request.needed, request.sequences) if request is not None else (0, 0)
    return freeness(books.free_blocks - change * blocks, books.sequences + change * sequences)


def _empty(books: InstanceBooks, instances: Sequence[InstanceBooks], blocks: int) -> tuple[int, list[Move]] | None:
    if books.total_blocks < blocks:
        return None
    plans = [
        plan
        for order in _orders(books)
        if (plan := _leave(books, order, [other for other in instances if other is not books], blocks)) is not None
    ]
    return min(plans, key=lambda plan: plan[0], default=None)


def _orders(books: InstanceBooks) -> Iterator[list[Movable]]:
    """Yield the orders in which requests could leave: every one of a few, else by what they free for what they copy."""
    movable = [request for request in books.requests if request.steady]
    if len(movable) <= 4:
        yield from map(list, permutations(movable))
        return
    yield sorted(movable, key=lambda request: request.needed / max(1, request.held), reverse=True)
    yield sorted(movable, key=lambda request: request.needed, reverse=True)
    yield sorted(movable, key=lambda request: request.held)


def _leave(
    books: InstanceBooks, order: Sequence[Movable], others: Sequence[InstanceBooks], blocks: int
) -> tuple[int, list[Move]] | None:
    """Return the blocks copied and the moves that free so many blocks; None if the others have no room for them."""
    room = {other.name: [other.free_blocks, other.max_requests - other.sequences] for other in others}
    free, copied = books.free_blocks, 0
    moves: list[Move] = []
    for request in order:
        if free >= blocks:
            break
        fitting = [n for n, (b, s) in room.items() if b >= request.needed and s >= request.sequences]
        fitting = [name for name in fitting if name not in request.barred]
        if not fitting:
            continue
        target = min(fitting, key=lambda name: room[name][0])  # best fit, so that the larger rooms stay
        room[target][0] -= request.needed
        room[target][1] -= request.sequences
        free, copied = free + request.needed, copied + request.held
        moves.append(Move(request.request, books.name, target))
    return (copied, moves) if free >= blocks else None
