"""Which groups a fleet has: they are put together, come apart, and are repaired when one of their ranks is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from elastic import clock
from elastic.cluster.control.stage_questions import MeasureRoom
from elastic.cluster.control.status import EventKind
from elastic.cluster.fleet.groups.caps.reach import note_reach
from elastic.cluster.fleet.groups.caps.staging import Staging
from elastic.cluster.fleet.groups.exchange import close_stages
from elastic.cluster.fleet.groups.group import Group, RankClaims
from elastic.cluster.fleet.groups.price import shape_of
from elastic.cluster.fleet.groups.ranks import Ranks, require_all, require_like
from elastic.cluster.fleet.groups.recovery import go_on, recover
from elastic.cluster.fleet.groups.transition import Books
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.fleet.refusals import not_there
from elastic.errors import ConfigError, RankLost, StateError


class GroupRegistry:
    """The groups there are. One verb at a time changes them; a repair goes on beside verbs of other ranks."""

    def __init__(self, ranks: Ranks, staging: Staging, log: EventLog) -> None:
        self._ranks, self._dispatcher, self._staging, self._log = ranks, ranks.dispatcher, staging, log
        self.groups: tuple[Group, ...] = ()
        self._lock = clock.current().lock()  # while the groups and the repairs are changed
        self._changed = clock.current().condition(self._lock)
        self._claims = RankClaims()
        self.repairs: list[clock.Thread] = []
        """Threads of which each repairs a group, and some that have done so."""
        self._closed = False

    def group_of(self, rank: str) -> Group | None:
        """Return the group that a rank is in."""
        return next((group for group in self.groups if rank in group.members), None)

    def groups_of(self, rank: str | None) -> tuple[Group, ...]:
        """Return the group of a rank, if it is in one; None: all groups. Raises as `Ranks.instance`."""
        groups = tuple(group for group in self.groups if rank is None or rank in group.members)
        if rank is not None and not groups:
            self._ranks.instance(rank)  # it is there
        return groups

    def together(self, names: Sequence[str]) -> tuple[list[Group], tuple[str, ...]]:
        """Return the groups that instances are in, and the members of one group of all of these."""
        serving = self._ranks.present()
        if unknown := [name for name in names if name not in serving]:
            raise not_there(f"rank {unknown[0]!r} that serves", serving)
        old = [group for group in self.groups if not set(names).isdisjoint(group.members)]
        members = tuple(dict.fromkeys([*(name for group in old for name in group.members), *names]))
        if len(members) < 2:
            raise ConfigError(f"{', '.join(members) or 'no rank'} makes no group; name two ranks at least")
        return old, members

    def with_partners(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return ranks, and those that compute layers with them. Raises `ConfigError` for none and for unknown ones."""
        serving = [instance.name for instance in self._ranks.serving()]
        if not names:
            raise ConfigError(f"reshard: name one instance at least; there are: {', '.join(serving) or 'none'}")
        if unknown := [name for name in names if name not in serving]:
            raise not_there(f"rank {unknown[0]!r} that serves", serving)
        partners: dict[str, None] = {}
        for name in names:
            group = self.group_of(name)
            units = [unit for unit in group.shape.units() if name in unit] if group is not None else [(name,)]
            partners |= dict.fromkeys(units[0])
        return tuple(partners)

    def settle(self, names: Collection[str] | None) -> None:
        """Wait until groups of ranks (None: all groups) that have lost one are repaired.

        Whoever is about to be noticed as lost counts: all are asked. Raises `StateError` if the fleet ends meanwhile.
        """
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self.is_whole(names))
                if self._closed:
                    raise StateError("the fleet ends: no layers change their rank any more")
                members = self._members(names)
            there = self._ranks.present()
            asked = there if names is None else [name for name in there if name in members.union(names)]
            with suppress(RankLost):
                self._ranks.answers([(name, MeasureRoom(name)) for name in asked])
            if self.is_whole(names):
                return

    def is_whole(self, names: Collection[str] | None) -> bool:
        """Return whether no group of ranks (None: no group) waits for its repair."""
        return all(map(self._ranks.there, self._members(names)))

    def _members(self, names: Collection[str] | None) -> set[str]:
        groups = (group for group in self.groups if names is None or not set(names).isdisjoint(group.members))
        return {name for group in groups for name in group.members}

    @contextmanager
    def acting(self, names: Iterable[str]) -> Iterator[None]:
        """Have ranks, and those in groups with them, to oneself: one that is being repaired is so before."""
        together = frozenset(names)
        members = (group.members for group in self.groups if not together.isdisjoint(group.members))
        with self._claims.of(together.union(*members)):
            yield

    # -- by whom the ranks are claimed

    @contextmanager
    def group_for(self, names: Sequence[str]) -> Iterator[Group]:
        """Give the group of instances; if it comes to nothing, they are in the groups of before, or by themselves."""
        earlier = [group for group in self.groups if not set(names).isdisjoint(group.members)]
        group = self.merged(names)
        try:
            yield group
        finally:
            self.mark(group)
            gone = [name for name in group.members if not self._ranks.there(name)]
            if group.shape.apart and not group.stages and not gone:
                self.replace([group])
                if earlier:
                    self.note("parted", group)
            elif group not in earlier and not gone:
                before, units = [each.members for each in earlier], group.shape.units()
                if all(len(unit) == 1 or any(set(unit) <= set(each) for each in before) for unit in units):
                    with suppress(RankLost):  # who has lost a rank is repaired
                        self._come_apart(group, before)

    def merged(self, names: Sequence[str]) -> Group:
        """Return one group of instances, and of those that they are in groups with."""
        old, members = self.together(names)
        if len(old) == 1 and old[0].members == members:
            return old[0]
        serving = self._ranks.present()
        require_all(members, serving)
        require_like([serving[name] for name in members])
        rooms = self._ranks.measure(members)
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
            self.replace(old, [group], all_there=True)
        except StateError:
            group.close()
            raise
        return group

    def part(self, group: Group) -> None:
        """Have the instances of a group, that compute all of their layers themselves again, be by themselves."""
        close_stages(self._ranks, group.stages)
        group.stages.clear()
        self.replace([group])
        self.note("parted", group)

    def divide(self, rank: str) -> None:
        """Have those of a rank's group that compute nothing for each other any more be groups of their own."""
        group = self.group_of(rank)
        if group is None or len(units := group.shape.units()) == 1:
            return
        self._come_apart(group, [unit for unit in units if len(unit) > 1])
        if alone := [unit[0] for unit in units if len(unit) == 1]:
            self._log.add("parted", rank=",".join(alone))

    def _come_apart(self, group: Group, units: Sequence[tuple[str, ...]]) -> None:
        """Have some of a group be groups of their own, that keep no room for others, and all others by themselves."""
        unit_of = dict.fromkeys(group.members, ()) | {name: unit for unit in units for name in unit}
        across = [(home, rank) for home, rank in group.stages if not unit_of[home] or unit_of[home] != unit_of[rank]]
        close_stages(self._ranks, across)
        group.stages.difference_update(across)
        self.split_up(group, units)
        self._ranks.set_caps({name: group.staged.get(name) for name in group.members if not unit_of[name]})

    def split_up(self, group: Group, units: Sequence[tuple[str, ...]]) -> None:
        """Have some of a group be groups of their own, and all others by themselves."""
        parts = [group.part_of(unit) for unit in units]
        self.replace([group], parts)
        for part in parts:
            note_reach(self._dispatcher, part.shape, self._ranks.measure(part.members))

    def replace(self, old: Sequence[Group], new: Sequence[Group] = (), *, all_there: bool = False) -> None:
        """Have other groups in the place of some, at once: whoever is lost meanwhile is of one of them.

        With `all_there` raises `StateError` if a rank of the new ones has gone: nobody would repair its group.
        """
        with self._lock:
            if all_there:
                require_all([name for group in new for name in group.members], self._ranks.present())
            killed = {rank for group in old for rank in group.killed}
            for group in new:
                group.killed |= killed.intersection(group.members)
            self.groups = (*(group for group in self.groups if group not in old), *new)
            self._changed.notify_all()
        together = {name for group in new for name in group.members}
        alone = [name for group in old for name in group.members if name not in together]
        with self._dispatcher.lock:
            for instance in self._dispatcher.present(alone).values():
                instance.group, instance.path, instance.group_blocks = (), None, 0
        for group in new:
            self.mark(group)
        for group in old:
            group.close()

    def mark(self, group: Group) -> None:
        """Note at the instances what they are part of."""
        with self._dispatcher.lock:
            for name, instance in self._dispatcher.present(group.members).items():
                instance.group, instance.path = group.members, group.shape.paths[name]

    def note(self, kind: EventKind, group: Group, **about: Any) -> None:
        """Have an event tell of a group."""
        self._log.add(kind, rank=",".join(group.members), **about)

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
        thread = clock.current().thread(partial(self._repair, instance.name), f"elastic-repair-{instance.name}")
        with self._lock:
            thread.start()
            self.repairs = [*(other for other in self.repairs if other.is_alive()), thread]

    def _repair(self, rank: str) -> None:
        while (group := self.group_of(rank)) is not None and not self._closed:
            with self._claims.of(group.members):  # a verb of theirs that was under way has failed, or ends soon
                if self.group_of(rank) is not group:
                    continue  # the verb has put them together anew
                recomputed = recover(self._ranks, group, rank)
                self.replace([group])
                self._log.count(recomputed_tokens=recomputed)
                self.note("recovered", group, recomputed_tokens=recomputed, why=f"rank {rank} was lost")
                go_on(self._ranks, rank, group.members)
        go_on(self._ranks, rank, ())

    def close(self) -> None:
        """Repair nothing any more: the ranks end."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self.repairs:
            thread.join()
        for group in self.groups:
            group.close()
