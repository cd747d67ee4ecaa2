"""What a change of groups would cost, in the currency of the arbiter: known before it is done."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.control.status import EventKind, FleetEvent
from elastic.cluster.fleet.groups.flip import ExchangeForm
from elastic.cluster.fleet.groups.group import Shape
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.cluster.fleet.groups.results import Exchanged
from elastic.cluster.fleet.groups.transition import flips_between
from elastic.cluster.fleet.groups.weights.checks import require_droppable
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.controller.policies.action_costs import WEIGHT, ActionCost, ActionCosts
from elastic.controller.policies.group_costs import priced
from elastic.controller.sensors.sliding_window import moving_average
from elastic.errors import RankLost, StateError
from elastic.memory.rate_limit import YieldingPace
from elastic.planning.pipeline.chunk_cost import Chunk, ModelCost
from elastic.planning.pipeline.step_time import StepSeconds, shared_round_s
from elastic.types import MigrateKV

PRIOR = ActionCosts().by_kind[MigrateKV]
HOP_S = 3e-4
"""Seconds for the hidden states of a step to go from one rank to the next, before any did: at the least."""
Change = tuple[Shape, Shape]
"""A group as it is, and as it is to be."""
Copied = Literal["kv", "weights"]
Wanted = tuple[Sequence[str], Callable[[Shape], Shape]]
"""Ranks that are one group, and what of its shape is to be made."""


class _Kind(NamedTuple):
    """Of copies that take alike."""

    what: Copied
    coordinated: bool
    apart: bool
    """Whether all layers come home, to ranks that wait for others meanwhile."""


class DryRuns:
    """What changes of groups would come to, and their prices; nothing is done."""

    def __init__(self, ranks: Ranks, log: EventLog) -> None:
        self._ranks, self._log = ranks, log
        self._byte_s: dict[_Kind, float] = {}  # beside steps

    def learn(self, form: ExchangeForm, target: Shape, what: Copied, nbytes: int, seconds: float) -> None:
        """Know what copies took in an exchange that is done."""
        if nbytes:
            kind, byte_s = _Kind(what, form.coordinated, target.apart), seconds / nbytes
            self._byte_s[kind] = moving_average(self._byte_s.get(kind, byte_s), byte_s, WEIGHT)

    def of(self, wanted: Sequence[Wanted], form: ExchangeForm) -> tuple[Exchanged, int]:
        """Return what would come of these changes, and the bytes of weights that would leave.

        `deferred` where a rank says that it could not drop what is to leave it.
        Weights are counted as they are. Keys and values are those that requests have now, or that are kept for reuse.
        Where there is room for fewer layers at a time than the form says, there are more pauses than are counted.
        """
        rooms = self._ranks.measure(name for members, _ in wanted for name in members)
        changes = [_change(shape_of(members, rooms), target_of) for members, target_of in wanted]
        try:
            for now, target in changes:
                require_droppable(self._ranks, now.leaving(target))
        except RankLost:
            raise
        except StateError as error:
            return Exchanged("deferred", why=str(error)), 0
        cost, (before_s, slower) = learned_cost(self._log.events()), self._steps(changes, rooms)
        leaving = sum(weight_bytes(rooms, now, target) for now, target in changes)
        fetched = sum(weight_bytes(rooms, target, now) for now, target in changes)
        whole = {rank: rooms[rank] for _, target in changes if not target.apart for rank in target.members}
        coming = fetched + sum(room.growth_pages * room.page_bytes for room in whole.values())
        copied = kv_bytes(changes, rooms)
        flips = sum(_pauses(*change, form.layers_per_step).total() for change in changes)
        apart = all(target.apart for _, target in changes)
        copying_s = self._copying_s({"kv": copied, "weights": coming}, form, apart=apart, beside=before_s > 0)
        price = priced(leaving - coming, coming + copied, copying_s, flips, cost.pause_s, slower)
        waits = sum(step_waits(*change, form) for change in changes if flips_between(*change))
        done = Exchanged(
            "planned",
            sum(len(flips_between(*change)) for change in changes),
            copied,
            fetched,
            seconds=copying_s + cost.pause_s * price.flips + before_s * waits,
            restored=restored_first(whole),
            price=price,
        )
        return done, leaving

    def _copying_s(self, copies: Mapping[Copied, int], form: ExchangeForm, *, apart: bool, beside: bool) -> float:
        """Return the seconds of copies of so many bytes: beside steps as earlier ones had them, else at full speed."""
        if not beside:
            return PRIOR.byte_s * sum(copies.values())
        prior_s = PRIOR.byte_s * (1 + YieldingPace.PATIENCE if form.coordinated else 1)
        return sum(
            self._byte_s.get(_Kind(what, form.coordinated, apart), prior_s) * nbytes for what, nbytes in copies.items()
        )

    def _steps(self, changes: Sequence[Change], rooms: Mapping[str, Room]) -> tuple[float, float]:
        """Return the seconds of the slowest group's steps now, and the share by which steps are longer afterwards.

        With what instances' next steps have.
        """
        dispatcher = self._ranks.dispatcher
        with dispatcher.lock:
            there = dispatcher.instances
            model = next((instance.hello.cost for instance in there.values() if instance.hello.cost is not None), None)
            running = {name: instance.decoding() for name, instance in there.items()}
        before_s = slowest_s([now for now, _ in changes], next_steps(rooms, model, running), _hop_s(rooms))
        return before_s, slowdown(changes, rooms, model, running)


def shape_of(members: Sequence[str], rooms: Mapping[str, Room]) -> Shape:
    """Return the shape of a group, as its ranks say. Raises `RankLost` where one goes by a rank that is in none."""
    for name in members:
        if gone := [helper for helper in rooms[name].path.helpers if helper not in members]:
            raise RankLost(
                f"rank {name!r} goes by rank {gone[0]!r}, which is not there any more, and is being repaired; "
                "try again when it is by itself, or has ended",
                rank=gone[0],
            )
    return Shape({name: rooms[name].path for name in members}, {name: rooms[name].resident for name in members})


def _change(now: Shape, target_of: Callable[[Shape], Shape]) -> Change:
    """Return a change; requests go by as many copies of the layers as there are to be before it, all alike yet."""
    target = target_of(now)
    pairs = {home: (path, target.paths[home].copies) for home, path in now.paths.items()}
    paths = {home: path.with_copies(n) if n > path.copies else path for home, (path, n) in pairs.items()}
    return replace(now, paths=paths), target


def step_waits(now: Shape, target: Shape, form: ExchangeForm) -> int:
    """Count the steps for whose end a change waits, where there is room for all layers at once.

    For what lives to fit its cap, a connection to open, and to close; in each round of flips for an exchange to begin,
    for room at the target, and for the flip. Instances that stand still are waited for once.
    """
    around = 1 + now.apart + target.apart
    rounds = max(_pauses(now, target, form.layers_per_step).values())
    return around + (3 * rounds if form.exchange == "live" else 1)


def restored_first(rooms: Mapping[str, Room]) -> dict[str, tuple[int, ...]]:
    """Return the layers of ranks that are in a variant: they return to their full weights before any change."""
    return {rank: tuple(sorted(room.in_variant)) for rank, room in rooms.items() if room.in_variant}


def _pauses(now: Shape, target: Shape, layers_per_step: int | None) -> Counter[str]:
    """Count the pauses of each instance for its flips: at one no rank both gives and gets some."""
    layers: dict[tuple[str, bool], set[int]] = {}
    for flip in flips_between(now, target):
        layers.setdefault((flip.home, flip.source == flip.home), set()).add(flip.shards[0] // now.shards)
    pauses = Counter[str]()
    for (home, _), each in layers.items():
        pauses[home] += -(-len(each) // (layers_per_step or len(each)))
    return pauses


def kv_bytes(changes: Sequence[Change], rooms: Mapping[str, Room]) -> int:
    """Return the bytes of keys and values in shards that change their rank: of requests, or kept for reuse.

    Of several copies of the layers each has those of an equal share of the requests.
    """
    nbytes = 0
    for now, target in changes:
        for flip in flips_between(now, target):
            room = rooms[flip.home]
            there = room.parts_of(now.paths[flip.home].shards_of(flip.target))
            moved = sum(room.held_bytes[part] for part in set(room.parts_of(flip.shards)).difference(there))
            nbytes += moved // now.paths[flip.home].copies
    return nbytes


def slowdown(
    changes: Sequence[Change],
    rooms: Mapping[str, Room],
    model: ModelCost | None,
    running: Mapping[str, Sequence[Chunk]],
) -> float:
    """Return the share by which the steps of the slowest group are longer afterwards; 0.0 where nothing runs.

    `running`: of each instance, what its next step has. Each has one step in flight, and a hop takes as long as ranks
    saw, or `HOP_S` where none has seen any. `model` is what a rank has measured of it. Where none has, a step takes as
    long as ranks saw it, see `seen_steps`, and none is said to become shorter: what ranks that share layers all have to
    compute is not known.
    """
    steps = next_steps(rooms, model, running)
    hop_s = _hop_s(rooms)
    before_s, after_s = (slowest_s([change[i] for change in changes], steps, hop_s) for i in (0, 1))
    slower = after_s / before_s - 1 if before_s > 0 else 0.0
    return slower if model is not None else max(0.0, slower)


def slowest_s(shapes: Iterable[Shape], steps: Mapping[str, StepSeconds], hop_s: float) -> float:
    """Return the seconds of a step of the slowest of these groups; 0.0 where nothing runs."""
    return max((_round_s(shape, steps, hop_s) for shape in shapes), default=0.0)


def next_steps(
    rooms: Mapping[str, Room], model: ModelCost | None, running: Mapping[str, Sequence[Chunk]]
) -> dict[str, StepSeconds]:
    """Return what the next steps of instances that have work take; see `slowdown`."""
    if model is None:
        return seen_steps(rooms, running)
    batches = ((home, chunks) for home, chunks in running.items() if chunks)
    return {home: StepSeconds(model.layer.batch(chunks), model.rest.batch(chunks)) for home, chunks in batches}


def seen_steps(rooms: Mapping[str, Room], running: Mapping[str, Sequence[Chunk]]) -> dict[str, StepSeconds]:
    """Return what steps take of instances that have work, as their ranks saw the last that each computed by itself.

    They may have had more requests, or prompts; what is around the layers counts as theirs. Of an instance whose rank
    has computed none nothing is known.
    """
    return {
        home: StepSeconds(room.step_s / room.path.layers)
        for home, room in rooms.items()
        if room.step_s and running.get(home)
    }


def _hop_s(rooms: Mapping[str, Room]) -> float:
    """Return the seconds of a hop: the mean of what ranks have seen, of which a slower one waits for less."""
    seen = [room.hop_s for room in rooms.values() if room.hop_s]
    return math.fsum(seen) / len(seen) if seen else HOP_S


def _round_s(shape: Shape, steps: Mapping[str, StepSeconds], hop_s: float) -> float:
    copies = {home: path.copies * shape.shards for home, path in shape.paths.items()}
    layers_at = {r: {home: len(at) / copies[home] for home, at in shape.shards_at(r).items()} for r in shape.members}
    hops = {home: max(path.of_copy(copy).hops for copy in range(path.copies)) for home, path in shape.paths.items()}
    depth = {home: path.depth for home, path in shape.paths.items()}
    return shared_round_s(steps, layers_at, hops, hop_s, depth)


EXCHANGES: tuple[EventKind, ...] = ("dropped", "restored", "migrated", "resharded")


def learned_cost(events: Iterable[FleetEvent], kinds: Collection[EventKind] = EXCHANGES) -> ActionCost:
    """Return the cost of a pause, and of a byte that was copied, as events of these kinds had them so far."""
    cost = PRIOR
    for event in events:
        if event.kind in kinds:
            seen = (event.copy_s / event.moved_bytes if event.moved_bytes else 0.0, event.stalled_ms / 1e3)
            pairs = zip((cost.byte_s, cost.pause_s), seen, strict=True)
            cost = ActionCost(*(moving_average(average, value or average, WEIGHT) for average, value in pairs))
    return cost


def weight_bytes(rooms: Mapping[str, Room], shape: Shape, other: Shape) -> int:
    """Return the weights that ranks have in one shape and not in another."""
    return sum(
        (rooms[rank].weights_of(shards) - rooms[rank].weights_of(shards & other.weights[rank])) * rooms[rank].page_bytes
        for rank, shards in shape.weights.items()
    )
