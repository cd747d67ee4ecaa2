"""Instances whose layers are at several ranks at once: cut, with a part at each, or whole, with a replica at another.

Cut layers are tensor parallelism that changes while it serves (AMOEBA, section 3); replicas share requests (CoCoServe,
section 3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.groups import targets
from elastic.cluster.fleet.groups.caps.reach import largest_instances, note_reach
from elastic.cluster.fleet.groups.exchange import LIVE, Exchange, close_stages, compare_weights, measure
from elastic.cluster.fleet.groups.flip import ExchangeForm
from elastic.cluster.fleet.groups.group import Group, Shape
from elastic.cluster.fleet.groups.groups import Groups
from elastic.cluster.fleet.groups.results import GroupStatus, Migrated, Replicated, Resharded, Restored, all_restored
from elastic.cluster.fleet.planning.budgets import Budgets
from elastic.errors import ConfigError, NotFound, RankLost, StateError
from elastic.planning.sharding.share import Share

FORM_S = 60.0
"""How long ranks that are to compute together may wait for requests of those of them that serve."""
Units = tuple[tuple[str, ...], ...]
"""Ranks that are to share every layer with each other, and with no others."""


class ReshardingGroups(Groups):
    """Groups that can also be of ranks which share each layer, have some or replicas of some, or only know each other;
    see `Groups`."""

    def merge(self, names: Sequence[str]) -> GroupStatus:
        """Have instances be a group; no layer changes its rank yet. If it comes to nothing, all are as before."""
        with self._verbs, self._acting(names):
            before = [group for group in self._groups if not set(names).isdisjoint(group.members)]
            group = self._merged(names)
            try:
                self._ranks.introduce(group.members)
                compare_weights(self._ranks, group)
            except BaseException:
                if group not in before:
                    with suppress(RankLost):  # who has lost a rank is repaired
                        self._split_up(group, [each.members for each in before])
                raise
            self._event("merged", group)
            return group.status()

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
            members = self._with_partners(names)
            rooms = measure(self._ranks, members)
            _require_shards(rooms, tp)
            units = _units(members, tp)
            if dry_run:
                would, leaving = self._dry_runs.of(
                    [(members, partial(targets.sharded, units=units))], form.layers_per_step
                )
                return Resharded(**vars(would), members=members, tp=tp, freed_bytes=leaving)
            if len(members) == 1:
                return Resharded("applied", members=members)
            return self._reshard(units, timeout_s, why, form)

    def form(self, shares: Mapping[str, Share]) -> None:
        """Have ranks that begin with their shares of the model compute it together. Raises what they raise."""
        with self._verbs, self._acting(shares), self._group_for(tuple(shares)) as group:
            target = targets.shared_out(group.shape, shares)
            exchange = Exchange(self._ranks, group, target, FORM_S)
            done = self._run(exchange, "formed", "forming failed", "all of its ranks are there")
            if done.status != "applied":
                raise StateError(f"{', '.join(shares)} do not compute together ({done.status}): {done.why}")

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
            groups = self._groups_of(rank)
            if rank is not None and not groups:
                return Restored("planned" if dry_run else "applied", members=(rank,))
            if dry_run:
                target_of = targets.undropped if sharing else targets.apart
                would, _ = self._dry_runs.of([(group.members, target_of) for group in groups], form.layers_per_step)
                return Restored(**vars(would), members=tuple(name for group in groups for name in group.members))
            restore = self._restore_sharing if sharing else self._restore
            return all_restored([restore(group, timeout_s, why, form) for group in groups])

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
        chosen = tuple(sorted(set(layers)))
        target_of = partial(targets.migrated, home=home, layers=chosen, rank=rank)
        with self._verbs:
            if dry_run:
                would, _ = self._dry_runs.of([(self._together((home, rank))[1], target_of)], form.layers_per_step)
                return Migrated(**vars(would), home=home, rank=rank, layers=chosen)
            with self._acting((home, rank)), self._group_for((home, rank)) as group:
                exchange = Exchange(self._ranks, group, target_of(group.shape), timeout_s, form)
                done = self._run(exchange, "migrated", "migration failed", f"layers of {home} to {rank}")
                return Migrated(**vars(done), home=home, rank=rank, layers=chosen)

    def replicate(
        self, home: str, layers: Collection[int], rank: str, timeout_s: float, *, dry_run: bool = False
    ) -> Replicated:
        """Have a rank compute layers of an instance for half of its requests; see `Fleet.replicate`."""
        chosen = tuple(sorted(set(layers)))
        target_of = partial(targets.replicated, home=home, layers=chosen, rank=rank)
        with self._verbs:
            if dry_run:
                would, _ = self._dry_runs.of([(self._together((home, rank))[1], target_of)], None)
                return Replicated(**vars(would), home=home, rank=rank, layers=chosen)
            with self._acting((home, rank)), self._group_for((home, rank)) as group:
                exchange = Exchange(self._ranks, group, target_of(group.shape), timeout_s)
                done = self._run(exchange, "replicated", "replication failed", f"layers of {home} at {rank}")
                there = tuple(layer for layer in _replicas(group.shape, home) if layer in chosen)
                return Replicated(**vars(done), home=home, rank=rank, layers=there)

    def evict(self, home: str, layers: Collection[int] | None, timeout_s: float) -> Replicated:
        """Have layers of an instance have no replica; see `Fleet.evict`."""
        with self._verbs, self._acting((home,)):
            group = self.group_of(home)
            replicas = () if group is None else _replicas(group.shape, home)
            chosen = replicas if layers is None else tuple(layer for layer in replicas if layer in set(layers))
            if group is None or not chosen:
                self._ranks.instance(home)  # it is there
                return Replicated("applied", home=home)
            with self._group_for(group.members):
                exchange = Exchange(self._ranks, group, targets.evicted(group.shape, home, chosen), timeout_s)
                done = self._run(exchange, "evicted", "eviction failed", f"replicas of {home}")
            self._divide(group)
            gone = tuple(layer for layer in chosen if layer not in _replicas(group.shape, home))
            return Replicated(**vars(done), home=home, layers=gone)

    def capacity(self, degrees: Sequence[int]) -> dict[str, dict[int, int]]:
        """Return the blocks that an instance could have, of each rank and degree; see `Fleet.capacity`."""
        serving = {instance.name: instance.kv_format for instance in self._ranks.serving()}
        return largest_instances(measure(self._ranks, serving), serving, degrees)

    def budgets(self) -> Budgets:
        """Return what ranks tell of themselves, for who plans drops. Raises `StateError` where none serves."""
        serving = self._ranks.serving()
        return Budgets(measure(self._ranks, [instance.name for instance in serving]), serving)

    # -- inside, one verb at a time

    def _with_partners(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return ranks, and those that compute layers with them. Raises `ConfigError` for none and for unknown ones."""
        serving = [instance.name for instance in self._ranks.serving()]
        there = ", ".join(serving) or "none"
        if not names:
            raise ConfigError(f"reshard: name one instance at least; there are: {there}")
        if unknown := [name for name in names if name not in serving]:
            raise NotFound(f"reshard: there is no rank {unknown[0]!r} that serves; there are: {there}")
        partners: dict[str, None] = {}
        for name in names:
            group = self.group_of(name)
            units = [unit for unit in group.shape.units() if name in unit] if group is not None else [(name,)]
            partners |= dict.fromkeys(units[0])
        return tuple(partners)

    def _restore_sharing(self, group: Group, timeout_s: float, why: str, form: ExchangeForm) -> Restored:
        if group.shape.tp == 1:
            return self._restore(group, timeout_s, why, form)
        with self._acting(group.members):
            if group not in self._groups:  # it was repaired: all of them are by themselves
                return Restored("applied", members=group.members)
            exchange = Exchange(self._ranks, group, targets.undropped(group.shape), timeout_s, form)
            done = self._run(exchange, "restored", "restore failed", why)
            self._divide(group)
            return Restored(**vars(done), members=group.members)

    def _reshard(self, units: Units, timeout_s: float, why: str, form: ExchangeForm) -> Resharded:
        members = tuple(name for unit in units for name in unit)
        with self._acting(members):
            with self._group_for(members) as group:
                exchange = Exchange(self._ranks, group, targets.sharded(group.shape, units), timeout_s, form)
                why = f"{', '.join(members)} to tp={len(units[0])}, {why}"
                done = self._run(exchange, "resharded", "reshard failed", why)
            self._divide(group)
        return Resharded(**vars(done), members=members, tp=len(units[0]), freed_bytes=exchange.counts.freed_bytes)

    def _divide(self, group: Group) -> None:
        """Have those of a group that compute nothing for each other any more be groups of their own."""
        units = group.shape.units()
        if len(units) == 1 or group not in self._groups:
            return
        unit_of = {name: unit for unit in units for name in unit}
        across = [(home, rank) for home, rank in group.stages if unit_of[home] != unit_of[rank]]
        close_stages(self._ranks, across)
        group.stages.difference_update(across)
        self._split_up(group, [unit for unit in units if len(unit) > 1])
        alone = [unit[0] for unit in units if len(unit) == 1]
        self._ranks.set_caps({name: group.staged.get(name) for name in alone})
        if alone:
            self._log.add("parted", rank=",".join(alone))

    def _split_up(self, group: Group, units: Sequence[tuple[str, ...]]) -> None:
        """Have some of a group be groups of their own, and all others by themselves."""
        parts = [group.part_of(unit) for unit in units]
        self._replace([group], parts)
        for part in parts:
            note_reach(self._dispatcher, part.shape, measure(self._ranks, part.members))


def _replicas(shape: Shape, home: str) -> tuple[int, ...]:
    """Return the layers of an instance that have a replica."""
    return tuple(layer for layer in range(shape.layers) if len(shape.paths[home].copies_of(layer)) > 1)


def _units(members: tuple[str, ...], tp: int) -> Units:
    """Put ranks together that are to share layers, in their order."""
    if len(members) % tp:
        raise ConfigError(
            f"reshard: {', '.join(members)} are {len(members)} ranks, which compute layers together or were named; "
            f"tp={tp} needs a multiple of {tp}"
        )
    return tuple(members[first : first + tp] for first in range(0, len(members), tp))


def _require_shards(rooms: Mapping[str, Room], tp: int) -> None:
    """Raise `ConfigError` for layers that cannot be shared by so many ranks."""
    if type(tp) is not int or tp < 1:
        raise ConfigError(f"tp={tp!r} must be a whole number, at least 1")
    for name, room in rooms.items():
        if room.path.shards % tp:
            cut = f"in {room.path.shards} shards" if room.path.shards > 1 else "not cut"
            raise ConfigError(
                f"tp={tp}: each layer of rank {name!r} is {cut}; start the fleet with shards={tp}, or more"
            )
