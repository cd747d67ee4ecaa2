"""The groups of a fleet, as verbs change them: instances merge and part, and layers change their rank while they serve.

Layers are dropped where they are held twice, and taken back (KunServe, section 4); shared by several ranks, which is
tensor parallelism that changes while it serves (AMOEBA, section 3); migrated, or replicated for half of the requests
(CoCoServe, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from elastic import clock
from elastic.cluster.control.stage_questions import Bulk
from elastic.cluster.control.status import EventKind
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups import targets
from elastic.cluster.fleet.groups.caps.follow import follow
from elastic.cluster.fleet.groups.caps.needs import blocks_told
from elastic.cluster.fleet.groups.caps.reach import note_reach
from elastic.cluster.fleet.groups.caps.staging import Staging
from elastic.cluster.fleet.groups.exchange import LIVE, Exchange
from elastic.cluster.fleet.groups.flip import ExchangeForm
from elastic.cluster.fleet.groups.group import Group, Shape
from elastic.cluster.fleet.groups.price import DryRuns, shape_of
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.cluster.fleet.groups.registry import GroupRegistry
from elastic.cluster.fleet.groups.results import Exchanged
from elastic.cluster.fleet.planning.budgets import Budgets
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.errors import CapacityError, RankLost, StateError
from elastic.planning.arrangement.drop import DropPlan, drop_plan
from elastic.planning.sharding.share import Share

FORM_S = 60.0
"""How long ranks that are to compute together may wait for requests of those of them that serve."""
TargetOf = Callable[[Shape], Shape]
FAILED: Mapping[EventKind, EventKind] = {
    "dropped": "drop failed",
    "restored": "restore failed",
    "formed": "forming failed",
    "resharded": "reshard failed",
    "migrated": "migration failed",
    "replicated": "replication failed",
    "evicted": "eviction failed",
}


class Groups:
    """The groups there are, and how their layers change ranks.

    Verbs run one at a time, each on the thread that asks for it, which must be none that reads from ranks.
    """

    def __init__(self, dispatcher: Dispatcher, log: EventLog, bulk: Bulk = "sockets") -> None:
        self._dispatcher, self._log = dispatcher, log
        self.ranks = Ranks(dispatcher, bulk)
        self._staging, self.dry_runs = Staging(self.ranks), DryRuns(self.ranks, log)
        self.registry = GroupRegistry(self.ranks, self._staging, log)
        self.verbs = clock.current().lock()
        """Held by the verb that runs; see `verb`."""
        self._layer_bytes: tuple[int, ...] = ()
        self.following = False
        """Whether it is no verb that runs, but caps that change."""

    def layer_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each decoder layer's weights: they are the same at all ranks."""
        if not self._layer_bytes:
            serving = self.ranks.serving()
            if not serving:
                raise StateError("no rank serves: the bytes of its layers are not known")
            (room,) = self.ranks.measure([serving[0].name]).values()
            every = range(room.path.shards)
            self._layer_bytes = tuple(pages.pages(every) * room.page_bytes for pages in room.weight_pages)
        return self._layer_bytes

    # -- beside verbs

    def follow_needs(self) -> int:
        """Have each group's memory go where requests need it; return in how many it did. None, while a verb runs.

        Ranks that are by themselves keep no room for a drop while a request waits that needs it.
        """
        if not (self.registry.groups or self._staging.caps) or not self.verbs.acquire(blocking=False):
            return 0
        try:
            self.following = True
            self._staging.give_way(self._alone())
            followed = 0
            for group in [each for each in self.registry.groups if all(map(self.ranks.there, each.members))]:
                with self.registry.acting(group.members):
                    followed += group in self.registry.groups and follow(self.ranks, group)
            return followed
        finally:
            self.following = False
            self.verbs.release()

    def keep_staging(self) -> None:
        """Have ranks that are by themselves keep room for the first layer of a drop; see `Staging`. It waits for none.

        Raises `RankLost`.
        """
        if not self.verbs.acquire(blocking=False):
            return
        try:
            self._staging.keep(self._alone())
        finally:
            self.verbs.release()

    def _alone(self) -> list[str]:
        return [each.name for each in self.ranks.serving() if self.registry.group_of(each.name) is None]

    # -- verbs

    @contextmanager
    def verb(self, names: Collection[str] | None = None) -> Iterator[None]:
        """Have a verb run alone, and not before groups of its ranks (None: all groups) that lost one are repaired.

        While that is waited for, others run.
        """
        while True:
            self.registry.settle(names)
            with self.verbs:
                if self.registry.is_whole(names):
                    yield
                    return

    def plan(self, needed: int, *, whole: bool, most: int | None) -> DropPlan:
        """Plan a drop that frees so many bytes; see `Fleet.drop`. Raises `CapacityError` where none does."""
        layer_bytes, rooms = self.layer_bytes(), self.ranks.measure(each.name for each in self.ranks.serving())
        shapes = [group.shape for group in self.registry.groups]
        shapes += [shape_of((name,), rooms) for name in rooms if self.registry.group_of(name) is None]
        fitted = Budgets(rooms, [self.ranks.instance(name) for name in rooms]).fitted
        groups = [tuple(map(fitted, targets.held(each.paths, each.weights))) for each in shapes]
        plan = drop_plan(groups, layer_bytes, needed, whole=whole, most=most)
        if plan is None:
            held = sum(layer_bytes[i] for each in groups for held in each for i in held.layers)
            raise CapacityError(
                "no drop frees so much: one copy of each layer stays, in ranks that have room for live requests, too; "
                "add ranks, or swap layers to a smaller variant",
                requested_bytes=needed,
                free_bytes=max(0, held - sum(layer_bytes)),
                total_bytes=held,
            )
        return plan

    def change(
        self,
        names: Sequence[str],
        target_of: TargetOf,
        timeout_s: float,
        form: ExchangeForm,
        kind: EventKind,
        why: str,
        *,
        dry_run: bool = False,
    ) -> tuple[Exchanged, int]:
        """Have ranks be one group, and its layers change their rank; return that, and the bytes of weights that left.

        With `dry_run` nothing is done: return what would come of it.
        """
        if dry_run:
            return self.dry_runs.of([(self.registry.together(names)[1], target_of)], form)
        with self.registry.acting(names):
            return self.become(names, target_of, timeout_s, form, kind, why)

    def become(
        self, names: Sequence[str], target_of: TargetOf, timeout_s: float, form: ExchangeForm, kind: EventKind, why: str
    ) -> tuple[Exchanged, int]:
        """Do as `change` does, with ranks that are claimed."""
        with self.registry.group_for(names) as group:
            exchange = Exchange(self.ranks, group, target_of(group.shape), timeout_s, form)
            done = self._run(exchange, kind)
            self._tell(kind, group, done, why)
            return done, exchange.counts.freed_bytes

    def restore(self, group: Group, timeout_s: float, why: str, form: ExchangeForm, *, sharing: bool) -> Exchanged:
        """Have the ranks of a group, or with `sharing` those that share layers, have all of these again, and part."""
        sharing = sharing and group.shape.tp > 1
        with self.registry.acting(group.members):
            if group not in self.registry.groups:  # it was repaired: all of them are by themselves
                return Exchanged("applied")
            target = targets.restored(group.shape, go_on_sharing=sharing)
            done = self._run(Exchange(self.ranks, group, target, timeout_s, form), "restored")
            if not sharing and group.shape.apart and done.status == "applied":
                self.registry.part(group)
            self._tell("restored", group, done, why)
            if sharing:
                self.registry.divide(group.members[0])
            return done

    def form(self, shares: Mapping[str, Share]) -> None:
        """Have ranks that begin with their shares of the model compute it together. Raises what they raise."""
        target_of = partial(targets.shared_out, shares=shares)
        with self.verb(shares):
            done, _ = self.change(tuple(shares), target_of, FORM_S, LIVE, "formed", "all of its ranks are there")
            if done.status != "applied":
                raise StateError(f"{', '.join(shares)} do not compute together ({done.status}): {done.why}")

    # -- inside

    def _run(self, exchange: Exchange, kind: EventKind) -> Exchanged:
        """Have layers change their rank; a rank that is lost in between is told of in an event."""
        group = exchange.group
        try:
            done = exchange.run()
            counts = exchange.counts
            self.dry_runs.learn(exchange.form, exchange.target, "kv", counts.moved_bytes, counts.copy_s)
            self.dry_runs.learn(exchange.form, exchange.target, "weights", counts.fetched_bytes, counts.fetch_s)
            note_reach(self._dispatcher, group.shape, self.ranks.measure(group.members))
            group.told = blocks_told(self._dispatcher, group.members)
            return done
        except RankLost as error:
            self.registry.note(FAILED[kind], group, why=str(error))
            raise
        finally:
            self.registry.mark(group)

    def _tell(self, kind: EventKind, group: Group, done: Exchanged, why: str) -> None:
        """Count what layers did that changed their rank, and have an event tell of it."""
        self._log.count(exchanged_bytes=done.moved_bytes)
        about = {name: getattr(done, name) for name in ("moved_bytes", "stalled_ms", "seconds", "timeline")}
        why = f"{why}; {done.why}" if done.why else why
        self.registry.note(kind if done.status == "applied" else FAILED[kind], group, **about, why=why)
