"""A simulated rank that answers all that a fleet asks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from elastic.clock import settle
from elastic.cluster.control.messages import Cancel, News, Refused, Submit
from elastic.engines.base import Output
from elastic.engines.core.kv_state import KVReport
from elastic.errors import CapacityError, ElasticError, Overloaded, StateError
from elastic.sim.core.executor import LocalExecutor
from elastic.sim.core.instance import SimulatedInstance
from elastic.sim.core.pages import SimulatedMemory
from elastic.sim.core.threads import SimulatedFuture, SimulatedThreads
from elastic.sim.mechanisms.model import LayeredModel

T = TypeVar("T")


class LoggedMemory(SimulatedMemory):
    """Pages that note which sectors are new, if somebody wants to know."""

    log: list[tuple[int, int]] | None = None

    def allocate(self, group: int) -> int:
        """See `SimulatedMemory`."""
        sector = super().allocate(group)
        if self.log is not None:
            self.log.append((group, sector))
        return sector


class RankInstance(SimulatedInstance):
    """An instance whose requests can leave with their keys and values, and whose layers others may compute.

    What it is asked takes `links.answer_s` and what has to be waited for; once it was lost it answers nothing.
    """

    memory: LoggedMemory

    def __init__(
        self, threads: SimulatedThreads, name: str, model: LayeredModel, executor: LocalExecutor, stretch_s: float
    ) -> None:
        rank = model.rank
        super().__init__(threads.events, name, rank.engine, rank.pages, executor, stretch_s, rank.message_s)
        self.threads, self.model = threads, model
        self.hangs = False
        """Whether it does nothing any more, and says nothing."""
        self.answer: Callable[[Any], Any]
        """Answers a question, at once or by a future: its `SimulatedRank` does."""
        self.take_kv: Callable[[Submit], Future[dict[str, int]]]
        """Has the keys and values here that a request comes with; by sequence, of how many tokens. `RequestMoves` does.
        """
        self.recomputed_tokens = 0
        """That were computed here again."""
        self._report: KVReport | None = None
        self._asked: dict[Future[Any], None] = {}
        self._coming: dict[str, list[Cancel]] = {}  # requests whose keys and values come first

    def ask(self, question: Any) -> Future[Any]:
        """Answer a question, in time."""
        answer = SimulatedFuture[Any](self.threads)
        self._asked[answer] = None
        if self.lost:
            self._fail(answer, StateError(f"rank {self.name!r} has gone"))
        else:
            self.clock.after(self.model.links.answer_s / 2, partial(self._answer, question, answer))
        return answer

    def kill(self, why: str = "killed by the fleet") -> None:
        """End it; what it was asked fails, and its end is told as the next event."""
        if self.lost:
            return
        self.lost = True
        for answer in list(self._asked):
            self._fail(answer, StateError(f"rank {self.name!r} has gone: {why}"))
        self.clock.after(0.0, partial(self._on_lost, why))

    def leave(self, *, drain: bool = False) -> None:
        """Be asked to end: `close` does."""

    def wake(self) -> None:
        """See `SimulatedInstance`."""
        if not self.hangs:
            super().wake()

    def beat(self) -> None:
        """See `SimulatedInstance`."""
        if not self.hangs:
            super().beat()

    def tell(self, outputs: list[Output], starts: list[int]) -> None:
        """Tell the fleet, with what has changed of where keys and values are; then what ended is free."""
        load = self.load()
        if self.scheduler.journal is not None:
            self.scheduler.journal.tell(always=False)
        report, self._report = self._report, None
        if not self.lost and not self.hangs:
            self._on_message(News(tuple(outputs), tuple(starts), load, report))
        self.scheduler.let_go()

    def note(self, report: KVReport) -> None:
        """Have a report go out with what is told next."""
        self._report = report

    def between_steps(self, action: Callable[[], object]) -> None:
        """See `SimulatedInstance`. What it changes of keys and values is told at once; what ended is free then."""

        def act() -> None:
            action()
            if self.scheduler.journal is not None:
                self.scheduler.journal.tell(always=False)
            if self._report is not None:
                self.tell([], [])

        super().between_steps(act)

    def do_between(self, action: Callable[[], T]) -> Future[T]:
        """Do something between two steps; return what comes of it."""
        done: Future[T] = Future()
        self.between_steps(partial(settle, done, action))
        return done

    # -- inside

    def _open_memory(self, **answers: Any) -> LoggedMemory:
        pages = self.pages
        self.memory = LoggedMemory(pages.budget, pages.weights, pages.sector, pages.blocks_per_sector, **answers)
        return self.memory

    def _take(self, message: Any) -> None:
        if self.lost or self.hangs:
            return
        if isinstance(message, Submit):
            self._resumed.update(state.id for state in message.states if state.generated)
        if isinstance(message, Cancel) and message.request in self._coming:
            self._coming[message.request].append(message)
        elif isinstance(message, Submit) and message.kv:
            self._coming[message.states[0].request.id] = []
            coming = self.take_kv(message)
            coming.add_done_callback(lambda done: self.clock.after(0.0, partial(self._begin_with, message, done)))
        else:
            super()._take(message)

    def _begin_with(self, message: Submit, done: Future[dict[str, int]]) -> None:
        """Go on with a request whose keys and values are here, as far as they came."""
        if self.lost:
            return
        request = message.states[0].request.id
        try:
            computed = done.result()
            self.scheduler.add(message.states, computed)
            had = sum(kv.computed for kv in message.kv)
            self.recomputed_tokens += max(0, had - sum(computed.values()))
        except (CapacityError, Overloaded) as error:
            self._on_message(Refused(request, error))
        for cancel in self._coming.pop(request):
            super()._take(cancel)
        self.wake()

    def _answer(self, question: Any, answer: Future[Any]) -> None:
        """Begin to answer, half of its time after it was asked."""
        if answer not in self._asked or self.hangs:
            return
        reply = Future[Any]()
        try:
            value = self.answer(question)
            if isinstance(value, Future):
                reply = value
            else:
                reply.set_result(value)
        except ElasticError as error:
            reply.set_exception(error)
        reply.add_done_callback(partial(self._reply, answer))

    def _reply(self, answer: Future[Any], reply: Future[Any]) -> None:
        """Tell what came of a question, half of its time later."""

        def tell() -> None:
            if not self.hangs and self._asked.pop(answer, 0) is None:  # what it has not answered fails with its end
                error = reply.exception()
                answer.set_exception(error) if error is not None else answer.set_result(reply.result())

        self.clock.after(self.model.links.answer_s / 2, tell)

    def _fail(self, answer: Future[Any], error: ElasticError) -> None:
        if self._asked.pop(answer, 0) is None:
            answer.set_exception(error)
