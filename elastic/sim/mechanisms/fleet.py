"""A fleet in simulated time with all that the real one can do: its groups, moves, policies and watch over ranks."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from elastic import clock
from elastic.cluster.fleet.groups.groups import Groups
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.membership import Membership
from elastic.cluster.fleet.moves import Mover
from elastic.cluster.fleet.overload.prices import PricedVerbs
from elastic.cluster.fleet.planning.policies import FleetPolicies
from elastic.cluster.fleet.policy_threads import PolicyThreads
from elastic.cluster.fleet.records.memory_file import hold_memory
from elastic.cluster.fleet.supervisor import Supervisor
from elastic.cluster.rank.spec import RankSpec
from elastic.config import Overload
from elastic.engines.base import Listener, Request
from elastic.engines.core.kv_state import KVDirectory, KVSource
from elastic.engines.pipeline.turn import StageTimes
from elastic.errors import ElasticError, StateError
from elastic.memory.backends.shared_file import host_name, share
from elastic.sim.core.executor import LocalExecutor
from elastic.sim.core.fleet import SimulatedFleet
from elastic.sim.core.threads import SimulatedThreads
from elastic.sim.mechanisms.instance import RankInstance
from elastic.sim.mechanisms.model import LayeredModel
from elastic.sim.mechanisms.rank import SimulatedRank, World
from elastic.sim.mechanisms.wires import Wires

START_S = 30.0
"""How long a rank takes to come, unless it is said."""


class ScheduledVerbs(PricedVerbs):
    """The real verbs of a fleet, for threads of the simulation."""

    def __init__(self, fleet: ElasticFleet, groups: Groups, mover: Mover, overload: Overload | None) -> None:
        self._dispatcher, self._log = fleet.dispatcher, fleet.log
        self._overload = overload or self._overload
        self._groups, self.move = groups, mover.move


class ElasticFleet(SimulatedFleet):
    """Instances that move requests, drop and share layers and swap them, by the real policies, or by hand (`call`).

    With `watch` ranks tell that they are alive, and what is silent is fenced; with `replaces` another one comes for
    each that is lost, in `start_s`. With `moves` ranks tell where keys and values are, so that requests move with them.
    """

    def __init__(
        self,
        threads: SimulatedThreads,
        model: LayeredModel,
        instances: int,
        policies: FleetPolicies | None = None,
        *,
        watch: bool = False,
        replaces: bool = False,
        moves: bool = False,
        start_s: float = START_S,
        **options: Any,
    ) -> None:
        self.layered, self.threads, events = model, threads, threads.events
        self.world = World(model, Wires(events, model.links))
        self.failed: list[ElasticError] = []
        """What verbs raised that were called."""
        self._policies = policies or FleetPolicies()
        self._watched, self.start_s = watch, start_s
        self._moves = moves or self._policies.balance
        self._file = tempfile.TemporaryFile() if self._moves else None  # noqa: SIM115 - until `finish`
        with clock.use(self.threads):
            super().__init__(events, model.rank, instances, **options)
            self.members = Membership(self.dispatcher, self.log)
            groups = self.groups = Groups(self.dispatcher, self.log)
            mover = Mover(self.dispatcher, self.log, groups.ranks.introduce)
            self.verbs = ScheduledVerbs(self, groups, mover, self._policies.overload)
            self.members.on_gone = groups.registry.lost
            self.on_lost = self.members.lost
            names = (f"again{number}" for number in itertools.count())
            starter: Any = SimpleNamespace(
                waits=False, next_name=partial(next, names), start=self._start_again, end=lambda: None
            )
            self._supervisor = Supervisor(
                self.dispatcher, self.log, starter, replaces=replaces, beat_timeout_s=2.0, hang_timeout_s=60.0
            )
            self.members.on_losing, self.members.on_lost = self._supervisor.expect, self._supervisor.lost
            self._threads = PolicyThreads(
                self._policies, self.dispatcher, self.log, mover, self.verbs, groups, self._scale_out
            )
        for instance in self.dispatcher.instances.values():
            self._open_books(instance)
        self._watch()

    # -- a run

    def start(self) -> None:
        """Have the policies begin, as the next event."""
        if self._watched:
            self.threads.thread(self._supervisor.start, "start of the supervisor").start()
        self.threads.thread(self._threads.start, "start of the policies").start()

    def call(self, verb: Callable[[ScheduledVerbs], object]) -> None:
        """Have a verb be done beside all else, from now on; see `failed`."""

        def act() -> None:
            try:
                verb(self.verbs)
            except ElasticError as error:
                self.failed.append(error)

        self.threads.thread(act, "call").start()

    def finish(self) -> None:
        """End all threads of the simulation; nothing is asked any more then. Can be called twice."""
        self.threads.close()
        if self._file is not None:
            self._file.close()
            for instance in self.dispatcher.instances.values():
                if instance.memory is not None:
                    instance.memory.close()
            self._file = None

    def stage_times(self) -> dict[str, StageTimes]:
        """Return what ranks did with their time, of those that computed layers with others, while they did."""
        times = {name: turn.times for name, turn in self.world.turns.items()}
        return {name: each for name, each in times.items() if each.busy_s or each.bubble_s}

    def check(self) -> None:
        """Recount. Raises `IntegrityError`."""
        self.dispatcher.check()
        for name in self.dispatcher.instances:
            self.world.ranks[name].check()

    def submit(self, request: Request, listener: Listener) -> None:
        """Take a request. Raises as a fleet does: `StateError`, too, where no rank is left and none comes."""
        if self._supervisor.hopeless:
            raise StateError("no rank is left, and none comes")
        super().submit(request, listener)

    # -- faults

    def kill(self, name: str) -> None:
        """Have a rank end at once, with all that it had told; where ranks say where keys and values are, these stay."""
        instance = self.world.ranks[name].instance
        instance.heard_all = True
        instance.kill("killed")

    def hang(self, name: str) -> None:
        """Have a rank do nothing any more, and say nothing: whoever watches fences it."""
        rank = self.world.ranks[name]
        rank.instance.hangs = rank.turn.hangs = True

    # -- inside

    def _make(self, name: str, executor: LocalExecutor) -> RankInstance:
        made = RankInstance(self.threads, name, self.layered, executor, self.model.stretch_s)
        kv = self.layered.kv
        memory = None if self._file is None else KVSource(share(self._file.fileno()), self.layered.page_bytes, kv)
        cost = self.layered.model_cost if self._policies.lookahead else None
        made.hello = replace(made.hello, host=host_name(), pid=os.getpid(), kv=kv, memory=memory, cost=cost)
        rank = SimulatedRank(self.world, made)
        if self._moves:
            rank.moves.report()
        return made

    def _open_books(self, instance: Instance) -> None:
        """Note where a rank's keys and values can be read."""
        instance.memory = hold_memory(instance.name, instance.hello.memory)
        instance.directory = KVDirectory(instance.memory.source) if instance.memory is not None else None

    def _scale_out(self, count: int) -> tuple[str, ...]:
        """Start so many more ranks, on a thread; return their names when they serve."""
        clock.sleep(self.start_s)
        return tuple(self.join().name for _ in range(count))

    def _start_again(self, spec: RankSpec) -> Instance:
        """Start a rank for one that was lost, on a thread; return when it serves."""
        clock.sleep(self.start_s)
        return self.join()

    def join(self) -> Instance:
        """Have one more rank serve."""
        with clock.use(self.threads):
            instance = self.dispatcher.instances[self.add().name]
        self._open_books(instance)
        with self.dispatcher.lock:
            self.dispatcher.dispatch()
        self.log.add("joined", rank=instance.name, instance=instance.name)
        return instance
