"""Layers that ranks compute for each other, at one of them: its connections to others, and what its engine is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from elastic.cluster.control.stage_questions import (
    Allot,
    AttachStage,
    BeginExchange,
    Bulk,
    CapReached,
    CloseStage,
    CopyLayers,
    DetachStage,
    EndExchange,
    FlipLayers,
    GiveUpLayers,
    KeepFull,
    KeptLayers,
    LayersMemory,
    LosePeer,
    MeasureRoom,
    MeetPeers,
    OpenPeers,
    OpenStage,
    PauseSteps,
    PeerQuestion,
    PrepareLayers,
    Recover,
    ResumeSteps,
    Room,
    SetCap,
    SetCopies,
    StageQuestion,
    WrittenBlocks,
)
from elastic.cluster.control.status import Wire
from elastic.cluster.peers.hub import PeerHub
from elastic.cluster.peers.log import PeerLogConnection
from elastic.cluster.rank.activations import give_back_for_steps
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.errors import ElasticError, StateError
from elastic.types import Action, Fetch, Restore, WeightsSource

ACCEPT_S = 30.0
"""How long a stage waits for its home to connect."""
RESTORE_S, POLL_S = 60.0, 0.05
"""How long weights may take to come back when another rank was lost, and how often it is looked."""


class Stages:
    """Answers what a fleet asks about layers of several ranks."""

    def __init__(self, engine: ContinuousEngine, host: str) -> None:
        """`host` is the address at which other ranks find this one."""
        self._engine, self._host = engine, host
        self._lock = threading.Lock()
        self._hub: PeerHub | None = None
        self._closed = False

    def close(self) -> None:
        """End all connections, and make no more: whoever waits on them returns."""
        with self._lock:
            self._closed, hub, self._hub = True, self._hub, None
        if hub is not None:
            hub.close()

    @property
    def wires(self) -> tuple[Wire, ...]:
        """What went between this rank and each other one."""
        hub = self._hub
        return () if hub is None else hub.wires.read()

    def meet(self, question: PeerQuestion) -> Any:
        """Answer about the connections."""
        match question:
            case OpenPeers(rank, key, bulk):
                return self._open(rank, key, bulk)
            case MeetPeers(addresses):
                return self._opened.meet(dict(addresses))
            case LosePeer(rank):
                hub = self._hub
                return None if hub is None else hub.lost(rank)

    def answer(self, question: StageQuestion) -> Any:
        """Answer about layers. Raises what the engine raises."""
        engine = self._engine
        match question:
            case OpenStage(home, path, sectors, addresses):
                with _closed_if_refused(self._opened.accept_log(home, ACCEPT_S)) as log:
                    return engine.stages.open(home, log, self._opened.transport(home), path, sectors, addresses)
            case AttachStage(rank):
                hub = self._opened
                with _closed_if_refused(hub.connect_log(rank, engine.rank)) as log:
                    return engine.ranks.attach(rank, log, hub.transport(engine.rank))
            case DetachStage(rank):
                return engine.ranks.detach(rank)
            case CloseStage(home, keep):
                engine.stages.close(home, keep=keep)
                if (opened := self._hub) is not None:
                    opened.part(home)  # also where the stage was refused, and so has no hold on it
                return None
            case MeasureRoom(rank):
                if engine.rank != rank:
                    engine.rank = rank
                return _measure_room(engine)
            case SetCap(sectors):
                load = engine.ranks.set_cap(sectors)
                give_back_for_steps(engine)
                return load
            case CapReached():
                return engine.ranks.cap_reached()
            case Allot(home, sectors):
                return engine.stages.of(home).memory.allot(sectors)
            case Recover(lost, memories, weights):
                tokens = engine.recovery.recover(lost, partial(self._restore, weights), memories)
                self._keep_full(frozenset())
                return tokens
        return self._exchange(question)

    def _exchange(self, question: StageQuestion) -> Any:
        engine = self._engine
        if isinstance(question, BeginExchange | PrepareLayers | FlipLayers) and question.hurried:
            engine.exchange.shorten_steps()
        match question:
            case LayersMemory(home, shards):
                return engine.kv.locate(shards) if home == engine.rank else engine.stages.of(home).layers_kv(shards)
            case KeptLayers(home, epoch):
                return engine.stages.kept(home, epoch)
            case BeginExchange(shards):
                return engine.exchange.begin(shards)
            case PrepareLayers(home, shards, exchange, coordinated):
                return engine.exchange.prepare(home, shards, exchange, coordinated=coordinated)
            case CopyLayers(home, shards, source, blocks, coordinated):
                return engine.exchange.copy(home, shards, source, blocks, coordinated=coordinated)
            case KeepFull(layers):
                return self._keep_full(layers)
            case SetCopies(copies):
                return engine.cohorts.set_copies(copies)
            case PauseSteps():
                return engine.exchange.pause()
            case ResumeSteps():
                return engine.exchange.resume()
            case WrittenBlocks():
                return engine.exchange.written_blocks()
            case FlipLayers(path, sources, hurried):
                return engine.exchange.flip(path, sources, hurried=hurried)
            case EndExchange():
                return engine.exchange.end()
            case GiveUpLayers(home, shards):
                return engine.exchange.give_up(home, shards)
        raise StateError(f"the fleet asked a {type(question).__name__}, which this rank does not know")

    def _keep_full(self, layers: frozenset[int]) -> None:
        """Refuse what would take the full weights of layers away, and undo what is under way or waits to."""
        runtime = self._engine.runtime
        added, runtime.weights.kept_full = layers - runtime.weights.kept_full, layers
        staying = tuple(sorted(added.difference(runtime.dropped)))
        if staying and runtime.busy:
            runtime.apply(Restore(staying), why="they are computed in parts")

    @property
    def _opened(self) -> PeerHub:
        hub = self._hub
        if hub is None:
            raise StateError("this rank knows no other one; it was not told to listen, or has ended")
        return hub

    def _open(self, rank: str, key: bytes, bulk: Bulk) -> tuple[str, int]:
        with self._lock:
            if self._closed:
                raise StateError(f"rank {rank!r} has ended; start another one")
            if self._hub is None:
                self._hub = hub = PeerHub(rank, key, (self._host, 0), bulk)
                hub.memory.serve(self._engine.runtime.pools, self._engine.kv.exchange.pace.copying)
                self._engine.ranks.use_peers(hub, lambda: hub.sending)
            return self._hub.address

    def _restore(self, elsewhere: Sequence[tuple[tuple[int, ...], WeightsSource]], shards: tuple[int, ...]) -> None:
        """Have the weights of shards here again, from ranks that have them or the checkpoint; return when they are."""
        until_s = time.monotonic() + RESTORE_S
        there = set(shards).intersection(shard for theirs, _ in elsewhere for shard in theirs)
        with suppress(ElasticError):  # the checkpoint may have them
            self._bring(partial(Fetch, (), tuple(source for _, source in elsewhere), False), there, until_s)
        self._bring(lambda missing: Restore(shards=missing), set(shards), until_s)

    def _bring(self, action: Callable[[tuple[int, ...]], Action], shards: set[int], until_s: float) -> None:
        """Do an action for those of the shards that are dropped, until none is."""
        runtime = self._engine.runtime
        while missing := tuple(sorted(shards.intersection(runtime.dropped_shards))):
            if time.monotonic() > until_s:
                raise StateError(f"the weights of shards {list(missing)} find no room after another rank was lost")
            (change,) = runtime.apply([action(missing)], why="another rank was lost")
            time.sleep(POLL_S if change.deferred else 0)


@contextmanager
def _closed_if_refused(log: PeerLogConnection) -> Iterator[PeerLogConnection]:
    """Close a log that nobody takes, so that the other end does not wait for this one and no connection is left."""
    try:
        yield log
    except BaseException:
        log.close()
        raise


def _measure_room(engine: ContinuousEngine) -> Room:
    """Return what the memory of a rank could hold now, for a fleet that plans which layers it computes."""
    room, runtime = engine.reports.kv_room(), engine.runtime
    step_s, hop_s = engine.step_times
    return Room(
        path=engine.path,
        pages=room.pages,
        page_bytes=room.page_bytes,
        sector_pages=room.sector_pages,
        most_sectors=room.sectors,
        committed_sectors=room.committed,
        held_bytes=room.held_bytes,
        weight_pages=runtime.shard_pages,
        resident=frozenset(range(engine.path.numbers)) - frozenset(runtime.dropped_shards),
        in_variant={
            layer.index: layer.held_pages
            for layer in runtime.weights.layers
            if not layer.absent and layer.precision is not layer.full
        },
        step_s=step_s,
        hop_s=hop_s,
        steps=engine.step_pages,
    )
