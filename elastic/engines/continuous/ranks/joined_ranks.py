"""The ranks that may compute layers of an engine: with whom it is joined.

It stays at its home rank, with all of its requests; what changes is the path of its steps (`pipeline.path.LayerPath`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from elastic.engines.continuous.moves import MovingRequests
from elastic.engines.continuous.ranks.block_compaction import compact
from elastic.engines.continuous.ranks.home_kv import HomeKV
from elastic.engines.continuous.ranks.hosted_stages import HostedStages
from elastic.engines.continuous.reports import EngineReports
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.core.load import EngineLoad
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.items import LogConnection
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.transport import Transport
from elastic.errors import RankLost, StateError
from elastic.memory.backends.rank_memory import Peers
from elastic.runtime.runtime import Runtime


class JoinedRanks:
    """What a rank asks of its engine to have others compute its layers. Thread-safe; not for listeners.

    First `HostedStages.open` at the other rank, here `attach`; then layers can be exchanged. The last rank that is
    detached parts them.
    """

    def __init__(
        self,
        runtime: Runtime,
        loop: StepLoop,
        home: HomeExecutor,
        kv: HomeKV,
        stages: HostedStages,
        moves: MovingRequests,
        reports: EngineReports,
    ) -> None:
        self._runtime, self._loop, self._home, self._kv = runtime, loop, home, kv
        self._stages, self._moves, self._reports = stages, moves, reports

    def use_peers(self, peers: Peers, sending: Callable[[], bool] = lambda: False) -> None:
        """Exchange layers with other ranks, also such as have no memory file here: they are told to ask this one.

        `sending` says whether hidden states wait to be sent, which copies that are coordinated let pass.
        """
        exchange = self._kv.exchange
        exchange.peers, exchange.pace.sending = peers, sending
        self._runtime.exchange_with(peers, exchange.pace)

    def attach(self, rank: str, log: LogConnection, transport: Transport) -> None:
        """Tell a rank of the engine's memory by a log, so that layers can go there.

        Hidden states go by the transport; it is closed when the last rank is detached. From now on no request moves
        with its keys and values. Raises `StateError` while one does, or for a rank that is attached.
        """
        self._stages.require_rank()

        def attach() -> None:
            home = self._home
            if rank in home.links or rank == home.rank:
                raise StateError(f"rank {rank!r} is attached to the engine of {home.rank!r} already")
            if not home.links:
                self._moves.refuse(f"layers of rank {home.rank!r} are shared with other ranks")
            try:
                self._stages.begin_sharing()
            except BaseException:
                self._moves.received.refusal = ""
                raise
            home.attach(rank, log, partial(self._note_lost, rank))
            home.transport = transport

        self._loop.between_steps(attach)

    def detach(self, rank: str) -> None:
        """Have a rank forget the engine; unknown: nothing happens. Raises `StateError` while it computes layers."""

        def detach() -> None:
            path = self._home.path
            if rank in path.helpers:
                raise StateError(f"rank {rank!r} computes layers of {path.home!r}: {path.shards_of(rank)}")
            self._home.detach(rank)
            if not self._home.links:
                self.part(path)

        self._loop.between_steps(detach)

    def set_cap(self, sectors: int | None) -> EngineLoad:
        """Have so many sectors at the most, what other ranks have allotted, None: any number; return the load then."""
        with self._kv.memory.lock:
            self._kv.memory.set_cap(sectors)
            load = self._reports.load()
        self._loop.news.set()
        return load

    def cap_reached(self) -> bool:
        """Return whether there are no more sectors than the cap allows, nor will be; then the other ranks know it.

        Where only what is free in sectors stands in the way, blocks move together.
        """

        def look() -> bool:
            memory = self._kv.memory
            if not (memory.reached_cap() or (compact(self._loop, self._home, self._kv) and memory.reached_cap())):
                return False
            self._home.flush()
            return True

        return self._loop.between_steps(look)

    # -- inside the engine

    def part(self, path: LayerPath) -> None:
        """Have nothing to do with other ranks any more, as a home. On the loop's thread."""
        self._home.reset(path)
        self._moves.received.refusal = ""
        self._stages.end_sharing()
        self._reports.begin()

    def close(self) -> None:
        """Have no other rank wait for this one, when the loop has ended."""
        self._home.abort()
        self._home.set_cohorts(1)
        for home in list(self._stages.by_home):
            self._stages.close(home)
        self._stages.end_sharing()
        self._runtime.exchange_with(None, None)  # who was to be let pass was this engine, and so its model

    def _note_lost(self, rank: str) -> None:
        """Note that the log of a rank has ended; from any thread."""

        def lose() -> None:
            if rank in self._home.path.helpers:
                why = f"rank {rank!r} computes layers of {self._home.rank!r} no more"
                self._loop.lose(RankLost(why, rank=rank))

        with suppress(StateError):
            self._loop.post(lose)
