"""How an instance in simulated time goes on when a rank that computed layers of it is lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from elastic.engines.base import Output
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import CapacityError, Overloaded
from elastic.sim.mechanisms.books import RankBooks
from elastic.sim.mechanisms.instance import RankInstance
from elastic.sim.mechanisms.moves import RequestMoves


@dataclass(frozen=True)
class SimulatedRecovery:
    """What a rank does that has lost one which had a part in its steps."""

    books: RankBooks
    instance: RankInstance
    moves: RequestMoves
    begin_alone: Callable[[], object]
    """Has its steps go on, when all layers are at home."""

    def begin(self, lost: str, readable: bool, elsewhere: Collection[int]) -> Future[int]:
        """Compute all layers at home again; return the tokens that are computed anew.

        `readable`: the memory of the one that has gone can still be read. Weights of shards that are `elsewhere` come
        from other ranks, the others from the checkpoint. Other instances' keys and values leave at once: these come
        home, too. What is kept of one that has gone stays, unless its room is needed before others were told of it.
        """
        done: Future[int] = Future()
        self.instance.paused = True

        def come_home() -> None:
            try:
                self._come_home(lost, readable, frozenset(elsewhere), done)
            except CapacityError as error:  # whoever asked hears of it, also where a step was in flight
                done.set_exception(error)

        self.instance.between_steps(come_home)
        return done

    def _come_home(self, lost: str, readable: bool, elsewhere: frozenset[int], done: Future[int]) -> None:
        books, instance, model = self.books, self.instance, self.books.model
        scheduler, memory, path = instance.scheduler, instance.memory, books.path
        gone = lost in path.helpers and not readable
        self.moves.tell_no_kv()
        again = scheduler.restart(None if gone else set(scheduler.unkeepable()))
        away = frozenset(shard for shard, at in enumerate(path.ranks) if at != self.books.name)
        resident, fetched = (model.weight_pages(shards) for shards in (books.resident, books.resident | elsewhere))
        read = model.weight_pages(books.every) - fetched
        books.guests = {home: guest for home, guest in books.guests.items() if guest.ended}
        books.coming.clear()
        books.resident = books.every
        books.path = replace(LayerPath.alone(self.books.name, path.layers, path.shards), epoch=path.epoch + 1)
        memory.set_cap(None)
        while True:
            try:
                books.settle()
                break
            except CapacityError:
                if books.free_kept():
                    continue
                if not scheduler.begun:  # else the youngest has no room without the others
                    books.settle(keeps_promises=False)  # to who waits: it ends if it never fits here
                    break
                again += scheduler.restart(scheduler.begun[-1:])
        copied = memory.allocated * model.kv_pages(away) * model.page_bytes if away else 0
        copied += (fetched - resident) * model.page_bytes
        seconds = read * model.page_bytes / model.links.checkpoint_bytes_s + copied / model.links.bytes_s
        instance.clock.after(seconds, partial(self._go_on, again, done))

    def _go_on(self, again: int, done: Future[int]) -> None:
        instance = self.instance
        if instance.lost:
            return
        instance.recomputed_tokens += again
        instance.scheduler.keep()
        self._fail_impossible()
        instance.paused = False
        self.begin_alone()
        done.set_result(again)

    def _fail_impossible(self) -> None:
        """End what was taken because other ranks had room for it, and never fits here."""
        instance, failed = self.instance, []
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
