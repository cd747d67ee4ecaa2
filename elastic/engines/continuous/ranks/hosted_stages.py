"""Layers of other instances that are computed here: the part of an engine for it."""

from __future__ import annotations

import threading
from typing import Any

from elastic.engines.core.kv_state import LayersKV
from elastic.engines.executor.batch_runner import BatchRunner
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.engines.pipeline.forward import StageForward
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.items import LogConnection
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.stage import GuestStage
from elastic.engines.pipeline.transport import Transport
from elastic.engines.pipeline.turn import Turn
from elastic.errors import ConfigError, StateError
from elastic.kvcache.storage.guest import GuestMemory
from elastic.kvcache.storage.paged import BlockMemory


class HostedStages:
    """What a rank asks of its engine for instances whose home is another rank. Thread-safe; not for listeners.

    The forward passes of stages, and of the engine's own steps while it has other ranks, are one object's.
    """

    def __init__(
        self,
        model: Any,
        memory: BlockMemory,
        home: HomeExecutor,
        turn: Turn,
        exchange: KVExchange,
    ) -> None:
        self.by_home: dict[str, GuestStage] = {}
        self._model, self._memory, self._home = model, memory, home
        self.turn, self._exchange = turn, exchange
        self._lock = threading.RLock()  # of the stages, the one below, and of `home.forward` being set
        self._forward: StageForward | None = None

    def open(
        self,
        home: str,
        log: LogConnection,
        transport: Transport,
        path: LayerPath,
        sectors_cap: int,
        addresses: int | None = None,
    ) -> None:
        """Be ready to compute layers of another instance, of equal layers and form, whose path is this now.

        `addresses` says for how many sectors it has some, None: as many as here. Raises `CapacityError` where there is
        no room for `sectors_cap` sectors, `StateError` for one that is known.
        """
        self.require_rank()
        rank, own = self._home.rank, self._home.path
        with self._lock:
            earlier = self.by_home.get(home)
            if home == rank or (earlier is not None and not earlier.ended):
                raise StateError(f"layers of {home!r} can be computed at {rank!r} already")
            if earlier is not None:
                earlier.close()
            if (path.layers, path.shards) != (own.layers, own.shards):
                raise ConfigError(
                    f"{home!r} has {path.layers} layers of {path.shards} shards, {rank!r} {own.layers} of {own.shards}"
                )
            kv, kinds = self._memory.kv, [ranges.group for ranges in self._memory.groups]
            memory = GuestMemory(kv, kinds, addresses or self._memory.sectors)
            try:
                memory.allot(sectors_cap)
                forward = self._stage_forward()
            except BaseException:
                memory.close()
                raise
            runner = BatchRunner(self._model, memory, self._exchange.format)
            stage = GuestStage(rank, path, log, transport, memory, runner, forward, self.turn, self._exchange)
            self.by_home[home] = stage
            stage.thread.start()

    def of(self, home: str) -> GuestStage:
        """Return the stage of an instance. Raises `StateError` where there is none."""
        stage = self.by_home.get(home)
        if stage is None or stage.ended:
            raise StateError(f"no layers of {home!r} are computed at {self._home.rank!r}; open a stage first")
        return stage

    def close(self, home: str, *, keep: bool = False) -> None:
        """Compute no layers of another instance any more; its memory comes free. Unknown: nothing happens.

        `keep`: of an instance whose process has gone, keep the keys and values, until this is called without, or
        `recover` needs the room before anybody has asked for `kept`.
        """
        with self._lock:
            stage = self.by_home.get(home) if keep else self.by_home.pop(home, None)
        if stage is not None:
            stage.close(keep=keep)
            self._release_forward()

    def kept(self, home: str, epoch: int) -> LayersKV:
        """Say where keys and values lie that `close` kept, which were computed by the path of that epoch.

        They are kept until `close` now. Raises `StateError` where there are none.
        """
        stage = self.by_home.get(home)
        if stage is None:
            raise StateError(f"nothing that was computed for {home!r} is kept at {self._home.rank!r}")
        return stage.kept_layers(epoch)

    # -- inside the engine

    def require_rank(self) -> None:
        """Raise `StateError` while the engine has no name among ranks."""
        if not self._home.rank:
            raise StateError("the engine has no name among other ranks; set `rank` first")

    def free_kept(self) -> None:
        """Give back what is kept of instances that have gone, and that nobody was told of: the own ones come first."""
        for stage in list(self.by_home.values()):
            if stage.ended and not stage.told:
                stage.close()

    def begin_sharing(self) -> None:
        """Have other ranks compute layers of the engine's own steps."""
        with self._lock:
            self._home.forward = self._stage_forward()

    def end_sharing(self) -> None:
        """Have none do so."""
        self._home.forward = None
        self._release_forward()

    def _stage_forward(self) -> StageForward:
        if self._forward is None:
            self._forward = StageForward(self._model, self.turn)
        return self._forward

    def _release_forward(self) -> None:
        """Leave the model as it was once nothing of it is computed with others."""
        with self._lock:
            if self._forward is not None and self._home.forward is None and not self.by_home:
                self._forward.close()
                self._forward = None
