"""An engine whose layers other ranks compute: with whom it is joined.

It stays at its home rank, with all of its requests; what changes is the path of its steps (`pipeline.path.LayerPath`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from elastic.engines.continuous.recovery import RecoveringEngine
from elastic.engines.core.load import EngineLoad
from elastic.engines.core.step_budget import CostBudget, PathBudget
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.engines.executor.layer_groups import LayerGroup
from elastic.engines.pipeline.batches import BatchCount
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.items import LogConnection
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.transport import Transport
from elastic.engines.pipeline.turn import StageTimes, Turn
from elastic.errors import ConfigError, RankLost, StateError
from elastic.memory.rate_limit import YieldingPace
from elastic.planning.arrangement.step_pages import StepPages
from elastic.planning.pipeline.chunk_cost import ChunkCost

LEAST_SHARE = 4
"""Steps of equal cost have this part of `max_batch_tokens` at least: at the end of the longest prompts."""


class PipelinedEngine(RecoveringEngine):
    """What a rank asks of its engine to compute layers with others. Thread-safe; not for listeners.

    First `open_stage` at the other rank, here `attach_stage` and `use_transport`; then layers can be exchanged. The
    last rank that is detached parts them.
    """

    _max_batch_tokens: int
    step_pages = StepPages()
    """What its rank keeps free for steps over its sectors, and those of others; before the engine is started."""

    # -- at home

    @property
    def lost_rank(self) -> str | None:
        """The rank for whose loss no step is begun until `recover`; None: all is well."""
        lost = self._loop.lost
        return None if lost is None else lost.rank

    def set_cohorts(self, cohorts: int | None) -> None:
        """Have as many batches in flight, None: as many as the stages need; requests that live are shared out anew."""
        if cohorts is not None and cohorts < 1:
            raise ConfigError(f"cohorts={cohorts} must be at least 1, or None")

        def share_out() -> None:
            self._settle()
            if self.path.copies > 1:
                raise StateError(
                    f"cohorts={cohorts}: the layers have {self.path.copies} copies; have them be one first"
                )
            self._cohorts = cohorts
            self._use_cohorts(cohorts or self._home.cohorts)

        self._between_steps(share_out)

    def set_copies(self, copies: int) -> LayerPath:
        """Have requests be shared out among so many copies of the layers, each with a batch in flight; return the path.

        All copies are where the layers are now. Shards of one can then go to another rank: they are a replica there, of
        which the copy's requests have their keys and values. Raises `ConfigError` while copies are at different ranks,
        `RankLost`.
        """
        if copies < 1:
            raise ConfigError(f"copies={copies} must be at least 1")

        def share_out() -> LayerPath:
            self._settle()
            if self._written is not None:
                raise StateError("an exchange has begun; end it first")
            path = self.path.with_copies(copies)
            self._tell_no_kv()
            self._home.share_out(path)
            self._share_out(copies)
            self._tell_kv()
            return self.path

        return self._between_steps(share_out)

    def use_cost(self, cost: ChunkCost) -> None:
        """Have steps cost the same while other ranks compute layers, so that these do not wait for each other.

        Before the engine is started.
        """
        scheduler, most = self._loop.scheduler, self._max_batch_tokens
        equal = CostBudget(cost, max(1, most // LEAST_SHARE), most, usual=most)
        scheduler.budget = PathBudget(scheduler.budget, equal, lambda: bool(self.path.helpers))

    def attach_stage(self, rank: str, log: LogConnection) -> None:
        """Tell a rank of the engine's memory by a log, so that layers can go there.

        From now on no request moves with its keys and values. Raises `StateError` while one does, or for a rank that
        is attached.
        """
        self._require_rank()

        def attach() -> None:
            home = self._home
            if rank in home.links or rank == self.rank:
                raise StateError(f"rank {rank!r} is attached to the engine of {self.rank!r} already")
            if not home.links:
                self._received.refuse(f"layers of rank {self.rank!r} are shared with other ranks")
                if self._held:
                    self._received.allow()
                    raise StateError(f"requests {sorted(self._held)} are being handed over; try again")
            try:
                with self._pipeline_lock:
                    home.forward = self._stage_forward()
            except BaseException:
                self._received.allow()
                raise
            home.attach(rank, log, partial(self._note_lost, rank))

        self._between_steps(attach)

    def detach_stage(self, rank: str) -> None:
        """Have a rank forget the engine; unknown: nothing happens. Raises `StateError` while it computes layers."""

        def detach() -> None:
            if rank in self.path.helpers:
                raise StateError(f"rank {rank!r} computes layers of {self.rank!r}: {self.path.shards_of(rank)}")
            self._home.detach(rank)
            if not self._home.links:
                self._part(self.path)

        self._between_steps(detach)

    def use_transport(self, transport: Transport) -> None:
        """Have hidden states go by this; it is closed when the last rank is detached."""

        def use() -> None:
            self._settle()
            if self._home.transport is not None and self._home.transport is not transport:
                self._home.transport.close()
            self._home.transport = transport

        self._between_steps(use)

    def set_cap(self, sectors: int | None) -> EngineLoad:
        """Have so many sectors at the most, what other ranks have allotted, None: any number; return the load then."""
        with self._memory.lock:
            self._memory.set_cap(sectors)
            load = self.load()
        self._loop.wake()
        return load

    def cap_reached(self) -> bool:
        """Return whether there are no more sectors than the cap allows, nor will be; then the other ranks know it."""

        def look() -> bool:
            if not self._memory.reached_cap():
                return False
            self._home.flush()
            return True

        return self._between_steps(look)

    # -- inside, on the loop's thread

    def _fill_stages(self) -> None:
        """Have as many batches in flight as the stages of the path need, unless somebody has said how many."""
        path = self.path
        if self._cohorts is not None or path.copies > 1:
            return
        stages = [(home, stage) for home, stage in list(self._stages.items()) if not stage.ended]
        others = {home: stage.steps for home, stage in stages if self.rank in stage.path.ranks}
        count = self._batches.of(path, self._loop.scheduler.steps, others)
        if count != self._home.cohorts and self._loop.lost is None:
            self._loop.settle_all()
            self._use_cohorts(count)

    def _prepare(self) -> bool:
        """Do some of what later steps gain by, while no sequence is here; return whether there was any of it."""
        return not self._stages and self._home.prepare()

    def _use_cohorts(self, count: int) -> None:
        """Have so many batches in flight; none is."""
        self._loop.set_cohorts(count)
        self._home.set_cohorts(count)

    def _note_lost(self, rank: str) -> None:
        """Note that the log of a rank has ended; from any thread."""

        def lose() -> None:
            if rank in self.path.helpers:
                self._loop.lose(RankLost(f"rank {rank!r} computes layers of {self.rank!r} no more", rank=rank))

        with suppress(StateError):
            self._loop.post(lose)

    @property
    def stage_times(self) -> StageTimes:
        """What this rank did with its time: for how long it computed, and waited for other ranks."""
        return self._turn.times

    @property
    def step_s(self) -> float:
        """Seconds of a step while this rank computes all layers, in the mean of the last; 0.0: there was none."""
        return self._home.step_s

    # -- inside, on any thread

    def _open_pipeline(self, groups: tuple[LayerGroup, ...], cohorts: int | None) -> Callable[[], None]:
        """Begin as an engine that computes all of its layers alone, and no others; return what ends it."""
        self._turn, self._pipeline_lock, self._layer_groups = Turn(), threading.RLock(), groups
        self._stages, self._forward, self._cohorts, self._batches = {}, None, cohorts, BatchCount()
        self._written = self._flipping = None
        self._kv_exchange = KVExchange(self.kv_format, YieldingPace(self._turn.wait_idle, lambda: self._turn.stage_s))
        path = LayerPath.alone("", sum(len(group.layers) for group in groups), self.runtime.shards)
        self._home = HomeExecutor(self._runner, self._memory, self._turn, path)
        self._home.set_cohorts(cohorts or 1)
        return self._end_pipeline

    def _is_own_thread(self) -> bool:
        """Return whether the present thread computes the engine's own steps."""
        thread = threading.current_thread()
        return thread is self._thread or self._home.is_own_thread(thread)

    def _end_pipeline(self) -> None:
        """Have no other rank wait for this one, when the loop has ended."""
        self._home.abort()
        self._home.set_cohorts(1)
        for home in list(self._stages):
            self.close_stage(home)
        self._home.forward = None
        self._release_forward()
        self.runtime.exchange_with(None, None)  # who was to be let pass was this engine, and so its model
