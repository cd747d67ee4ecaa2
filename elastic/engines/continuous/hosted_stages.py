"""Layers of other instances that are computed here: the part of an engine for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from elastic.engines.continuous.moves import MovingRequests
from elastic.engines.core.kv_state import LayersKV
from elastic.engines.executor.batch_runner import BatchRunner
from elastic.engines.executor.block_layout import layout_of
from elastic.engines.executor.layer_groups import LayerGroup
from elastic.engines.executor.model_runner import ModelRunner
from elastic.engines.pipeline.forward import StageForward
from elastic.engines.pipeline.items import LogConnection
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.stage import GuestStage
from elastic.engines.pipeline.transport import Transport
from elastic.engines.pipeline.turn import Turn
from elastic.errors import ConfigError, StateError
from elastic.kvcache.storage.guest import GuestMemory
from elastic.memory.backends.rank_memory import Peers
from elastic.memory.rate_limit import YieldingPace
from elastic.runtime.runtime import Runtime

ANSWER_S = 30.0
"""For how long a rank is waited for that copies or is asked something."""
GIVING_BACK_S = 1e-3
"""For how long steps wait at a time for memory to be given back."""


class HostedStages(MovingRequests):
    """What a rank asks of its engine for instances whose home is another rank. Thread-safe; not for listeners."""

    runtime: Runtime
    _model: Any
    _layer_groups: tuple[LayerGroup, ...]
    _runner: ModelRunner
    _turn: Turn
    _pipeline_lock: threading.RLock  # of the two below, and of `_home.forward` being set
    _stages: dict[str, GuestStage]  # by home
    _forward: StageForward | None

    @property
    def rank(self) -> str:
        """This rank's name among others; set before the engine has anything to do with them."""
        return self.path.home

    @rank.setter
    def rank(self, name: str) -> None:
        if name == self.path.home:
            return
        if self._home.links or self._stages:
            raise StateError(f"rank {self.path.home!r} computes layers with others; it cannot be renamed to {name!r}")
        self._home.path = replace(self.path, home=name, ranks=(name,) * len(self.path.ranks))

    @property
    def path(self) -> LayerPath:
        """The path of the engine's own steps that are begun now."""
        return self._home.path

    def use_peers(self, peers: Peers, sending: Callable[[], bool] = lambda: False) -> None:
        """Exchange layers with other ranks, also such as have no memory file here: they are told to ask this one.

        `sending` says whether hidden states wait to be sent, which copies that are coordinated let pass.
        """
        self._kv_exchange.peers, self._kv_exchange.pace.sending = peers, sending
        self.runtime.exchange_with(peers, self._kv_exchange.pace)

    @property
    def exchange_pace(self) -> YieldingPace:
        """The pace of copies beside what this rank computes."""
        return self._kv_exchange.pace

    def open_stage(
        self,
        home: str,
        log: LogConnection,
        transport: Transport,
        path: LayerPath,
        sectors_cap: int,
        addresses: int | None = None,
    ) -> None:
        """Be ready to compute layers of another instance, of equal layers and form, whose path is this now.

        `addresses` are its `sector_addresses`; None: as many as here. Raises `CapacityError` where there is no room for
        `sectors_cap` sectors, `StateError` for one that is known.
        """
        self._require_rank()
        with self._pipeline_lock:
            earlier = self._stages.get(home)
            if home == self.rank or (earlier is not None and not earlier.ended):
                raise StateError(f"layers of {home!r} can be computed at {self.rank!r} already")
            if earlier is not None:
                earlier.close()
            if (path.layers, path.shards) != (self.path.layers, self.path.shards):
                raise ConfigError(
                    f"{home!r} has {path.layers} layers of {path.shards} shards, {self.rank!r} {self.path.layers} of "
                    f"{self.path.shards}"
                )
            forward = self._stage_forward()
            memory = self._guest_memory(sectors_cap, addresses or self.sector_addresses)
            layout = layout_of(self.kv_format, self._model.dtype)
            runner = BatchRunner(self._model, memory, self._layer_groups, layout)
            stage = GuestStage(self.rank, path, log, transport, memory, runner, forward, self._turn, self._kv_exchange)
            self._stages[home] = stage
            stage.start()

    def stage_kv(self, home: str, shards: Sequence[int]) -> LayersKV:
        """Say where keys and values of another instance's shards lie here."""
        return self._stage(home).layers_kv(shards)

    def allot(self, home: str, sectors: int) -> None:
        """Keep pages for so many sectors of another instance. Raises `CapacityError`, and nothing has changed."""
        self._stage(home).memory.allot(sectors)

    def close_stage(self, home: str, *, keep: bool = False) -> None:
        """Compute no layers of another instance any more; its memory comes free. Unknown: nothing happens.

        `keep`: of an instance whose process has gone, keep the keys and values, until this is called without, or
        `recover` needs the room before anybody has asked for `kept_layers`.
        """
        with self._pipeline_lock:
            stage = self._stages.get(home) if keep else self._stages.pop(home, None)
        if stage is not None:
            stage.close(keep=keep)
            self._release_forward()

    def kept_layers(self, home: str, epoch: int) -> LayersKV:
        """Say where keys and values lie that `close_stage` kept, which were computed by the path of that epoch.

        They are kept until `close_stage` now. Raises `StateError` where there are none.
        """
        stage = self._stages.get(home)
        if stage is None:
            raise StateError(f"nothing that was computed for {home!r} is kept at {self.rank!r}")
        return stage.kept_layers(epoch)

    @property
    def sector_addresses(self) -> int:
        """How many sectors there are addresses for: their numbers are below it."""
        return self._memory.sectors

    def check(self) -> None:
        """Recount the blocks of all sequences, and the memory of other instances here."""
        super().check()
        for stage in list(self._stages.values()):
            stage.memory.check()

    # -- inside

    def _require_rank(self) -> None:
        if not self.rank:
            raise StateError("the engine has no name among other ranks; set `rank` first")

    def _stage(self, home: str) -> GuestStage:
        stage = self._stages.get(home)
        if stage is None or stage.ended:
            raise StateError(f"no layers of {home!r} are computed at {self.rank!r}; open a stage first")
        return stage

    def _guest_memory(self, sectors: int, addresses: int) -> GuestMemory:
        memory = GuestMemory(self._memory.kv, [ranges.group for ranges in self._memory.groups], addresses)
        try:
            memory.allot(sectors)
        except BaseException:
            memory.close()
            raise
        return memory

    def _stage_forward(self) -> StageForward:
        with self._pipeline_lock:
            if self._forward is None:
                self._forward = StageForward(self._model, self._turn)
            return self._forward

    def _release_forward(self) -> None:
        """Leave the model as it was once nothing of it is computed with others."""
        with self._pipeline_lock:
            if self._forward is not None and self._home.forward is None and not self._stages:
                self._forward.close()
                self._forward = None
