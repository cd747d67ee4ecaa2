"""A rank: an engine that a fleet talks to over a connection."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from functools import partial

from elastic.cluster.control.connection import Connection
from elastic.cluster.control.messages import (
    Ask,
    Beat,
    Bye,
    Cancel,
    Hello,
    ModelFacts,
    News,
    RankPlace,
    Refused,
    Submit,
)
from elastic.cluster.rank.questions import Questions, portable
from elastic.engines.base import Output
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.core.kv_state import KVReport
from elastic.errors import CapacityError, Overloaded, StateError
from elastic.memory.backends.shared_file import host_name
from elastic.planning.pipeline.chunk_cost import ModelCost

logger = logging.getLogger(__name__)
BEAT_S = 0.25


class Rank:
    """Serves a fleet with an engine that was not started yet, from `run` until the fleet or the engine ends.

    After each step of the engine one `News` goes out, on the engine's thread and before a block that came free with the
    step can have another owner: what the fleet knows of the KV cache is never of a later owner. So its load has that
    block in use still; where no step follows, a `Beat` says at once that it is free. A fleet that does not read stops
    the engine.
    """

    def __init__(
        self,
        engine: ContinuousEngine,
        connection: Connection,
        name: str,
        facts: ModelFacts,
        *,
        max_requests: int = 256,
        beat_s: float = BEAT_S,
        cost: ModelCost | None = None,
        places: tuple[RankPlace, ...] = (),
    ) -> None:
        self.engine, self.name = engine, name
        self._connection = connection
        self._facts, self._max_requests, self._beat_s, self._cost = facts, max_requests, beat_s, cost
        self._places = places
        self._lock = threading.Lock()  # of the two below
        self._outputs: list[Output] = []
        self._starts: list[int] = []
        self._forms = 0
        self._leaving = False  # what is cancelled now, nobody wished to be cancelled
        self._ending = False
        self._draining = threading.Event()
        self.ended = threading.Event()
        """Set when there is no fleet any more, or it has let this rank go."""
        self.refused = ""
        """Why the fleet has not taken this rank, if it has not."""
        self._questions = Questions(engine, connection, draining=self._draining, tell_room=self._tell_room)

    def run(self) -> None:
        """Say Hello, then serve until `Bye` or the end of the connection; the engine has stopped then."""
        beats = threading.Thread(target=self._beat, name=f"elastic-{self.name}-beat", daemon=True)
        self.engine.reports.on_step, self.engine.reports.on_room = self._tell, self._tell_room
        self.engine.moves.on_impossible, self.engine.moves.on_crowded_out = self._give_back, self._return
        self.engine.start()
        self._connection.send(self._hello())
        try:
            beats.start()
            self._questions.gpu_load.start()  # the first look takes long: NVML is loaded
            while True:
                self._take(self._connection.receive())
        except EOFError:
            logger.info("the fleet has gone, or has let this rank go")
        except StateError as error:
            if not self.ended.is_set():
                logger.error("the connection to the fleet has failed: %s", error)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the engine and the connection; requests of the engine end without a word. Can be called twice."""
        with self._lock:
            self._leaving = True
        self.ended.set()
        self._say(Bye())
        self._connection.close()  # before the engine ends: it may wait for the fleet to read
        self._questions.close()
        self.engine.stop(drain=False)

    # -- what the fleet says

    def _take(self, message: object) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            self.engine.cancel(message.request, message.index)
        elif isinstance(message, Ask):
            self._questions.put(message)
        elif isinstance(message, Bye):
            self.refused = message.why
            threading.Thread(target=self._leave, args=(message.drain,), name="elastic-leave", daemon=True).start()
        else:
            raise StateError(f"the fleet sent a {type(message).__name__}, which no fleet sends")

    def _submit(self, message: Submit) -> None:
        request = message.states[0].request.id
        if self._draining.is_set():
            self._say(Refused(request, StateError(f"rank {self.name!r} takes no more requests: it is being drained")))
            return
        told = {state.index: len(state.generated) for state in message.states}
        listen = partial(self._listen, told)  # the engine lets go of it with the request, also with one that moves
        try:
            self.engine.adopt(message.states, listen, kv=message.kv, source=message.source, waited_s=message.waited_s)
        except Exception as error:  # whatever is wrong with a request, the fleet hears it, and others are served
            self._say(Refused(request, portable(error)))

    def _give_back(self, request: str, error: CapacityError) -> None:
        """Have the fleet give a request to other ranks, which may hold it together. On the engine's thread."""
        self._return(request, Overloaded(str(error), retry_after_s=0.0))

    def _return(self, request: str, error: CapacityError | Overloaded) -> None:
        """Have the fleet give a request to others; with a `CapacityError` not to this rank again. On its thread."""
        self._tell(None)
        self._say(Refused(request, error))

    def _leave(self, drain: bool) -> None:
        """End in order: finish what there is (`drain`), and hang up; `run` ends then."""
        self._draining.set()
        self._ending = True
        if drain:
            self.engine.stop(drain=True)
            self._tell(None)
        self.ended.set()
        self._say(Bye())
        self._connection.close()

    # -- what the fleet is told

    def _hello(self) -> Hello:
        reports = self.engine.reports
        return Hello(
            name=self.name,
            pid=os.getpid(),
            host=host_name(),
            model=self._facts,
            kv=self.engine.kv_format,
            max_requests=self._max_requests,
            memory=reports.kv_source(),
            load=reports.load(),
            forms=self._new_forms(),
            cost=self._cost,
            places=self._places,
            sector_blocks=reports.sector_blocks,
            shares_prefixes=reports.shares_prefixes,
        )

    def _listen(self, told: dict[int, int], output: Output) -> None:
        """Keep an output for the next news; `told` counts the tokens of each answer of its request so far."""
        start = told.get(output.index, 0)
        told[output.index] = start + len(output.tokens)
        with self._lock:
            if output.finish != "cancelled" or not self._leaving:
                self._outputs.append(output)
                self._starts.append(start)

    def _tell(self, report: KVReport | None) -> None:
        """Send what has happened since the last call. On the engine's thread, or after its end."""
        with self._lock:
            outputs, starts = tuple(self._outputs), tuple(self._starts)
            self._outputs.clear()
            self._starts.clear()
        forms = self._new_forms()
        if outputs or forms or report is not None:
            self._say(News(outputs, starts, self.engine.reports.load(), report, forms))

    def _tell_room(self) -> None:
        """Say how much room there is: blocks came free behind the last news, or an action is over."""
        self._say(Beat(self.engine.reports.load()))

    def _new_forms(self) -> tuple[tuple[str, ...], ...]:
        told, weights = self._forms, self.engine.weights
        self._forms = len(weights)
        return weights[told:]

    def _say(self, message: News | Beat | Refused | Bye) -> None:
        with suppress(StateError):  # the fleet has gone: `run` is about to see that
            self._connection.send(message)

    def _beat(self) -> None:
        while not self.ended.wait(self._beat_s):
            if not self.engine.serving and not (self._ending or self.ended.is_set()):
                logger.error("the engine has ended by itself; this rank ends too")
                self._connection.close()
                return
            try:
                self._connection.send(Beat(self.engine.reports.load()))
            except StateError:  # the fleet has gone; who takes its messages may wait for the engine, and not see it
                self.ended.set()
