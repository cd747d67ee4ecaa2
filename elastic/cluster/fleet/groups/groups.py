"""The groups of a fleet, as verbs change them: instances merge and part, and layers change their rank while they serve.

Layers are dropped where they are held twice, and taken back (KunServe, section 4); shared by several ranks, which is
tensor parallelism that changes while it serves (AMOEBA, section 3); migrated, or replicated for half of the requests
(CoCoServe, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from elastic import clock
from elastic.cluster.control.stage_questions import Bulk, Room
from elastic.cluster.control.status import EventKind
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups import targets
from elastic.cluster.fleet.groups.caps.follow import follow
from elastic.cluster.fleet.groups.caps.needs import blocks_told
from elastic.cluster.fleet.groups.caps.reach import largest_instances, note_reach
from elastic.cluster.fleet.groups.caps.staging import Staging
from elastic.cluster.fleet.groups.exchange import LIVE, Exchange, compare_weights
from elastic.cluster.fleet.groups.flip import ExchangeForm
from elastic.cluster.fleet.groups.group import Group, Shape
from elastic.cluster.fleet.groups.price import DryRuns, shape_of
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.cluster.fleet.groups.registry import GroupRegistry
from elastic.cluster.fleet.groups.results import (
    Dropped,
    Exchanged,
    GroupStatus,
    Migrated,
    Replicated,
    Resharded,
    Restored,
    all_dropped,
    all_restored,
)
from elastic.cluster.fleet.planning.budgets import Budgets
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.errors import CapacityError, RankLost, StateError
from elastic.planning.arrangement.drop import DropPlan, PlannedGroup, drop_plan
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
    """Verbs run one at a time, each on the thread that asks for it, which must be none that reads from ranks."""

    def __init__(self, dispatcher: Dispatcher, log: EventLog, bulk: Bulk = "sockets") -> None:
        self._dispatcher, self._log = dispatcher, log
        self.ranks = Ranks(dispatcher, bulk)
        self._staging, self._dry_runs = Staging(self.ranks), DryRuns(self.ranks, log)
        self.registry = GroupRegistry(self.ranks, self._staging, log)
        self._verbs = clock.make_lock()
        self._layer_bytes: tuple[int, ...] = ()
        self._following = False  # whether it is no verb that runs, but caps that change

    # -- how it is

    def status(self) -> tuple[GroupStatus, ...]:
        """Return the groups there are."""
        return tuple(group.status() for group in self.registry.groups)

    @property
    def changing(self) -> bool:
        """Whether a verb is under way, or a group is repaired."""
        return (self._verbs.locked() and not self._following) or self.registry.repairing

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

    def capacity(self, degrees: Sequence[int]) -> dict[str, dict[int, int]]:
        """Return the blocks that an instance could have, of each rank and degree; see `Fleet.capacity`."""
        serving = {instance.name: instance.kv_format for instance in self.ranks.serving()}
        return largest_instances(self.ranks.measure(serving), serving, degrees)

    def budgets(self) -> Budgets:
        """Return what ranks tell of themselves, for who plans drops. Raises `StateError` where none serves."""
        serving = self.ranks.serving()
        return Budgets(self.ranks.measure([instance.name for instance in serving]), serving)

    # -- beside verbs

    def follow_needs(self) -> int:
        """Have each group's memory go where requests need it; return in how many it did. None, while a verb runs.

        Ranks that are by themselves keep no room for a drop while a request waits that needs it.
        """
        if not (self.registry.groups or self._staging.caps) or not self._verbs.acquire(blocking=False):
            return 0
        try:
            self._following = True
            self._staging.give_way(self._alone())
            followed = 0
            for group in [each for each in self.registry.groups if all(map(self.ranks.there, each.members))]:
                with self.registry.acting(group.members):
                    followed += group in self.registry.groups and follow(self.ranks, group)
            return followed
        finally:
            self._following = False
            self._verbs.release()

    def keep_staging(self) -> None:
        """Have ranks that are by themselves keep room for the first layer of a drop; see `Staging`. It waits for none.

        Raises `RankLost`.
        """
        if not self._verbs.acquire(blocking=False):
            return
        try:
            self._staging.keep(self._alone())
        finally:
            self._verbs.release()

    def _alone(self) -> list[str]:
        return [each.name for each in self.ranks.serving() if self.registry.group_of(each.name) is None]

    # -- verbs

    def merge(self, names: Sequence[str]) -> GroupStatus:
        """Have instances be a group; no layer changes its rank yet. If it comes to nothing, all are as before."""
        with self._verbs, self.registry.acting(names):
            before = [group for group in self.registry.groups if not set(names).isdisjoint(group.members)]
            group = self.registry.merged(names)
            try:
                self.ranks.introduce(group.members)
                compare_weights(self.ranks, group)
            except BaseException:
                if group not in before:
                    with suppress(RankLost):  # who has lost a rank is repaired
                        self.registry.split_up(group, [each.members for each in before])
                raise
            self.registry.note("merged", group)
            return group.status()

    def drop(
        self,
        plan: DropPlan | int,
        timeout_s: float,
        why: str,
        *,
        whole: bool = False,
        most: int | None = None,
        dry_run: bool = False,
        form: ExchangeForm = LIVE,
    ) -> Dropped:
        """Do a plan, or one that frees so many bytes; see `Fleet.drop`."""
        with self._verbs:
            rooms = self.ranks.measure([instance.name for instance in self.ranks.serving()])
            plan = plan if isinstance(plan, DropPlan) else self._plan(plan, rooms, whole, most)
            units = [unit for group in self.registry.groups for unit in targets.sharing(group.shape.paths)]
            goal = replace(plan, groups=tuple(targets.of_ranks(each, units) for each in plan.groups))
            wanted = [(each.members, partial(targets.planned_shape, plan=each)) for each in goal.groups]
            if dry_run:
                would, _ = self._dry_runs.of(wanted, form)
                return Dropped(**vars(would), groups=goal.groups, freed_bytes=goal.freed_bytes)
            done: list[Dropped] = []
            for each, (members, target_of) in zip(goal.groups, wanted, strict=True):
                done.append(replace(self._drop(members, target_of, timeout_s, why, form), groups=(each,)))
                if done[-1].status != "applied":
                    break
            return all_dropped(done, goal.groups)

    def drop_layers(
        self,
        layers: Mapping[str, Collection[int]],
        timeout_s: float,
        why: str,
        *,
        dry_run: bool,
        form: ExchangeForm,
    ) -> Dropped:
        """Have ranks drop these layers; they are one group then."""
        target_of = partial(targets.dropped_by_hand, layers=layers)
        with self._verbs:
            if dry_run:
                would, leaving = self._would(tuple(layers), target_of, form)
                return Dropped(**vars(would), freed_bytes=leaving)
            return self._drop(tuple(layers), target_of, timeout_s, why, form)

    def restore(
        self,
        rank: str | None,
        timeout_s: float,
        why: str,
        *,
        sharing: bool = False,
        dry_run: bool = False,
        form: ExchangeForm = LIVE,
    ) -> Restored:
        """Undo what was dropped and migrated, in the group of a rank or in all; they part then.

        `sharing`: ranks that share layers have all of them again among themselves, and the others part.
        """
        with self._verbs:
            groups = self.registry.groups_of(rank)
            if rank is not None and not groups:
                return Restored("planned" if dry_run else "applied", members=(rank,))
            if dry_run:
                target_of = targets.undropped if sharing else targets.apart
                would, _ = self._dry_runs.of([(group.members, target_of) for group in groups], form)
                return Restored(**vars(would), members=tuple(name for group in groups for name in group.members))
            return all_restored([self._restore(group, timeout_s, why, form, sharing=sharing) for group in groups])

    def form(self, shares: Mapping[str, Share]) -> None:
        """Have ranks that begin with their shares of the model compute it together. Raises what they raise."""
        target_of = partial(targets.shared_out, shares=shares)
        with self._verbs, self.registry.acting(shares):
            _, done = self._become(tuple(shares), target_of, FORM_S, LIVE, "formed", "all of its ranks are there")
            if done.status != "applied":
                raise StateError(f"{', '.join(shares)} do not compute together ({done.status}): {done.why}")

    def reshard(
        self,
        names: Sequence[str],
        tp: int,
        timeout_s: float,
        why: str,
        *,
        dry_run: bool = False,
        form: ExchangeForm = LIVE,
    ) -> Resharded:
        """Have so many ranks each share all layers of their instances; see `Fleet.reshard`."""
        with self._verbs:
            members = self.registry.with_partners(names)
            targets.require_shards(self.ranks.measure(members), tp)
            target_of = partial(targets.sharded, units=targets.units_of(members, tp))
            if dry_run:
                would, leaving = self._dry_runs.of([(members, target_of)], form)
                return Resharded(**vars(would), members=members, tp=tp, freed_bytes=leaving)
            if len(members) == 1:
                return Resharded("applied", members=members)
            with self.registry.acting(members):
                why = f"{', '.join(members)} to tp={tp}, {why}"
                exchange, done = self._become(members, target_of, timeout_s, form, "resharded", why)
                self.registry.divide(exchange.group)
            return Resharded(**vars(done), members=members, tp=tp, freed_bytes=exchange.counts.freed_bytes)

    def migrate(
        self,
        home: str,
        layers: Iterable[int],
        rank: str,
        timeout_s: float,
        *,
        dry_run: bool = False,
        form: ExchangeForm = LIVE,
    ) -> Migrated:
        """Have a rank compute layers of an instance."""
        names, chosen = (home, rank), tuple(sorted(set(layers)))
        target_of = partial(targets.migrated, home=home, layers=chosen, rank=rank)
        with self._verbs:
            if dry_run:
                done, _ = self._would(names, target_of, form)
            else:
                with self.registry.acting(names):
                    why = f"layers of {home} to {rank}"
                    _, done = self._become(names, target_of, timeout_s, form, "migrated", why)
            return Migrated(**vars(done), home=home, rank=rank, layers=chosen)

    def replicate(
        self, home: str, layers: Collection[int], rank: str, timeout_s: float, *, dry_run: bool = False
    ) -> Replicated:
        """Have a rank compute layers of an instance for half of its requests; see `Fleet.replicate`."""
        names, chosen = (home, rank), tuple(sorted(set(layers)))
        target_of = partial(targets.replicated, home=home, layers=chosen, rank=rank)
        with self._verbs:
            if dry_run:
                would, _ = self._would(names, target_of, LIVE)
                return Replicated(**vars(would), home=home, rank=rank, layers=chosen)
            with self.registry.acting(names):
                why = f"layers of {home} at {rank}"
                exchange, done = self._become(names, target_of, timeout_s, LIVE, "replicated", why)
            there = tuple(layer for layer in exchange.group.shape.replicated(home) if layer in chosen)
            return Replicated(**vars(done), home=home, rank=rank, layers=there)

    def evict(self, home: str, layers: Collection[int] | None, timeout_s: float) -> Replicated:
        """Have layers of an instance have no replica; see `Fleet.evict`."""
        with self._verbs, self.registry.acting((home,)):
            group = self.registry.group_of(home)
            replicas = () if group is None else group.shape.replicated(home)
            chosen = replicas if layers is None else tuple(layer for layer in replicas if layer in set(layers))
            if group is None or not chosen:
                self.ranks.instance(home)  # it is there
                return Replicated("applied", home=home)
            target_of = partial(targets.evicted, home=home, layers=chosen)
            _, done = self._become(group.members, target_of, timeout_s, LIVE, "evicted", f"replicas of {home}")
            self.registry.divide(group)
            gone = tuple(layer for layer in chosen if layer not in group.shape.replicated(home))
            return Replicated(**vars(done), home=home, layers=gone)

    # -- inside, one verb at a time

    def _plan(self, needed: int, rooms: Mapping[str, Room], whole: bool, most: int | None) -> DropPlan:
        layer_bytes = self.layer_bytes()
        shapes = [group.shape for group in self.registry.groups]
        shapes += [shape_of((name,), rooms) for name in rooms if self.registry.group_of(name) is None]
        fitted = Budgets(rooms, [self.ranks.instance(name) for name in rooms]).fitted
        groups = [PlannedGroup(tuple(map(fitted, targets.held(each.paths, each.weights)))) for each in shapes]
        plan = drop_plan(groups, layer_bytes, needed, whole=whole, most=most)
        if plan is None:
            held = sum(layer_bytes[i] for each in groups for held in each.members for i in held.layers)
            raise CapacityError(
                "no drop frees so much: one copy of each layer stays, in ranks that have room for live requests, too; "
                "add ranks, or swap layers to a smaller variant",
                requested_bytes=needed,
                free_bytes=max(0, held - sum(layer_bytes)),
                total_bytes=held,
            )
        return plan

    def _would(self, names: Sequence[str], target_of: TargetOf, form: ExchangeForm) -> tuple[Exchanged, int]:
        """Return what would come of a change of one group of ranks, and the bytes of weights that would leave."""
        return self._dry_runs.of([(self.registry.together(names)[1], target_of)], form)

    def _become(
        self, names: Sequence[str], target_of: TargetOf, timeout_s: float, form: ExchangeForm, kind: EventKind, why: str
    ) -> tuple[Exchange, Exchanged]:
        """Have ranks be one group, and its layers change their rank."""
        with self.registry.group_for(names) as group:
            exchange = Exchange(self.ranks, group, target_of(group.shape), timeout_s, form)
            done = self._run(exchange, kind)
            self._tell(kind, group, done, why)
            return exchange, done

    def _drop(
        self, names: Sequence[str], target_of: TargetOf, timeout_s: float, why: str, form: ExchangeForm
    ) -> Dropped:
        with self.registry.acting(names):
            exchange, done = self._become(names, target_of, timeout_s, form, "dropped", why)
            return Dropped(**vars(done), freed_bytes=exchange.counts.freed_bytes)

    def _restore(self, group: Group, timeout_s: float, why: str, form: ExchangeForm, *, sharing: bool) -> Restored:
        sharing = sharing and group.shape.tp > 1
        with self.registry.acting(group.members):
            if group not in self.registry.groups:  # it was repaired: all of them are by themselves
                return Restored("applied", members=group.members)
            target = (targets.undropped if sharing else targets.apart)(group.shape)
            done = self._run(Exchange(self.ranks, group, target, timeout_s, form), "restored")
            if not sharing and group.shape.apart and done.status == "applied":
                self.registry.part(group)
            self._tell("restored", group, done, why)
            if sharing:
                self.registry.divide(group)
            return Restored(**vars(done), members=group.members)

    def _run(self, exchange: Exchange, kind: EventKind) -> Exchanged:
        """Have layers change their rank; a rank that is lost in between is told of in an event."""
        group = exchange.group
        try:
            done = exchange.run()
            counts = exchange.counts
            self._dry_runs.learn(exchange.form, exchange.target, counts.moved_bytes, counts.copy_s)
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
