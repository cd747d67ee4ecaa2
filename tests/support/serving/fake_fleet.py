"""A fleet without processes, for tests of what stands in front of one: its ranks do what a test says."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.cluster.control.messages import RuntimeView
from elastic.cluster.control.status import FleetEvent, FleetStatus, FleetTotals, InstanceStatus, RankStatus, Wire
from elastic.cluster.fleet.groups.results import Dropped, GroupStatus, Migrated, Replicated, Resharded, Restored, Status
from elastic.controller.loop import ControllerHealth
from elastic.controller.policies.group_costs import GroupPrice
from elastic.controller.remedies import Offer
from elastic.controller.snapshot import RequestStats
from elastic.engines.core.load import EngineLoad
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.turn import StageTimes
from elastic.errors import CapacityError, ConfigError, NotFound, RankLost, StateError
from elastic.planning.arrangement.drop import GroupPlan
from elastic.types import Action, Change, PlanStep, Prepared
from support.serving.fake_engine import FakeEngine
from support.serving.status_documents import events, status


@dataclass(frozen=True)
class Moved:
    request: str
    target: str
    moved_bytes: int = 4096
    stalled_ms: float = 1.5


class FakeFleet(FakeEngine):
    """Ranks by name, each an instance; `prepared` is what each holds, `done` what was committed."""

    def __init__(self, *ranks: str, **options: Any) -> None:
        super().__init__(**options)
        self.ranks = {name: RankStatus(name, "serving", 100 + i, "here", "fake") for i, name in enumerate(ranks)}
        self.hung = threading.Event()
        """While it is set, `look` of a rank in `hangs` waits."""
        self.hangs: set[str] = set()
        self.lacks_memory: set[str] = set()
        self.cannot_commit: set[str] = set()
        self.prepared: dict[str, dict[str, Sequence[Action]]] = {name: {} for name in ranks}
        self.done: list[tuple[str, tuple[Action, ...]]] = []
        self.looked: list[str] = []
        self.reasons: list[str] = []
        """Of the actions that were asked for."""
        self.moves: list[tuple[str, str]] = []
        self.released = threading.Event()
        self.groups_asked: list[tuple[str, Any]] = []
        self.forms: list[dict[str, Any]] = []
        """How layers were to change their rank, of each drop, restore and reshard."""
        self.paths: dict[str, tuple[str, ...]] = {}
        """Rank -> the path of its instance."""

    def becomes(self, rank: str, state: Any, why: str = "") -> None:
        self.ranks[rank] = replace(self.ranks[rank], state=state, why=why)

    def status(self) -> FleetStatus:
        live = [rank for rank in self.ranks.values() if rank.up]
        load = EngineLoad(running=2, waiting=1, free_blocks=30, total_blocks=40)
        instances = tuple(
            InstanceStatus(f"i-{r.name}", r.name, (r.name,), load, 3, 15.0, 0, path, tp)
            for r in live
            for path in [self.paths.get(r.name, ())]
            for tp in [max((layer.count("+") + 1 for layer in path), default=1)]
        )
        totals = FleetTotals(7, 5, 4096, 1, 2, 33, 4, 2048)
        return FleetStatus(tuple(self.ranks.values()), instances, 6, totals, "all is well; KV a 10%")

    def events(self) -> tuple[FleetEvent, ...]:
        return (FleetEvent(0, "lost", 1e9, rank="gone", requests=2, recomputed_tokens=33, why="it was killed"),)

    def look(self, rank: str) -> RuntimeView:
        self.looked.append(rank)
        if rank in self.hangs:
            self.released.wait()
            raise RankLost(f"rank {rank} hangs", rank=rank)
        self._require(rank)
        wires = (Wire("b", 100, 200, 300, 400),) if rank == "a" else ()
        return RuntimeView(
            status(), RequestStats(running=2, step_tokens=7, steps_by_tokens=(1, 1, 1)), events(), ControllerHealth(),
            StageTimes(6.0, 2.0, 3.0, 0.25), wires,
        )  # fmt: skip

    def apply(self, rank: str, actions: Sequence[Action], *, dry_run: bool = False, why: str = "by the fleet") -> Any:
        self._require(rank)
        self.reasons.append(why)
        if dry_run:
            return tuple(PlanStep(action, "applied", 1, 2, 3, 0.0) for action in actions)
        self.done.append((rank, tuple(actions)))
        return tuple(Change("applied", getattr(action, "layers", ())) for action in actions)

    def prepare(self, rank: str, actions: Sequence[Action], id: str, timeout_s: float = 60.0) -> Prepared:
        self._require(rank)
        if rank in self.lacks_memory:
            raise CapacityError(f"rank {rank} is full", requested_bytes=1, free_bytes=0, total_bytes=0)
        self.prepared[rank][id] = actions
        return Prepared(id, tuple(self.apply(rank, actions, dry_run=True)), 10, 3, 1e9 + timeout_s)

    def commit(self, rank: str, id: str) -> Any:
        self._require(rank)
        if rank in self.cannot_commit:
            del self.prepared[rank][id]
            raise StateError("its weights were written")
        return self.apply(rank, self.prepared[rank].pop(id))

    def rollback(self, rank: str, id: str) -> None:
        self._require(rank)
        self.prepared[rank].pop(id, None)

    def move(self, request: str, instance: str) -> Moved:
        if instance not in [each.name for each in self.status().instances]:
            raise NotFound(f"there is no instance {instance!r}; there are: i-a")
        self.moves.append((request, instance))
        return Moved(request, instance)

    def add(self, places: Sequence[str] | None = None) -> str:
        if places == ("cpu=1EiB",):
            raise CapacityError("no such memory", requested_bytes=1, free_bytes=0, total_bytes=0)
        self.ranks["new"] = RankStatus("new", "serving", 1, "here", "fake", tuple(places or ()))
        return "new"

    def remove(self, name: str, *, drain: bool = True) -> None:
        if name not in self.ranks:
            raise NotFound(f"there is no rank {name!r}")
        if len(self.ranks) == 1:
            raise StateError(f"rank {name!r} is the last one")
        self.becomes(name, "ended", "" if drain else "at once")

    def drop(
        self,
        need: int | str | None = None,
        *,
        layers: Mapping[str, Sequence[int]] | None = None,
        dry_run: bool = False,
        why: str = "",
        **form: Any,
    ) -> Dropped:
        self.forms.append(form)
        if need == "1EiB":
            raise CapacityError("no drop frees so much", requested_bytes=1, free_bytes=0, total_bytes=0)
        self.groups_asked.append(("drop", (need, layers, dry_run, why)))
        plan = GroupPlan((0, 1), ("a", "b"), ((0, 1), (2, 3, 5)), (range(2), range(2, 6)), 4096)
        if dry_run:
            price = GroupPrice(0.25, 4096, 2048, 5, 0.0)
            return Dropped("planned", 5, 2048, groups=(plan,), freed_bytes=4096, price=price)
        return Dropped("applied", flips=5, moved_bytes=2048, stalled_ms=0.75, groups=(plan,), freed_bytes=4096)

    def plan(self, need: int | str) -> tuple[Offer, ...]:
        self.groups_asked.append(("plan", need))
        if need == "1EiB":
            return ()
        return (Offer("drop", 0.25, 4096), Offer("swap", 2.0, 2048, lossless=False), Offer("restore", 0.5, -8192))

    def capacity(self, degrees: Sequence[int]) -> dict[str, dict[int, int]]:
        self.groups_asked.append(("capacity", tuple(degrees)))
        return {"a": {d: 1000 * d for d in degrees if d in (1, 2)}, "b": {d: 9 for d in degrees if d == 1}}

    def restore(self, rank: str | None = None, *, dry_run: bool = False, why: str = "", **form: Any) -> Restored:
        self.forms.append(form)
        self.groups_asked.append(("restore", (rank, why)))
        if dry_run:
            price = GroupPrice(0.5, -4096, 6144, 5, 0.0)
            return Restored("planned", 5, 2048, 4096, seconds=0.01, price=price, members=("a", "b"))
        if rank == "b":
            return Restored("deferred", members=("a", "b"), why="live requests need the memory")
        return Restored("applied", flips=5, moved_bytes=2048, fetched_bytes=4096, members=("a", "b"))

    def reshard(
        self,
        instances: str | Sequence[str],
        *,
        tp: int,
        layers_per_step: int | None = None,
        dry_run: bool = False,
        why: str = "",
        **form: Any,
    ) -> Resharded:
        self.forms.append({**form, "layers_per_step": layers_per_step})
        if tp == 3:
            raise ConfigError("tp=3: each layer of rank 'a' is in 4 shards")
        self.groups_asked.append(("reshard", (instances, tp, layers_per_step, dry_run, why)))
        if dry_run:
            price = GroupPrice(0.25, 4096, 2048, 5, 0.0)
            return Resharded("planned", 5, 2048, members=("a", "b"), tp=tp, freed_bytes=4096, price=price)
        return Resharded("applied", flips=5, moved_bytes=2048, members=("a", "b"), tp=tp, freed_bytes=4096)

    def migrate(self, home: str, layers: Sequence[int], rank: str, *, dry_run: bool = False, **form: Any) -> Migrated:
        self.forms.append(form)
        self.groups_asked.append(("migrate", (home, layers, rank)))
        status: Status = "planned" if dry_run else "deferred" if rank == "new" else "applied"
        return Migrated(status, 2, 2048, home=home, rank=rank, layers=tuple(layers))

    def replicate(self, home: str, layers: Sequence[int], rank: str, *, dry_run: bool = False) -> Replicated:
        self.groups_asked.append(("replicate", (home, layers, rank)))
        if dry_run:
            return Replicated("planned", 2, 2048, price=GroupPrice(0.125, 0, 2048, 2, 0.0), home=home, rank=rank)
        if home == rank:
            raise ConfigError(f"layers {layers} of {home!r} are at {rank!r} already")
        if rank == "new":
            return Replicated("deferred", home=home, rank=rank, why="live requests need the memory")
        return Replicated("applied", 2, 2048, 4096, 0.75, home=home, rank=rank, layers=tuple(layers))

    def evict(self, home: str, layers: Sequence[int] | None = None) -> Replicated:
        self.groups_asked.append(("evict", (home, layers)))
        return Replicated("applied", 2, 2048, home=home, layers=(4, 5, 9))

    def merge(self, *ranks: str) -> GroupStatus:
        self.groups_asked.append(("merge", ranks))
        paths = {rank: LayerPath.alone(rank, 2) for rank in ranks}
        return GroupStatus(ranks, paths, dict.fromkeys(ranks, (0, 1)), dict.fromkeys(ranks), dict.fromkeys(ranks, 9))

    def split(self, rank: str) -> Restored:
        if rank not in self.ranks:
            raise NotFound(f"there is no group of rank {rank!r}")
        self.groups_asked.append(("split", rank))
        return Restored("applied", members=("a", "b"))

    def _require(self, rank: str) -> None:
        if self.ranks[rank].state == "lost":
            raise RankLost(f"rank {rank} is lost", rank=rank)
