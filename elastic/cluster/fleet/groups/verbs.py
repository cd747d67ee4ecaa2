"""The verbs of a fleet for instances that compute each other's layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from elastic.cluster.fleet.groups import targets
from elastic.cluster.fleet.groups.caps.reach import largest_instances
from elastic.cluster.fleet.groups.exchange import LIVE
from elastic.cluster.fleet.groups.flip import ExchangeForm
from elastic.cluster.fleet.groups.groups import Groups
from elastic.cluster.fleet.groups.results import (
    Dropped,
    GroupStatus,
    Migrated,
    Replicated,
    Resharded,
    Restored,
    added_up,
)
from elastic.cluster.fleet.groups.weights.checks import compare_weights
from elastic.cluster.fleet.planning.budgets import Budgets
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.refusals import VerbChecks, layer_numbers
from elastic.config import parse_bytes
from elastic.errors import ConfigError, RankLost, is_integer, is_list, require
from elastic.planning.arrangement.drop import DropPlan

TIMEOUT_S = 60.0
"""How long live requests may take to fit in what the caches are lowered to while layers change their rank."""


class GroupVerbs(VerbChecks):
    """Each verb blocks its caller, and waits for the one before and for the repair of groups that have lost a rank.

    Requests are served on meanwhile. Not for listeners.
    """

    _groups: Groups

    def keep_staging(self) -> None:
        """Have each rank that is by itself keep the KV of one layer free, so that a drop can begin when all is full.

        What a policy of drops asks for again and again: a rank may have joined, or a request wait that needs that room.
        """
        self._require_verb()
        self._groups.keep_staging()

    def get_ready(self) -> None:
        """Have ranks listen for each other, and compute the checksums of their weights, before layers are to change.

        What policies that may need it ask for, again and again: a rank may have joined.
        """
        self._require_verb()
        self._groups.ranks.get_ready()

    def drop(
        self,
        need: int | str | None = None,
        *,
        layers: Mapping[str, Iterable[int]] | None = None,
        plan: DropPlan | None = None,
        whole: bool = False,
        most: int | None = None,
        timeout_s: float = TIMEOUT_S,
        dry_run: bool = False,
        why: str = "by hand",
        exchange: Literal["live", "stall"] = "live",
        coordinated: bool = True,
        layers_per_step: int | None = None,
    ) -> Dropped:
        """Have instances drop layers that they hold twice, and compute them for each other; the memory is KV cache.

        Either so that `need` bytes (or such as "24MiB") come free, in groups of `most` instances at the most, of whole
        models (`whole`, the paper's form) or of as few layers as suffice; or as a `plan` says; or these `layers` of
        each rank. Keys and values of running requests move to the ranks that compute their layers, layer by layer;
        nothing is computed again. With `dry_run` nothing is done. (KunServe, section 4)

        With `exchange="stall"` instances stop for all of it, as the paper's do; with `coordinated=False` copies let
        nothing pass (section 4.2): both are what the others are measured against. `layers_per_step` layers of an
        instance change their rank at one pause of it, at the most; None: as many as there is room for.

        Raises `CapacityError` if no drop frees so much, or the ranks have no memory for what is asked; `ConfigError`
        for ranks that cannot reach each other, and layers that none would keep; `RankLost`.
        """
        self._begin(whole=whole, most=most, timeout_s=timeout_s, dry_run=dry_run, why=why)
        if sum(given is not None for given in (need, layers, plan)) != 1:
            raise ConfigError("drop: give one of need=, layers= and plan=")
        if need is None and (whole or most is not None):
            raise ConfigError("drop: whole= and most= say how so many bytes come free; give need= with them")
        require(plan is None or isinstance(plan, DropPlan), "plan", plan, "a DropPlan, as `Fleet.plan` has them")
        form = ExchangeForm(exchange, coordinated, layers_per_step)
        if layers is not None:
            require(isinstance(layers, Mapping), "layers", layers, "a mapping from ranks to the layers that each drops")
            wanted = {rank: frozenset(layer_numbers(each)) for rank, each in layers.items()}
            names, target_of = tuple(wanted), partial(targets.dropped_by_hand, layers=wanted)
            with self._groups.verb(names):
                done, freed = self._groups.change(names, target_of, timeout_s, form, "dropped", why, dry_run=dry_run)
            return Dropped(**vars(done), freed_bytes=freed)
        needed = 0 if plan is not None else parse_bytes(need, option="need")  # type: ignore[arg-type]
        with self._groups.verb(None if plan is None else [name for group in plan.groups for name in group.members]):
            plan = plan if plan is not None else self._groups.plan(needed, whole=whole, most=most)
            return self._drop(plan, timeout_s, form, why, dry_run=dry_run)

    def restore(
        self,
        rank: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        dry_run: bool = False,
        why: str = "by hand",
        exchange: Literal["live", "stall"] = "live",
        coordinated: bool = True,
        layers_per_step: int | None = None,
        sharing: bool = False,
    ) -> Restored:
        """Have instances compute all of their layers themselves again: of a rank's group, or of all; they part then.

        With `sharing`, ranks that share layers go on to: only what was dropped besides comes back to them. Live
        requests must fit in the caches that will be left, else it is `deferred`. Weights come from ranks that have
        them, or from the checkpoint; keys and values come back layer by layer. With `dry_run` nothing is done.
        (KunServe, section 4.4)
        """
        self._begin(timeout_s=timeout_s, dry_run=dry_run, why=why, sharing=sharing)
        if rank is not None:
            self._require_verb(rank=rank)
        form = ExchangeForm(exchange, coordinated, layers_per_step)
        with self._groups.verb(None if rank is None else (rank,)):
            groups = self._groups.registry.groups_of(rank)
            if rank is not None and not groups:
                return Restored("planned" if dry_run else "applied", members=(rank,))
            members = tuple(name for group in groups for name in group.members)
            if dry_run:
                target_of = partial(targets.restored, go_on_sharing=sharing)
                would, _ = self._groups.dry_runs.of([(group.members, target_of) for group in groups], form)
                return Restored(**vars(would), members=members)
            done = [self._groups.restore(each, timeout_s, why, form, sharing=sharing) for each in groups]
            return Restored(**added_up(done), members=members)

    def merge(self, *ranks: str) -> GroupStatus:
        """Have instances be one group, with nothing dropped: their ranks know each other then."""
        self._begin()
        for rank in ranks:
            self._require_verb(rank=rank)
        registry = self._groups.registry
        with self._groups.verb(ranks), registry.acting(ranks):
            before = [group for group in registry.groups if not set(ranks).isdisjoint(group.members)]
            group = registry.merged(ranks)
            try:
                self._groups.ranks.introduce(group.members)
                compare_weights(self._groups.ranks, group)
            except BaseException:
                if group not in before:
                    with suppress(RankLost):  # who has lost a rank is repaired
                        registry.split_up(group, [each.members for each in before])
                raise
            registry.note("merged", group)
            return group.status()

    def split(self, rank: str, *, timeout_s: float = TIMEOUT_S) -> Restored:
        """End the group of a rank: what was dropped is restored, and the instances part."""
        self._begin(rank=rank, timeout_s=timeout_s)
        return self.restore(rank, timeout_s=timeout_s)

    def migrate(
        self,
        home: str,
        layers: Iterable[int],
        rank: str,
        *,
        timeout_s: float = TIMEOUT_S,
        dry_run: bool = False,
        exchange: Literal["live", "stall"] = "live",
        coordinated: bool = True,
        layers_per_step: int | None = None,
    ) -> Migrated:
        """Have another rank compute layers of an instance, from now on; no weights are dropped.

        Its keys and values are there then, and count against that rank's memory. With `dry_run` nothing is done.
        (CoCoServe, section 3.3)
        """
        self._begin(home=home, rank=rank, timeout_s=timeout_s, dry_run=dry_run)
        form, why = ExchangeForm(exchange, coordinated, layers_per_step), f"layers of {home} to {rank}"
        chosen = tuple(sorted(set(layer_numbers(layers))))
        target_of = partial(targets.migrated, home=home, layers=chosen, rank=rank)
        with self._groups.verb((home, rank)):
            done, _ = self._groups.change((home, rank), target_of, timeout_s, form, "migrated", why, dry_run=dry_run)
        return Migrated(**vars(done), home=home, rank=rank, layers=chosen)

    def replicate(
        self, home: str, layers: Iterable[int], rank: str, *, timeout_s: float = TIMEOUT_S, dry_run: bool = False
    ) -> Replicated:
        """Have another rank compute layers of an instance, too, for half of its requests; no weights are dropped.

        Each half has a batch in flight, and its keys and values of these layers where they are computed. Requests go on
        meanwhile: those of the other rank's half are copied, none is computed again. Whatever has all layers computed
        by one rank each again, as `restore` does, evicts replicas. With `dry_run` nothing is done. (CoCoServe, section
        3)

        Raises `ConfigError` for layers that have a replica, or are that rank's; `CapacityError` if it has no memory for
        their keys and values, `RankLost`.
        """
        self._begin(home=home, rank=rank, timeout_s=timeout_s, dry_run=dry_run)
        chosen, why = tuple(sorted(set(layer_numbers(layers)))), f"layers of {home} at {rank}"
        target_of = partial(targets.replicated, home=home, layers=chosen, rank=rank)
        with self._groups.verb((home, rank)):
            done, _ = self._groups.change((home, rank), target_of, timeout_s, LIVE, "replicated", why, dry_run=dry_run)
            there = chosen if dry_run else tuple(layer for layer in self._replicas(home) if layer in chosen)
        return Replicated(**vars(done), home=home, rank=rank, layers=there)

    def evict(self, home: str, layers: Iterable[int] | None = None, *, timeout_s: float = TIMEOUT_S) -> Replicated:
        """Have layers of an instance (None: all) be computed by one rank for all of its requests again.

        Keys and values come back from the replicas, nothing is computed again. Layers without one are passed over.
        Raises `ConfigError`, `RankLost`.
        """
        self._begin(home=home, timeout_s=timeout_s)
        wanted = None if layers is None else layer_numbers(layers)
        registry, why = self._groups.registry, f"replicas of {home}"
        with self._groups.verb((home,)), registry.acting((home,)):
            self._groups.ranks.instance(home)  # it is there
            targets.require_layers(len(self._groups.layer_bytes()), home, wanted or ())
            group, replicas = registry.group_of(home), self._replicas(home)
            chosen = replicas if wanted is None else tuple(layer for layer in replicas if layer in wanted)
            if group is None or not chosen:
                return Replicated("applied", home=home)
            target_of = partial(targets.evicted, home=home, layers=chosen)
            done, _ = self._groups.become(group.members, target_of, timeout_s, LIVE, "evicted", why)
            registry.divide(home)
            left = self._replicas(home)
            return Replicated(**vars(done), home=home, layers=tuple(layer for layer in chosen if layer not in left))

    def reshard(
        self,
        instances: str | Sequence[str],
        *,
        tp: int,
        timeout_s: float = TIMEOUT_S,
        dry_run: bool = False,
        why: str = "by hand",
        exchange: Literal["live", "stall"] = "live",
        coordinated: bool = True,
        layers_per_step: int | None = None,
    ) -> Resharded:
        """Have `tp` ranks share every layer of their instances: each has a part of the weights, and of the KV heads.

        Whoever computes layers with one of `instances` counts as named; all of them are put together anew, `tp` at a
        time, in their order. With `tp=1` each has all of its layers again. An instance at degree 2 or 4 has room
        for longer requests: weights become KV cache, and the keys and values of each request are spread over all of its
        ranks. Requests go on meanwhile, and nothing is computed again; what does not change its rank is not copied. The
        other options are as of `drop`. (AMOEBA, section 3)

        Raises `ConfigError` where layers were not cut for it (`Fleet(shards=4)`), or the ranks are no multiple of
        `tp`; `CapacityError` if they have no memory for it, `RankLost`.
        """
        self._begin(timeout_s=timeout_s, dry_run=dry_run, why=why)
        names = [instances] if isinstance(instances, str) else instances
        is_names = is_list(names, lambda name: isinstance(name, str))
        require(is_names, "instances", instances, "the name of an instance, or a list of them")
        form, groups = ExchangeForm(exchange, coordinated, layers_per_step), self._groups
        with groups.verb(names):
            members = groups.registry.with_partners(names)
            targets.require_shards(groups.ranks.measure(members), tp)
            target_of = partial(targets.sharded, units=targets.units_of(members, tp))
            if dry_run:
                done, freed = groups.dry_runs.of([(members, target_of)], form)
            elif len(members) == 1:
                return Resharded("applied", members=members)
            else:
                why = f"{', '.join(members)} to tp={tp}, {why}"
                with groups.registry.acting(members):
                    done, freed = groups.become(members, target_of, timeout_s, form, "resharded", why)
                    groups.registry.divide(members[0])
            return Resharded(**vars(done), members=members, tp=tp, freed_bytes=freed)

    def capacity(self, degrees: Sequence[int]) -> dict[str, dict[int, int]]:
        """Return the blocks of KV cache that one instance could have: of each rank, by how many like it share layers.

        On a GPU there is room left for what steps take over so many, where a rank keeps it; on a CPU a budget is of
        pages alone. Degrees for which layers were not cut are left out. Raises `ConfigError` for what is no degree.
        """
        self._begin()
        require(is_list(degrees, lambda _: True), "degrees", degrees, "a list of whole numbers, at least 1")
        for degree in degrees:
            require(is_integer(degree) and degree >= 1, "degrees", degree, "whole numbers, at least 1")
        self._groups.registry.settle(None)
        ranks = self._groups.ranks
        formats = {instance.name: instance.kv_format for instance in ranks.serving()}
        return largest_instances(ranks.measure(formats), formats, degrees)

    def layer_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each decoder layer's weights, of which a drop frees some."""
        self._begin()
        return self._groups.layer_bytes()

    def budgets(self) -> Budgets:
        """Return what a plan of drops must fit: the memory of ranks, and the keys and values there, as they say now."""
        self._begin()
        serving = self._groups.ranks.serving()
        return Budgets(self._groups.ranks.measure(instance.name for instance in serving), serving)

    @property
    def changing(self) -> bool:
        """Whether one of these verbs is under way, or a group is repaired."""
        groups = self._groups
        is_repairing = any(thread.is_alive() for thread in groups.registry.repairs)
        return is_repairing or (groups.verbs.locked() and not groups.following)

    def groups(self) -> tuple[GroupStatus, ...]:
        """Return the groups of instances that compute each other's layers; others are by themselves."""
        return tuple(group.status() for group in self._groups.registry.groups)

    # -- inside

    def _drop(self, plan: DropPlan, timeout_s: float, form: ExchangeForm, why: str, *, dry_run: bool) -> Dropped:
        """Have groups of ranks drop what is planned, one after another, until one does not."""
        groups = self._groups
        units = [unit for group in groups.registry.groups for unit in targets.sharing(group.shape.paths)]
        plans = tuple(targets.of_ranks(each, units) for each in plan.groups)
        wanted = [(each.members, partial(targets.planned_shape, plan=each)) for each in plans]
        if dry_run:
            would, _ = groups.dry_runs.of(wanted, form)
            freed_bytes = plan.freed_bytes if would.status == "planned" else 0
            return Dropped(**vars(would), groups=plans, freed_bytes=freed_bytes)
        dropped: list[Dropped] = []
        for members, target_of in wanted:
            done, freed = groups.change(members, target_of, timeout_s, form, "dropped", why)
            dropped.append(Dropped(**vars(done), freed_bytes=freed))
            if done.status != "applied":
                break
        return Dropped(**added_up(dropped), groups=plans, freed_bytes=sum(each.freed_bytes for each in dropped))

    def _replicas(self, home: str) -> tuple[int, ...]:
        """Return the layers of an instance that have a replica."""
        group = self._groups.registry.group_of(home)
        path = None if group is None else group.shape.paths[home]
        return () if path is None else tuple(i for i in range(path.layers) if len(path.copies_of(i)) > 1)

    def _begin(self, **arguments: Any) -> None:
        """Raise in a listener, without ranks, and for arguments that cannot be; see `VerbChecks`."""
        Delivery.forbid("ranks cannot be asked, nor layers change their rank,")
        self._require_verb(**arguments)
