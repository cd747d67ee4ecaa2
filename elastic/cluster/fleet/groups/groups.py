"""The groups of a fleet: instances merge, drop what they hold twice, take it back, and part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from elastic import clock
from elastic.cluster.control.stage_questions import Bulk, Room
from elastic.cluster.control.status import EventKind
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups import targets
from elastic.cluster.fleet.groups.caps.follow import follow
from elastic.cluster.fleet.groups.caps.needs import blocks_told
from elastic.cluster.fleet.groups.caps.reach import note_reach
from elastic.cluster.fleet.groups.caps.staging import Staging
from elastic.cluster.fleet.groups.exchange import LIVE, Exchange, measure, part
from elastic.cluster.fleet.groups.flip import ExchangeForm
from elastic.cluster.fleet.groups.group import Group, RankClaims, Shape
from elastic.cluster.fleet.groups.price import DryRuns, shape_of
from elastic.cluster.fleet.groups.ranks import Ranks, require_all, require_like
from elastic.cluster.fleet.groups.recovery import go_on, recover
from elastic.cluster.fleet.groups.results import (
    Dropped,
    Exchanged,
    GroupStatus,
    Restored,
    all_dropped,
)
from elastic.cluster.fleet.groups.transition import Books
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.planning.budgets import Budgets
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.errors import CapacityError, ConfigError, NotFound, RankLost, StateError
from elastic.planning.arrangement.drop import DropPlan, GroupPlan, PlannedGroup, drop_plan


class Groups:
    """Verbs run one at a time, each on the thread that asks for it, which must be none that reads from ranks.

    A group that has lost a rank is repaired beside verbs of other ranks.
    """

    def __init__(self, dispatcher: Dispatcher, log: EventLog, bulk: Bulk = "sockets") -> None:
        self._dispatcher, self._log = dispatcher, log
        self._ranks = Ranks(dispatcher, bulk)
        self.introduce = self._ranks.introduce
        """Has ranks know where each other listens."""
        self._staging, self._dry_runs = Staging(self._ranks), DryRuns(self._ranks, log)
        self._verbs, self._claims = clock.make_lock(), RankClaims()
        self._lock = clock.make_lock()  # while the groups and the repairs are changed
        self._groups: tuple[Group, ...] = ()
        self._closed = False
        self._repairs: list[clock.Thread] = []
        self._layer_bytes: tuple[int, ...] = ()
        self._following = False  # whether it is no verb that runs, but caps that change

    def status(self) -> tuple[GroupStatus, ...]:
        """Return the groups there are."""
        return tuple(group.status() for group in self._groups)

    @property
    def changing(self) -> bool:
        """Whether a verb is under way, or a group is repaired."""
        verb = self._verbs.locked() and not self._following
        return verb or any(thread.is_alive() for thread in self._repairs)

    def layer_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each decoder layer's weights: they are the same at all ranks."""
        if not self._layer_bytes:
            serving = self._ranks.serving()
            if not serving:
                raise StateError("no rank serves: the bytes of its layers are not known")
            self._layer_bytes = _layer_bytes(measure(self._ranks, [serving[0].name]))
        return self._layer_bytes

    def group_of(self, rank: str) -> Group | None:
        """Return the group that a rank is in."""
        return next((group for group in self._groups if rank in group.members), None)

    # -- verbs

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
            rooms = measure(self._ranks, [instance.name for instance in self._ranks.serving()])
            goal = self._of_ranks(plan if isinstance(plan, DropPlan) else self._plan(plan, rooms, whole, most))
            if dry_run:
                wanted = [(each.members, partial(targets.planned_shape, plan=each)) for each in goal.groups]
                would, _ = self._dry_runs.of(wanted, form.layers_per_step)
                return Dropped(**vars(would), groups=goal.groups, freed_bytes=goal.freed_bytes)
            done = []
            for each in goal.groups:
                target_of = partial(targets.planned_shape, plan=each)
                done.append(self._drop_group(each, each.members, target_of, timeout_s, why, form))
                if done[-1].status != "applied":
                    break
            return all_dropped(done, goal.groups)

    def drop_layers(
        self,
        layers: Mapping[str, Collection[int]],
        timeout_s: float,
        why: str,
        *,
        dry_run: bool = False,
        form: ExchangeForm = LIVE,
    ) -> Dropped:
        """Have ranks drop these layers; they are one group then."""
        with self._verbs:
            target_of = partial(targets.dropped_by_hand, layers=layers)
            if dry_run:
                would, leaving = self._dry_runs.of(
                    [(self._together(tuple(layers))[1], target_of)], form.layers_per_step
                )
                return Dropped(**vars(would), freed_bytes=leaving)
            return self._drop_group(None, tuple(layers), target_of, timeout_s, why, form)

    def follow_needs(self) -> int:
        """Have each group's memory go where requests need it; return in how many it did. None, while a verb runs."""
        if not self._groups or not self._verbs.acquire(blocking=False):
            return 0
        try:
            self._following = True
            followed = 0
            for group in [each for each in self._groups if all(map(self._ranks.there, each.members))]:
                with self._claims.of(group.members):
                    followed += group in self._groups and follow(self._ranks, group)
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
            grouped = {name for group in self._groups for name in group.members}
            self._staging.keep([i.name for i in self._ranks.serving() if i.name not in grouped])
        finally:
            self._verbs.release()

    def get_ready(self) -> None:
        """Have ranks do beforehand what the first verb for them would wait for; see `Ranks`. It waits for no verb."""
        self._ranks.get_ready()

    def close(self) -> None:
        """Repair nothing any more: the ranks end."""
        self._closed = True
        for thread in self._repairs:
            thread.join()
        for group in self._groups:
            group.close()

    # -- a rank has gone

    def lost(self, instance: Instance) -> None:
        """Have those that computed with a rank go on without it, beside the caller."""
        with self._lock:
            group = None if self._closed else self.group_of(instance.name)
            if group is not None and instance.client.heard_all:
                group.killed.add(instance.name)
        self._ranks.lose(instance.name)
        if group is None:
            go_on(self._ranks, instance.name, ())
            return
        thread = clock.make_thread(partial(self._repair, instance.name), f"elastic-repair-{instance.name}")
        with self._lock:
            thread.start()
            self._repairs = [*(other for other in self._repairs if other.is_alive()), thread]

    def _repair(self, rank: str) -> None:
        while (group := self.group_of(rank)) is not None and not self._closed:
            with self._claims.of(group.members):  # a verb of theirs that was under way has failed, or ends soon
                if self.group_of(rank) is not group:
                    continue  # the verb has put them together anew
                recomputed = recover(self._ranks, group, rank)
                self._replace([group])
                self._log.count(recomputed_tokens=recomputed)
                self._event("recovered", group, recomputed_tokens=recomputed, why=f"rank {rank} was lost")
                go_on(self._ranks, rank, group.members)
        go_on(self._ranks, rank, ())

    # -- inside, one verb at a time

    @contextmanager
    def _acting(self, names: Iterable[str]) -> Iterator[None]:
        """Have ranks, and those in groups with them, to oneself: one that is being repaired is so before."""
        together = frozenset(names)
        members = (group.members for group in self._groups if not together.isdisjoint(group.members))
        with self._claims.of(together.union(*members)):
            yield

    def _plan(self, needed: int, rooms: Mapping[str, Room], whole: bool, most: int | None) -> DropPlan:
        layer_bytes, grouped = self.layer_bytes(), {name for group in self._groups for name in group.members}
        shapes = [group.shape for group in self._groups]
        shapes += [shape_of((name,), rooms) for name in rooms if name not in grouped]
        fitted = Budgets(rooms, [self._ranks.instance(name) for name in rooms]).fitted
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

    def _of_ranks(self, plan: DropPlan) -> DropPlan:
        """Return a plan with all ranks that share layers with its members."""
        units = [unit for group in self._groups for unit in targets.sharing(group.shape.paths)]
        return replace(plan, groups=tuple(targets.of_ranks(each, units) for each in plan.groups))

    def _groups_of(self, rank: str | None) -> tuple[Group, ...]:
        """Return the group of a rank, if it is in one; None: all groups. Raises as `Ranks.instance`."""
        groups = tuple(group for group in self._groups if rank is None or rank in group.members)
        if rank is not None and not groups:
            self._ranks.instance(rank)  # it is there
        return groups

    def _drop_group(
        self,
        plan: GroupPlan | None,
        names: Sequence[str],
        target_of: Callable[[Shape], Shape],
        timeout_s: float,
        why: str,
        form: ExchangeForm,
    ) -> Dropped:
        with self._acting(names), self._group_for(names) as group:
            exchange = Exchange(self._ranks, group, target_of(group.shape), timeout_s, form)
            done = self._run(exchange, "dropped", "drop failed", why)
            freed_bytes = exchange.counts.freed_bytes
            return Dropped(**vars(done), groups=() if plan is None else (plan,), freed_bytes=freed_bytes)

    def _restore(self, group: Group, timeout_s: float, why: str, form: ExchangeForm) -> Restored:
        with self._acting(group.members):
            if group not in self._groups:  # it was repaired: all of them are by themselves
                return Restored("applied", members=group.members)
            exchange = Exchange(self._ranks, group, targets.apart(group.shape), timeout_s, form)
            done = self._exchange(exchange, "restore failed")
            if group.shape.apart and done.status == "applied":
                part(self._ranks, group)
                self._replace([group])
                self._event("parted", group)
            kind: EventKind = "restored" if done.status == "applied" else "restore failed"
            self._changed(kind, group, done, why)
            return Restored(**vars(done), members=group.members)

    def _run(self, exchange: Exchange, kind: EventKind, failed: EventKind, why: str) -> Exchanged:
        """Have layers change their rank, and tell how that ended."""
        done = self._exchange(exchange, failed)
        self._changed(kind if done.status == "applied" else failed, exchange.group, done, why)
        return done

    def _exchange(self, exchange: Exchange, failed: EventKind) -> Exchanged:
        """Have layers change their rank; a rank that is lost in between is told of in an event."""
        group = exchange.group
        try:
            done = exchange.run()
            note_reach(self._dispatcher, group.shape, measure(self._ranks, group.members))
            group.told = blocks_told(self._dispatcher, group.members)
            return done
        except RankLost as error:
            self._event(failed, group, why=str(error))
            raise
        finally:
            self._mark(group)

    @contextmanager
    def _group_for(self, names: Sequence[str]) -> Iterator[Group]:
        """Give the group of instances; if it comes to nothing, each is by itself again."""
        group = self._merged(names)
        try:
            yield group
        finally:
            self._mark(group)
            gone = [name for name in group.members if not self._ranks.there(name)]
            if group.shape.apart and not group.stages and not gone:
                self._replace([group])

    def _merged(self, names: Sequence[str]) -> Group:
        """Return one group of instances, and of those that they are in groups with."""
        old, members = self._together(names)
        if len(old) == 1 and old[0].members == members:
            return old[0]
        serving = self._ranks.present()
        require_all(members, serving)
        require_like([serving[name] for name in members])
        rooms = measure(self._ranks, members)
        shape = shape_of(members, rooms)
        books = Books(rooms, serving[members[0]].kv_format, shape)
        caps = {**self._staging.caps, **{name: cap for group in old for name, cap in group.caps.items()}}
        group = Group(
            shape,
            {name: books.alone(name) for name in members},
            {name: caps.get(name) for name in members},
            {stage for each in old for stage in each.stages},
            staged=self._staging.caps,
            memories={name: memory.hold() for name in members if (memory := serving[name].memory) is not None},
        )
        try:
            self._replace(old, [group], all_there=True)
        except StateError:
            group.close()
            raise
        return group

    def _together(self, names: Sequence[str]) -> tuple[list[Group], tuple[str, ...]]:
        """Return the groups that instances are in, and the members of one group of all of these."""
        serving = self._ranks.present()
        if unknown := [name for name in names if name not in serving]:
            raise NotFound(f"there is no rank {unknown[0]!r} that serves; there are: {', '.join(serving) or 'none'}")
        old = [group for group in self._groups if not set(names).isdisjoint(group.members)]
        members = tuple(dict.fromkeys([*(name for group in old for name in group.members), *names]))
        if len(members) < 2:
            raise ConfigError(f"{', '.join(members) or 'no rank'} makes no group; name two ranks at least")
        return old, members

    def _replace(self, old: Sequence[Group], new: Sequence[Group] = (), *, all_there: bool = False) -> None:
        """Have other groups in the place of some, at once: whoever is lost meanwhile is of one of them.

        With `all_there` raises `StateError` if a rank of the new ones has gone: nobody would repair its group.
        """
        with self._lock:
            if all_there:
                require_all([name for group in new for name in group.members], self._ranks.present())
            killed = {rank for group in old for rank in group.killed}
            for group in new:
                group.killed |= killed.intersection(group.members)
            self._groups = (*(group for group in self._groups if group not in old), *new)
        together = {name for group in new for name in group.members}
        alone = [name for group in old for name in group.members if name not in together]
        with self._dispatcher.lock:
            for name in alone:
                if (instance := self._dispatcher.instances.get(name)) is not None:
                    instance.part()
        for group in new:
            self._mark(group)
        for group in old:
            group.close()

    def _mark(self, group: Group) -> None:
        """Note at the instances what they are part of."""
        with self._dispatcher.lock:
            for name, path in group.shape.paths.items():
                instance = self._dispatcher.instances.get(name)
                if instance is not None:
                    instance.join(group.members, path)

    def _changed(self, kind: EventKind, group: Group, done: Exchanged, why: str) -> None:
        why = f"{why}; {done.why}" if done.why else why
        self._log.count(exchanged_bytes=done.moved_bytes)
        about = {name: getattr(done, name) for name in ("moved_bytes", "stalled_ms", "seconds", "timeline")}
        self._event(kind, group, **about, why=why)

    def _event(self, kind: EventKind, group: Group, **about: Any) -> None:
        self._log.add(kind, rank=",".join(group.members), **about)


def _layer_bytes(rooms: Mapping[str, Room]) -> tuple[int, ...]:
    (room,) = rooms.values()
    return tuple(pages.pages(range(pages.shards)) * room.page_bytes for pages in room.weight_pages)
