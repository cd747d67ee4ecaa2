"""Layers of single ranks that become smaller against an overload, and return after it: what costs quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.cluster.control.messages import RuntimeView
from elastic.cluster.fleet.rank_verbs import RankVerbs
from elastic.config import Overload
from elastic.controller.fleet_snapshot import FleetSnapshot, GroupReading
from elastic.controller.policies.action_costs import ActionCosts
from elastic.controller.policies.arbiter import DISTURBANCE, QUALITY_S
from elastic.controller.remedies import Offer
from elastic.errors import ElasticError
from elastic.types import DROPPED, HOST, PlanStep, Restore, Swap

SETTLE_S = 0.5
"""How long ranks may take to say what room they have after a swap."""


@dataclass(frozen=True)
class SwapPlan:
    """Layers of some ranks that go to a variant."""

    swaps: Mapping[str, Swap]
    """By rank."""
    freed_bytes: Mapping[str, int]
    """By rank; the most that its KV cache gains."""
    offer: Offer


@dataclass
class _Swapped:
    """What was done at a rank."""

    layers: tuple[int, ...]
    freed_bytes: int
    at_s: float
    eased: int = 0
    """Ticks in a row in which its layers could have returned."""


class Swaps:
    """Plans, does and undoes swaps of instances that compute all of their layers themselves. One thread's at a time.

    Those of which ranks were wrapped with no variants have none. Of several variants it is the last.
    """

    def __init__(self, verbs: RankVerbs, settings: Overload) -> None:
        self._verbs, self._settings = verbs, settings
        self.done: dict[str, _Swapped] = {}
        """Of the ranks of which layers are in a variant: they drop none until these are back."""
        self.settled_s = -math.inf
        """Until then a rank may not have said yet what a swap gave it."""

    def plan(self, snapshot: FleetSnapshot) -> SwapPlan | None:
        """Plan as few layers as suffice, of instances that are short first; None: there are none.

        What waits at the fleet may go to any of them. The price is that of a swap in one model: copying, a pause for
        each rank, and the quality of what is quantized away.
        """
        queued = max(0, snapshot.queued_bytes - sum(group.free_bytes for group in snapshot.groups))
        swaps, freed, seconds, relieved = dict[str, Swap](), dict[str, int](), 0.0, 0
        for group in sorted(snapshot.groups, key=lambda group: group.short_bytes, reverse=True):
            wanted = group.short_bytes + queued
            if len(group.members) > 1 or group.busy or not wanted:
                continue
            (rank,) = group.names
            swap = self._swap(rank, wanted, snapshot.layer_bytes)
            if swap is not None:
                swaps[rank], freed[rank], price = swap
                seconds, gained = seconds + price, min(wanted, freed[rank])
                relieved, queued = relieved + gained, queued - max(0, gained - group.short_bytes)
        return SwapPlan(swaps, freed, Offer("swap", seconds, relieved, lossless=False)) if swaps else None

    def do(self, plan: SwapPlan, now_s: float, why: str) -> tuple[str, ...]:
        """Swap, and return the ranks. Raises what a rank raises; those before it keep what was done."""
        for rank, swap in plan.swaps.items():
            self._verbs.apply(rank, (swap,), why=why)
            before = self.done.get(rank)
            layers, freed_bytes = (before.layers, before.freed_bytes) if before else ((), 0)
            self.done[rank] = _Swapped((*layers, *swap.layers), freed_bytes + plan.freed_bytes[rank], now_s)
            self.settled_s = now_s + SETTLE_S
        return tuple(plan.swaps)

    def restore(self, snapshot: FleetSnapshot) -> tuple[str, ...]:
        """Have layers return where their memory is needed no more, as dropped ones do; return the ranks.

        Nothing waits, and what live requests have is at most `restore_below` of the cache that will be left, for
        `recovery_ticks` ticks, `dwell_s` after the swap at least.
        """
        if not self.done:
            return ()
        alone = {group.names[0]: group for group in snapshot.groups if len(group.members) == 1}
        there = {name for group in snapshot.groups for name in group.names}
        self.done = {rank: done for rank, done in self.done.items() if rank in there}
        returned = []
        for rank, done in list(self.done.items()):
            eased = rank in alone and not snapshot.queued_bytes and self._is_eased(alone[rank], done)
            done.eased = done.eased + 1 if eased else 0
            if done.eased < self._settings.recovery_ticks or snapshot.at_s - done.at_s < self._settings.dwell_s:
                continue
            self._verbs.apply(rank, (Restore(done.layers),), why="the overload has gone")
            del self.done[rank]
            returned.append(rank)
        return tuple(returned)

    def _is_eased(self, group: GroupReading, done: _Swapped) -> bool:
        if group.busy or group.waiting_bytes:
            return False
        return group.committed_bytes <= self._settings.restore_below * (group.capacity_bytes - done.freed_bytes)

    def _swap(self, rank: str, wanted: int, layer_bytes: Sequence[int]) -> tuple[Swap, int, float] | None:
        """Return the swap of a rank that frees so much, or else the most, with its bytes and price; None: it has none.

        Layers are taken from the last one on.
        """
        try:
            view = self._verbs.look(rank)
            steps = self._steps(rank, view)
        except ElasticError:  # it has gone, or cannot swap: the other offers stand
            return None
        page_bytes = {place.name: place.page_bytes for place in view.status.places}
        homes = [own.place for own, *_ in view.status.residencies.values()]
        layers, freed, moved, lost = list[int](), 0, 0, 0.0
        for layer, step in reversed(steps):
            nbytes = step.released_pages * page_bytes.get(homes[layer], 0)
            if nbytes > 0 and freed < wanted:
                layers.append(layer)
                freed, moved, lost = freed + nbytes, moved + step.moved_bytes, lost + nbytes / layer_bytes[layer]
        if not layers:
            return None
        cost = ActionCosts().learned(view.events).by_kind[Swap]
        seconds = DISTURBANCE * cost.byte_s * moved + cost.pause_s + QUALITY_S * lost
        return Swap(tuple(sorted(layers)), view.variants[-1]), freed, seconds

    def _steps(self, rank: str, view: RuntimeView) -> list[tuple[int, PlanStep]]:
        """Ask what the swap of each layer would do that is here as a whole, in full precision, and nowhere else."""
        if not view.variants:
            return []
        whole = [
            layer
            for layer, homes in enumerate(view.status.residencies.values())
            if len(homes) == 1
            and homes[0].shard == "whole"
            and homes[0].place not in (HOST, DROPPED)
            and not set(homes[0].variant.split("+")).intersection(view.variants)
        ]
        actions = tuple(Swap((layer,), view.variants[-1]) for layer in whole)
        steps = self._verbs.apply(rank, actions, dry_run=True) if actions else ()
        return list(zip(whole, steps, strict=True))
