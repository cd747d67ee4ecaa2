"""The threads that send requests by their length, and have instances share their layers for long ones (AMOEBA)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from elastic import clock
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.results import GroupStatus, Resharded
from elastic.cluster.fleet.groups.verbs import GroupVerbs
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.lengths.readings import Capacity, LengthReadings
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.ticks import Attempts
from elastic.config import Lengths
from elastic.controller.policies.lengths.policy import LengthPlan, LengthPolicy, LengthState, ScaleDown, ScaleUp
from elastic.controller.policies.lengths.snapshot import LengthSnapshot, largest_together
from elastic.controller.remedies import Offer, cheapest
from elastic.errors import ConfigError

logger = logging.getLogger(__name__)
ACT_S = 30.0
"""How long instances may take to become one, or to part; where they may not, all serve on as they are."""
_Limits = tuple[tuple[Instance, ...], tuple[int, ...], tuple[int, ...]]
"""Instances that serve, what each has by itself, or could have in its group, and what its rank's limit would allow."""
LEAST_S = 0.005
"""Between two ticks at least: requests that come together are looked at together."""


class LengthController:
    """Asks the policy whenever a request waits, and at each tick, from `start` to `stop`.

    Requests are sent on its thread; another one measures, and has instances change, one after another, so that none
    waits for that.
    """

    def __init__(self, dispatcher: Dispatcher, verbs: GroupVerbs, settings: Lengths) -> None:
        self.reason = ""
        """What the policy said last."""
        self._dispatcher, self._verbs, self._settings = dispatcher, verbs, settings
        self._policy, self._state = LengthPolicy(settings), LengthState()
        self._readings = LengthReadings(dispatcher)
        self._capacity: Capacity = {}
        self._measured: _Limits = ((), (), ())  # as they were when capacity was measured
        self._noted: tuple[list[Instance], list[str], Capacity] = ([], [], {})  # when they came to know what they reach
        self._measuring = False  # or asked for
        self._lock = clock.current().lock()
        self._changing: tuple[frozenset[str], ...] = ()  # ranks of the changes that are asked for, and not done
        self._changes: clock.Queue = clock.current().queue()  # True: measure
        self._wake, self._stopping = clock.current().event(), clock.current().event()
        failed = "the policy of lengths could not act"
        self._decisions, self._reshards, self._measurements = Attempts(failed), Attempts(failed), Attempts(failed)
        self._threads = [
            clock.current().thread(self._decide, "elastic-fleet-lengths"),
            clock.current().thread(self._change, "elastic-fleet-reshard"),
        ]

    def start(self) -> None:
        """Begin: requests go where the policy says from now on. Raises `ConfigError` if no layer can be shared."""
        self._measure()
        self._note_reach()
        if self._capacity and not any(degree > 1 for blocks in self._capacity.values() for degree in blocks):
            raise ConfigError("policy='lengths': layers are not cut; start the fleet with shards=4")
        self._dispatcher.on_waiting = self._wake.set
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Do nothing more; return when what is being done is done. Requests go in order then."""
        self._stopping.set()
        self._wake.set()
        self._changes.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        with self._dispatcher.lock:
            self._dispatcher.on_waiting = None
            self._dispatcher.dispatch()

    def tick(self) -> LengthPlan | None:
        """Look once, send requests, and ask for changes; return what was decided. None: no rank serves.

        Raises what the fleet's verbs raise.
        """
        self._ask_to_measure()
        self._note_reach()
        groups = self._verbs.groups()
        if (plan := self._plan_at_rest(groups)) is not None:
            self.reason = plan.reason
            return plan
        changing = frozenset[str]().union(*self._changing)
        snapshot = self._readings.read(groups, self._capacity, changing)
        if snapshot is None:
            return None
        plan = self._policy.decide(snapshot, self._state)
        self._state, self.reason = plan.state, plan.reason
        self._send(snapshot, plan)
        ranks = {instance.name: frozenset(instance.ranks) for instance in snapshot.instances}
        for up in plan.ups:
            self._ask(up, frozenset[str]().union(*(ranks[name] for name in up.instances)))
        for down in plan.downs:
            self._ask(down, ranks[down.instance])
        return plan

    def change(self, asked: ScaleUp | ScaleDown) -> Resharded:
        """Have instances become one, or one part. Raises what the fleet's verbs raise."""
        most, names = self._settings.layers_per_step, asked.instances if isinstance(asked, ScaleUp) else asked.instance
        if isinstance(asked, ScaleUp):
            why = f"request {asked.request} is too long for each of {', '.join(asked.instances)}{self._price_of(asked)}"
        else:
            why = "no request needs its ranks together"
        done = self._verbs.reshard(names, tp=asked.degree, timeout_s=ACT_S, why=why, layers_per_step=most)
        logger.info("%s: tp=%d (%s) %s; %s", ", ".join(done.members), asked.degree, done.status, why, done.why)
        return done

    # -- inside

    def _plan_at_rest(self, groups: Sequence[GroupStatus]) -> LengthPlan | None:
        """Return what is to be done where nothing is: most ticks find that, and a snapshot is of every request."""
        with self._dispatcher.lock:
            if groups or self._dispatcher.queue or not self._dispatcher.instances:
                return None
            plan = self._policy.at_rest(self._state)
            if plan is not None:
                self._dispatcher.promised = {}
            return plan

    def _price_of(self, up: ScaleUp) -> str:
        """Say what it costs, as the arbiter does; empty, if the request waits no more."""
        most = self._settings.layers_per_step
        planned = self._verbs.reshard(up.instances, tp=up.degree, dry_run=True, layers_per_step=most)
        with self._dispatcher.lock:
            record = next((queued for queued in self._dispatcher.queue if queued.request.id == up.request), None)
            first = self._dispatcher.instances.get(up.instances[0])
        if record is None or first is None or planned.price is None:
            return ""
        size, blocks = first.kv_format.group_block_bytes, self._capacity.get(first.name, {})
        largest, now = size * blocks.get(up.degree, 0), size * blocks.get(1, 0)
        needed = size * first.request_blocks(record.request)
        offer = Offer("reshard", planned.price.seconds, largest - now, largest_bytes=largest)
        choice = cheapest([offer], max(1, needed - now), needed)
        return f"; {choice.words}" if choice is not None else ""

    def _decide(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._settings.tick_s)
            self._wake.clear()
            if not self._stopping.is_set():
                self._decisions.attempt(self.tick)
            self._stopping.wait(LEAST_S)

    def _change(self) -> None:
        while (asked := self._changes.get()) is not None:
            if asked is True:
                self._measurements.attempt(self._measure)
                self._measuring = False
                continue
            if not self._stopping.is_set() and self._is_wanted(asked, self._changing[0]):
                self._reshards.attempt(partial(self.change, asked))
            with self._lock:
                self._changing = self._changing[1:]
            self._wake.set()

    def _is_wanted(self, asked: ScaleUp | ScaleDown, ranks: frozenset[str]) -> bool:
        """Return whether a request still waits for ranks to become one: none may, when earlier changes are done."""
        with self._dispatcher.lock:
            waiting = [record.request.id for record in self._dispatcher.queue]
            return isinstance(asked, ScaleDown) or any(self._dispatcher.promised.get(id_) == ranks for id_ in waiting)

    def _ask_to_measure(self) -> None:
        """Have the other thread measure when ranks or limits are others than before; what is known holds until then."""
        limits = self._limits()
        if limits[0] and limits != self._measured and not self._measuring:
            self._measuring = True
            self._changes.put(True)

    def _measure(self) -> None:
        """Ask ranks what instances of several of them could hold."""
        limits = self._limits()
        if limits[0] and not self._stopping.is_set():
            self._verbs.get_ready()
            self._capacity = self._verbs.capacity(self._degrees)
            self._measured = limits
            self._wake.set()

    def _limits(self) -> _Limits:
        with self._dispatcher.lock:  # lists are faster: each tick asks
            serving = self._dispatcher.serving()
            whole = [i.group_blocks if i.group else i.load.total_blocks for i in serving]
            return tuple(serving), tuple(whole), tuple([i.load.uncapped_blocks for i in serving])

    @property
    def _degrees(self) -> tuple[int, ...]:
        degrees = [1]
        while degrees[-1] < self._settings.most_ranks:
            degrees.append(2 * degrees[-1])
        return tuple(degree for degree in degrees if degree == 1 or degree >= self._settings.step)

    def _note_reach(self) -> None:
        """Have instances know what they could hold with others of their host, so that requests wait for it."""
        with self._dispatcher.lock:
            serving = self._dispatcher.serving()
            hosts = [i.hello.host for i in serving]
            if (serving, hosts, self._capacity) == self._noted:
                return
            self._noted = serving, hosts, self._capacity
            capacities = [(i, host, self._capacity.get(i.name, {})) for i, host in zip(serving, hosts, strict=True)]
            largest = largest_together((host, blocks_at) for _, host, blocks_at in capacities)
            for instance, host, blocks_at in capacities:
                reached = [min(blocks, largest.get((host, n), 0)) for n, blocks in blocks_at.items() if n > 1]
                instance.policy_blocks = max(reached, default=0)

    def _send(self, snapshot: LengthSnapshot, plan: LengthPlan) -> None:
        """Give requests to instances; who finds no room there yet is the next one at it."""
        ranks = {instance.name: frozenset(instance.ranks) for instance in snapshot.instances}
        promised, full = dict(plan.state.targets), set[str]()
        with Delivery(self._dispatcher.lock) as delivery:
            waiting = {record.request.id: record for record in self._dispatcher.queue}
            for request, name in plan.routes:
                record = waiting.get(request)
                if record is None or name in full:
                    continue
                if not self._dispatcher.place(record, ranks[name]):
                    full.add(name)
                    promised[request] = ranks[name]
            for request in plan.refused:
                if request in waiting:
                    self._dispatcher.give_up(waiting[request], clock.now(), delivery)
            self._dispatcher.promised = promised

    def _ask(self, change: ScaleUp | ScaleDown, ranks: frozenset[str]) -> None:
        with self._lock:
            self._changing = (*self._changing, ranks)
        self._changes.put(change)
