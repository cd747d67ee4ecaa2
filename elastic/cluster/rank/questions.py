"""Questions of the fleet, answered beside the serving of requests."""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from elastic.cluster.control.connection import Connection
from elastic.cluster.control.listener import LOOPBACK
from elastic.cluster.control.messages import (
    Answer,
    Apply,
    Ask,
    Check,
    CommitActions,
    Drain,
    FreeBlocks,
    GiveUp,
    HandedOver,
    HandOver,
    Locate,
    Look,
    PrepareActions,
    Question,
    Receive,
    RollbackActions,
    RuntimeView,
    TakeBack,
)
from elastic.cluster.control.stage_questions import CopyLayers, PeerQuestion, StageQuestion, WeightDigests, WeightsOf
from elastic.cluster.rank.gpu_load import GPULoad
from elastic.cluster.rank.stages import Stages
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.errors import ConfigError, ElasticError, StateError

logger = logging.getLogger(__name__)
OF_ROOM = Apply | PrepareActions | CommitActions | RollbackActions
"""What changes the room for requests: the fleet hears of it before the answer."""
OF_THE_RUNTIME = OF_ROOM | Check | WeightsOf | WeightDigests
LANES: dict[str, Any] = {
    "actions": OF_THE_RUNTIME,
    "peers": PeerQuestion,
    "copies": CopyLayers,
    "receives": Receive,
    "stages": StageQuestion,
}
EVENTS = 200
"""How many of the last events `Look` tells."""


class Questions:
    """Answers questions on some threads: what may take long, as actions, does not stop what a move of a request needs.

    Each thread answers in the order in which it was asked: one for actions, one for layers that other ranks compute,
    one for copies of their keys and values, one for those of requests that come here, one that has whoever waits for
    another rank stop waiting, and one for all else.
    """

    def __init__(
        self,
        engine: ContinuousEngine,
        connection: Connection,
        *,
        draining: threading.Event,
        tell_room: Callable[[], None],
    ) -> None:
        self._engine, self._connection = engine, connection
        self._draining, self._tell_room = draining, tell_room
        self._lanes: dict[str, queue.SimpleQueue[Ask | None]] = {}
        self._stages = Stages(engine, connection.local_host or LOOPBACK)
        pools = engine.runtime.pools
        self.gpu_load = GPULoad.of(
            {pool.name: pool.backend.device.index or 0 for pool in pools if pool.backend.device.type == "cuda"}
        )
        """How busy the GPUs are, once it is started."""

    def put(self, ask: Ask) -> None:
        """Have a question answered. From one thread."""
        name = next((name for name, kinds in LANES.items() if isinstance(ask.question, kinds)), "questions")
        if name not in self._lanes:
            lane = self._lanes[name] = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(lane,), name=f"elastic-{name}", daemon=True).start()
        self._lanes[name].put(ask)

    def close(self) -> None:
        """Answer no more; what is being done goes on to its end."""
        for lane in list(self._lanes.values()):
            lane.put(None)
        self._stages.close()
        self.gpu_load.close()

    def _serve(self, lane: queue.SimpleQueue[Ask | None]) -> None:
        while (ask := lane.get()) is not None:
            try:
                answer = Answer(ask.id, self._answer(ask.question))
            except Exception as error:  # whatever it is, who asked must hear it
                answer = Answer(ask.id, error=portable(error))
            if isinstance(ask.question, OF_ROOM) and not (isinstance(ask.question, Apply) and ask.question.dry_run):
                self._tell_room()
            try:
                self._connection.send(answer)
            except ConfigError as error:  # the answer cannot be pickled
                with suppress(StateError):
                    self._connection.send(Answer(ask.id, error=error))
            except StateError:
                return  # the fleet has gone

    def _answer(self, question: Question) -> Any:
        if isinstance(question, OF_THE_RUNTIME):
            return self._act(question)
        if isinstance(question, PeerQuestion):
            return self._stages.meet(question)
        if isinstance(question, StageQuestion):
            return self._stages.answer(question)
        engine = self._engine
        match question:
            case Locate(request):
                return engine.moves.locate(request)
            case Receive(states, kv, source, coordinated):
                return engine.moves.receive(states, kv, source, coordinated=coordinated)
            case GiveUp(request):
                return engine.moves.give_up(request)
            case HandOver(request):
                handed_over = engine.moves.hand_over(request)
                return None if handed_over is None else HandedOver(*handed_over)
            case FreeBlocks(request):
                return engine.moves.release(request)
            case TakeBack(request):
                return engine.moves.take_back(request)
            case Look():
                return self._look()
            case Drain():
                return self._draining.set()
        raise StateError(f"the fleet asked a {type(question).__name__}, which this rank does not know")

    def _act(self, question: OF_THE_RUNTIME) -> Any:
        runtime = self._engine.runtime
        match question:
            case Apply(actions, _, True):
                return runtime.plan(actions, dry_run=True)
            case Apply(actions, why):
                return tuple(runtime.apply(actions, why=why))
            case PrepareActions(actions, id, timeout_s):
                return runtime.prepare(actions, id=id, timeout_s=timeout_s)
            case CommitActions(id):
                return runtime.commit(id)
            case RollbackActions(id):
                return runtime.rollback(id)
            case WeightsOf(shards):
                return runtime.weights_source(shards=shards)
            case WeightDigests(shards):  # of layers that others are to have from here, or this rank from them
                runtime.weights.require_plain_order(tuple(runtime.weights.parts_by_layer(shards)))
                return runtime.digests(shards=shards)
            case Check():
                runtime.check()
                return self._engine.check()

    def _look(self) -> RuntimeView:
        engine, runtime = self._engine, self._engine.runtime
        return RuntimeView(
            status=runtime.status(),
            stats=engine.counters.read(),
            events=runtime.events()[-EVENTS:],
            controller=runtime.health(),
            times=engine.stages.turn.times,
            wires=self._stages.wires,
            variants=tuple(runtime.weights.layers[0].variants),
            utilization=self.gpu_load.utilization,
        )


def portable(error: Exception) -> Exception:
    """Return an error as another process can have it: itself if it is one of Elastic's, else a `StateError` of it."""
    if not isinstance(error, ElasticError):
        logger.error("what the fleet wished failed", exc_info=error)
        return StateError(f"{type(error).__name__}: {error}")
    try:
        pickle.dumps(error, 5)
    except Exception:  # it carries what cannot be pickled: its words can
        return StateError(str(error))
    return error
