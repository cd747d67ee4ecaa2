"""Which groups of instances merge, and which layers each rank drops, to free memory for keys and values.

KunServe, section 4.1, figure 6: the two groups of fewest instances merge until enough is freed, as latency grows with
the stages of a pipeline. `whole=True` is that. The default frees by layers: what is held twice within a group goes
first, and of the last merge only as many layers as are needed. It also divides the same number of merges so that the
largest group is as small as it can be: six instances that are to become two groups are 3 + 3, where figure 6 ends with
4 + 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

from elastic.errors import ConfigError
from elastic.planning.arrangement.stages import Held, StageCut, stages

PlannedGroup = Sequence[Held]
"""Instances that serve requests together, and that have a copy of every layer together; at first one by itself."""


@dataclass(frozen=True)
class GroupPlan:
    """A group as it will be."""

    groups: tuple[int, ...]
    """Which of the groups that were given merge into it; one: it drops what it holds twice."""
    members: tuple[str, ...]
    keeps: tuple[tuple[int, ...], ...]
    """Of each member, the layers that it has then; with those that it has to fetch."""
    stages: tuple[range, ...]
    """Of each member, the layers that it will have when nothing is held twice any more."""
    freed_bytes: int
    fetched_bytes: int = 0


@dataclass(frozen=True)
class DropPlan:
    """The groups that change; the others stay as they are."""

    groups: tuple[GroupPlan, ...]
    freed_bytes: int


def drop_plan(
    groups: Sequence[PlannedGroup],
    layer_bytes: Sequence[int],
    needed: int,
    *,
    whole: bool = False,
    most: int | None = None,
) -> DropPlan | None:
    """Plan drops that free `needed` bytes. None: no plan does, then other remedies are left, and more instances.

    `layer_bytes` are of the decoder layers: what a stage pays for each, too. No group becomes larger than `most`
    instances (None: than the model has layers). Ties are broken by the order of `groups`. Raises `ConfigError` for a
    group that has not every layer.
    """
    copies = [_copies(group, len(layer_bytes), number) for number, group in enumerate(groups)]
    held_bytes = [sum(n * layer_bytes[layer] for layer, n in held.items()) for held in copies]
    model, limit = sum(layer_bytes), min(most or len(layer_bytes), len(layer_bytes))
    if needed > sum(held_bytes) - model:  # one copy of all must stay
        return None
    sizes = list(map(len, groups))
    merge = merge_smallest if whole else merge_evenly
    parts = merge(sizes, needed, held_bytes, model, limit)
    if parts is None:
        return None
    plans: list[GroupPlan] = []
    planner = _Planner(layer_bytes)
    freed_bytes = 0
    for part in parts:
        members = tuple(held for number in part for held in groups[number])
        plan = planner.plan(part, members, None if whole else needed - freed_bytes)
        if plan is None:
            return None
        freed_bytes += plan.freed_bytes
        plans.append(plan)
    return DropPlan(tuple(plans), freed_bytes) if freed_bytes >= needed else None


Parts = list[tuple[int, ...]]
"""The groups that merge with each other, by number; one by itself drops what it holds twice."""


def merge_smallest(sizes: Sequence[int], needed: int, held_bytes: Sequence[int], model: int, most: int) -> Parts | None:
    """Merge the two groups of fewest instances until enough is freed. (Figure 6)

    `held_bytes` are of the layers of each group, `model` of all layers once: so many a merged group holds. None: one
    group is left, or the next would have more than `most` instances.
    """
    queue: list[tuple[int, int, tuple[int, ...], int]] = [
        (size, number, (number,), held) for number, (size, held) in enumerate(zip(sizes, held_bytes, strict=True))
    ]
    heapify(queue)
    freed = 0
    while freed < needed:
        if len(queue) < 2 or queue[0][0] + min(queue[1:3])[0] > most:
            return None
        size, number, part, held = heappop(queue)
        other_size, _, other, other_held = heappop(queue)
        freed += held + other_held - model  # what both have: all layers, as both are complete
        heappush(queue, (size + other_size, number, (*part, *other), model))
    return sorted(part for _, _, part, _ in queue if len(part) > 1)


def merge_evenly(sizes: Sequence[int], needed: int, held_bytes: Sequence[int], model: int, most: int) -> Parts | None:
    """Merge so that enough is freed and the largest merged group has as few instances as possible.

    What groups hold twice by themselves goes first: it makes no pipeline longer. None: no merge frees as much within
    `most` instances.
    """
    twice = sorted((sizes[number], number) for number, held in enumerate(held_bytes) if held > model)
    alone: Parts = []
    for _, number in twice:
        if needed <= 0:
            break
        alone.append((number,))
        needed -= held_bytes[number] - model
    merges = -(-needed // model)
    if merges <= 0:
        return alone
    merged = merge_smallest(sizes, merges, [1] * len(sizes), 1, most)  # each merge frees one model
    low, high = (
        2 * min(sizes, default=1),
        most + 1 if merged is None else max(sum(sizes[n] for n in part) for part in merged),
    )
    while low < high:  # the least size that suffices
        middle = (low + high) // 2
        packed = _packed(sizes, merges, middle)
        if packed is None:
            low = middle + 1
        else:
            merged, high = packed, middle
    if merged is None:
        return None
    absorbed = {number for part in merged for number in part}
    return [*(part for part in alone if part[0] not in absorbed), *sorted(merged, key=lambda part: (len(part), part))]


def _packed(sizes: Sequence[int], merges: int, most: int) -> Parts | None:
    """Merge groups, the largest first, each into the fullest merged group that it fits in, if that is enough merges."""
    by_room: dict[int, list[list[int]]] = {room: [] for room in range(most + 1)}
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[number]
        if size > most:
            continue
        room = next((room for room in range(size, most + 1) if by_room[room]), None)
        part = by_room[room].pop(0) if room is not None else []
        part.append(number)
        by_room[(most if room is None else room) - size].append(part)
    parts = sorted((part for parts in by_room.values() for part in parts), key=lambda part: (-len(part), sorted(part)))
    packed: Parts = []
    for part in parts:
        if merges <= 0:
            break
        taken = sorted(part, key=lambda number: (sizes[number], number))[: merges + 1]
        merges -= len(taken) - 1
        packed.append(tuple(sorted(taken)))
    return packed if merges <= 0 else None


class _Planner:
    """Says what the members of a merged group keep; groups alike are worked out once."""

    def __init__(self, layer_bytes: Sequence[int]) -> None:
        self._layer_bytes = layer_bytes
        self._cuts: dict[tuple[object, ...], StageCut | None] = {}
        self._kept: dict[tuple[object, ...], list[frozenset[int]]] = {}

    def plan(self, part: tuple[int, ...], members: tuple[Held, ...], needed: int | None) -> GroupPlan | None:
        """Plan one group that frees `needed` bytes, or all that it holds twice; with None every layer has one holder.

        None: no stages leave each member enough room.
        """
        alike = tuple((held.layers, held.room_bytes, held.kv_bytes, held.slowness) for held in members)
        if alike not in self._cuts:
            self._cuts[alike] = stages(members, self._layer_bytes, self._layer_bytes)
        cut = self._cuts[alike]
        if cut is None:
            return None
        held_bytes = sum(self._bytes(held.layers) for held in members)
        if needed is None:
            kept = [frozenset(run) for run in cut.layers]
        elif needed >= held_bytes - sum(self._layer_bytes):
            key = (*(held.layers for held in members), cut.layers)
            if key not in self._kept:
                self._kept[key] = self._thinned(members, cut, needed)
            kept = self._kept[key]
        else:
            kept = self._thinned(members, cut, needed)
        freed_bytes = held_bytes - sum(map(self._bytes, kept))
        names = tuple(held.name for held in members)
        fetched_bytes = cut.fetched_bytes if needed is None else 0
        if needed is not None and not self._fits(members, kept, cut):
            return None
        return GroupPlan(part, names, tuple(tuple(sorted(k)) for k in kept), cut.layers, freed_bytes, fetched_bytes)

    def _bytes(self, layers: Iterable[int]) -> int:
        return sum(self._layer_bytes[layer] for layer in layers)

    def _thinned(self, members: Sequence[Held], cut: StageCut, needed: int) -> list[frozenset[int]]:
        """Drop layers that others hold, too, until `needed` bytes are free and each member has room for what comes.

        The member that has freed least is next, with the layer that is farthest from its stage: so a request that is
        half way through its layers goes to another member once.
        """
        kept = [set(held.layers) for held in members]
        copies = Counter(layer for held in members for layer in held.layers)
        queues = [
            sorted(held.layers.difference(run), key=partial(_distance, run))
            for held, run in zip(members, cut.layers, strict=True)
        ]
        freed = [(0, number) for number in range(len(members))]
        while freed and (needed > 0 or not self._fits(members, kept, cut)):
            nbytes, number = heappop(freed)
            while queues[number] and copies[queues[number][-1]] < 2:
                queues[number].pop()
            if not queues[number]:
                continue
            layer = queues[number].pop()
            kept[number].remove(layer)
            copies[layer] -= 1
            needed -= self._layer_bytes[layer]
            heappush(freed, (nbytes + self._layer_bytes[layer], number))
        return [frozenset(layers) for layers in kept]

    def _fits(self, members: Sequence[Held], kept: Sequence[Collection[int]], cut: StageCut) -> bool:
        """Tell whether every member has room for what it keeps, its keys and values, and those that come to it."""
        if all(held.room_bytes is None for held in members):
            return True
        for owner, (held, layers, run) in enumerate(zip(members, kept, cut.layers, strict=True)):
            nbytes = self._bytes(layers) + sum(held.kv_bytes[layer] for layer in layers if held.kv_bytes)
            for number, other in enumerate(members):
                if number != owner and other.kv_bytes:
                    nbytes += sum(other.kv_bytes[layer] for layer in run if layer not in kept[number])
            if held.room_bytes is not None and nbytes > held.room_bytes:
                return False
        return True


def _distance(run: range, layer: int) -> int:
    return max(run.start - layer, layer - run.stop + 1)


def _copies(group: PlannedGroup, layers: int, number: int) -> Counter[int]:
    """Return how many members hold each layer. Raises `ConfigError` if none holds one."""
    held = Counter(layer for member in group for layer in member.layers)
    missing = [layer for layer in range(layers) if not held[layer]]
    if missing or len(held) > layers:
        names = [member.name for member in group]
        wrong = f"lacks the layers {missing}" if missing else f"holds layers beyond the model's {layers}"
        raise ConfigError(f"group {number} of {names} {wrong}; its members must have every layer together")
    return held
