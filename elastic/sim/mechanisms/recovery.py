"""How an instance in simulated time goes on when a rank that computed layers of it is lost."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol

from elastic.engines.base import Output
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import CapacityError, Overloaded
from elastic.sim.mechanisms.books import RankBooks
from elastic.sim.mechanisms.instance import RankInstance
from elastic.sim.mechanisms.moves import RequestMoves


class RecoverableRank(Protocol):
    """What recovers: a `SimulatedRank`."""

    name: str
    books: RankBooks
    instance: RankInstance
    moves: RequestMoves

    def lose(self, rank: str) -> None: ...
    def begin_alone(self) -> None: ...


def recover(rank: RecoverableRank, lost: str, memories: Collection[str], elsewhere: Collection[int]) -> Future[int]:
    """Compute all layers at home again; return the tokens that are computed anew.

    `memories` are of those that have gone, where they can still be read; weights of shards that are `elsewhere` come
    from other ranks, the others from the checkpoint. Other instances' keys and values leave at once: these come home,
    too. What is kept of one that has gone stays, unless its room is needed before others were told of it.
    """
    done: Future[int] = Future()
    rank.lose(lost)
    rank.instance.paused = True
    rank.instance.between_steps(partial(_begin, rank, lost, lost in memories, frozenset(elsewhere), done))
    return done


def _begin(rank: RecoverableRank, lost: str, readable: bool, elsewhere: frozenset[int], done: Future[int]) -> None:
    books, instance, model = rank.books, rank.instance, rank.books.model
    scheduler, memory, path = instance.scheduler, instance.memory, books.path
    gone = lost in path.helpers and not readable
    rank.moves.tell_no_kv()
    again = scheduler.restart(None if gone else set(scheduler.unkeepable()))
    away = frozenset(shard for shard, at in enumerate(path.ranks) if at != rank.name)
    resident, fetched = (model.weight_pages(shards) for shards in (books.resident, books.resident | elsewhere))
    read = model.weight_pages(books.every) - fetched
    books.guests = {home: guest for home, guest in books.guests.items() if guest.ended}
    books.coming.clear()
    books.resident = books.every
    books.path = replace(LayerPath.alone(rank.name, path.layers, path.shards), epoch=path.epoch + 1)
    memory.set_cap(None)
    while True:
        try:
            books.settle()
            break
        except CapacityError:
            if books.free_kept():
                continue
            if not scheduler.begun:  # else the youngest has no room without the others
                raise
            again += scheduler.restart(scheduler.begun[-1:])
    copied = memory.allocated * model.kv_pages(away) * model.page_bytes if away else 0
    copied += (fetched - resident) * model.page_bytes
    seconds = read * model.page_bytes / model.links.checkpoint_bytes_s + copied / model.links.bytes_s
    instance.clock.after(seconds, partial(_go_on, rank, again, done))


def _go_on(rank: RecoverableRank, again: int, done: Future[int]) -> None:
    instance = rank.instance
    if instance.lost:
        return
    instance.recomputed_tokens += again
    instance.scheduler.keep()
    _fail_impossible(rank)
    instance.paused = False
    rank.begin_alone()
    done.set_result(again)


def _fail_impossible(rank: RecoverableRank) -> None:
    """End what was taken because other ranks had room for it, and never fits here."""
    instance, failed = rank.instance, []
    for name, sequence in list(instance.scheduler.sequences.items()):
        try:
            instance.blocks.require_possible(sequence.table.most_tokens)
        except Overloaded:
            pass  # it waits
        except CapacityError as error:
            instance.scheduler.cancel(name)
            failed.append((sequence, str(error)))
    outputs = [Output(s.request.id, (), "failed", why, instance.clock.now, index=s.index) for s, why in failed]
    instance.tell(outputs, [len(s.tokens) - len(s.request.prompt) for s, _ in failed])
