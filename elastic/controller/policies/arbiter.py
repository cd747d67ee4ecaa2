"""Several policies at once: of what they would do against a shortage, the cheapest that suffices is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.controller.decision import ControllerPolicy, Plan
from elastic.controller.policies.action_costs import ActionCosts
from elastic.controller.policies.precision_steps import LayerSize
from elastic.controller.snapshot import Snapshot
from elastic.planning.cost_model import CostModel, cost
from elastic.planning.placement import Placement, ResourceDemand
from elastic.types import Action, Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Swap


@dataclass(frozen=True)
class CostWeights:
    """What things are worth, in seconds of serving."""

    disturbance: float = 0.05
    """Share of serving that is lost while bytes are copied beside it."""
    horizon_s: float = 30.0
    """For how long a slower or faster step is counted."""
    quality_s: float = 5.0
    """For one layer whose bytes were all quantized away; half of them: half of it."""
    streaming: float = 1.0
    """By what share of a step a released layer makes it longer, for each share of the layers that it is."""
    kv_target: float = 0.75
    """Use of the KV capacity that a remedy has to lead to, to suffice."""


@dataclass(frozen=True)
class Candidate:
    """What one policy would do, with its price."""

    plan: Plan
    policy: int
    seconds: float
    """Of serving, that it costs."""
    moved_bytes: int
    relieved_bytes: int
    """That the KV cache gains."""


@dataclass(frozen=True)
class ArbiterState:
    """The states of the policies, and what prices were seen."""

    states: tuple[Any, ...]
    prices: ActionCosts


class Arbiter:
    """`sizes` and `needs` are of all decoder layers; `model` makes the cost model for so many rows. Pure.

    A policy may offer several plans by a method `options(snapshot, state)`; its `decide` is used else. One that is not
    chosen is told that an action is under way, so it remembers nothing that did not happen.
    """

    def __init__(
        self,
        policies: Sequence[ControllerPolicy],
        sizes: Sequence[LayerSize],
        needs: Sequence[ResourceDemand],
        model: Callable[[int], CostModel],
        rates: CostWeights | None = None,
    ) -> None:
        self.policies = tuple(policies)
        self.rates = rates or CostWeights()
        self.tick_s = min(float(getattr(policy, "tick_s", 0.1)) for policy in policies)
        self._sizes, self._needs, self._model = tuple(sizes), tuple(needs), model

    def decide(self, snapshot: Snapshot, state: ArbiterState | None = None) -> Plan:
        """What to do now; the plan's `state` is what it wants to be given at the next tick."""
        state = state or ArbiterState((None,) * len(self.policies), ActionCosts())
        prices = state.prices.learned(snapshot.events)
        offers = [_options(policy, snapshot, own) for policy, own in zip(self.policies, state.states, strict=True)]
        short = any(plan.short for plans in offers for plan in plans) or self._swapped(snapshot)
        return replace(self._decide(snapshot, state, offers, prices), short=short)

    def _decide(
        self, snapshot: Snapshot, state: ArbiterState, offers: Sequence[tuple[Plan, ...]], prices: ActionCosts
    ) -> Plan:
        asking = next((plans[0] for plans in offers if plans[0].asks), None)
        if asking is not None:  # guests leave before anything is done here
            return replace(asking, state=ArbiterState(self._states(snapshot, state, offers), prices))
        bids = [
            self._bid(plan, number, snapshot, prices)
            for number, plans in enumerate(offers)
            for plan in plans
            if plan.actions and _possible(plan, snapshot)
        ]
        chosen, why = self._choose(bids, snapshot)
        if chosen is None:
            states = self._states(snapshot, state, offers)
            figures = "; ".join(plans[0].figures for plans in offers if plans[0].figures)
            return Plan((), _together(plans[0].reason for plans in offers), ArbiterState(states, prices), figures)
        kept = self._unchosen(snapshot, state.states)
        states = tuple(chosen.plan.state if i == chosen.policy else other for i, other in enumerate(kept))
        return Plan(chosen.plan.actions, chosen.plan.reason + why, ArbiterState(states, prices), chosen.plan.figures)

    def _states(self, snapshot: Snapshot, state: ArbiterState, offers: Sequence[tuple[Plan, ...]]) -> tuple[Any, ...]:
        """What the policies remember where nothing is done."""
        if not any(plans[0].actions for plans in offers):
            return tuple(plans[0].state for plans in offers)
        pairs = zip(offers, self._unchosen(snapshot, state.states), strict=True)
        return tuple(other if plans[0].actions else plans[0].state for plans, other in pairs)

    def _swapped(self, snapshot: Snapshot) -> bool:
        """Whether layers are to return that are in a variant, or in host memory."""
        return any(form != size.full for form, size in zip(snapshot.layers, self._sizes, strict=True))

    def _unchosen(self, snapshot: Snapshot, states: Sequence[Any]) -> list[Any]:
        """What the policies remember where another one acts."""
        occupied = replace(snapshot, busy=True)
        return [policy.decide(occupied, own).state for policy, own in zip(self.policies, states, strict=True)]

    def _choose(self, bids: Sequence[Candidate], snapshot: Snapshot) -> tuple[Candidate | None, str]:
        """The bid, and what to say about it."""
        if not any(_relieves(bid.plan, snapshot) for bid in bids):  # layers return before memory goes to replicas
            return min(bids, key=lambda bid: not isinstance(bid.plan.actions[0], Restore), default=None), ""
        relief = [bid for bid in bids if _relieves(bid.plan, snapshot) or isinstance(bid.plan.actions[0], Replicate)]
        if len(relief) == 1:
            return relief[0], ""
        missing = _missing_bytes(snapshot, self.rates)
        enough = [bid for bid in relief if bid.relieved_bytes >= missing]
        best = min(enough or relief, key=lambda bid: (bid.seconds if enough else _each(bid), bid.policy))
        words = "the cheapest that suffices" if enough else "the cheapest for its bytes; none suffices"
        return best, f"; {words}: {best.seconds:.3g} s of {len(relief)} remedies"

    # -- prices

    def _bid(self, plan: Plan, policy: int, snapshot: Snapshot, prices: ActionCosts) -> Candidate:
        moved = sum(self.moved_bytes(action) for action in plan.actions)
        seconds = math.fsum(self.seconds(action, snapshot, prices) for action in plan.actions)
        return Candidate(plan, policy, seconds, moved, sum(self.relieved_bytes(a, snapshot) for a in plan.actions))

    def moved_bytes(self, action: Action) -> int:
        """Bytes that an action copies."""
        if isinstance(action, Swap):
            return sum(self._sizes[layer].nbytes(action.variant) for layer in action.layers)
        if isinstance(action, Migrate | Replicate | Restore):
            return sum(self._needs[layer].nbytes for layer in action.layers)
        return 0

    def relieved_bytes(self, action: Action, snapshot: Snapshot) -> int:
        """What the KV cache gains where memory is short."""
        if isinstance(action, Swap):
            sizes = [(self._sizes[layer], snapshot.layers[layer]) for layer in action.layers]
            known = [(size, form) for size, form in sizes if form == size.full or form in size.variants]
            return sum(size.nbytes(form) - size.nbytes(action.variant) for size, form in known)
        if isinstance(action, Migrate | Evict | Release):
            return sum(self._needs[layer].nbytes for layer in action.layers)
        if isinstance(action, MigrateKV) and snapshot.residencies:
            own = snapshot.residencies[action.layers[0]][0]
            here = sum(places[0] == own for places in snapshot.residencies)
            used = sum(place.kv_used_bytes for place in snapshot.places if place.name == own)
            return used * len(action.layers) // max(1, here)
        return 0

    def seconds(self, action: Action, snapshot: Snapshot, prices: ActionCosts) -> float:
        """Seconds of serving that an action costs: copying, pausing, quality, and the steps after it."""
        price, rates = prices.of(type(action)), self.rates
        found = rates.disturbance * price.byte_s * self.moved_bytes(action) + price.pause_s
        if isinstance(action, Swap):
            lost = [
                1 - self._sizes[layer].nbytes(action.variant) / self._sizes[layer].full_bytes for layer in action.layers
            ]
            found += rates.quality_s * math.fsum(lost)
        return found + rates.horizon_s * self._slower(action, snapshot)

    def _slower(self, action: Action, snapshot: Snapshot) -> float:
        """By what share steps are longer afterwards; below zero: shorter."""
        if isinstance(action, Release):
            return self.rates.streaming * len(action.layers) / len(snapshot.layers)
        if not snapshot.residencies or isinstance(action, ResizeKV):
            return 0.0
        before = Placement(snapshot.residencies)
        model = self._model(max(1, snapshot.traffic.running))
        return cost(model, after(before, action)) / cost(model, before) - 1


def after(placement: Placement, action: Action) -> Placement:
    """Where layers are when an action is done."""
    if isinstance(action, Migrate) and not action.parts:
        return placement.moved(action.layers, action.place)
    if isinstance(action, Replicate):
        return placement.with_replicas(action.layers, action.place)
    if isinstance(action, Evict):
        return placement.without_replicas(action.layers, action.place)
    return placement


def _options(policy: ControllerPolicy, snapshot: Snapshot, state: Any) -> tuple[Plan, ...]:
    offer = getattr(policy, "options", None)
    return tuple(offer(snapshot, state)) if callable(offer) else (policy.decide(snapshot, state),)


def _possible(plan: Plan, snapshot: Snapshot) -> bool:
    """Layers with replicas are not swapped: these leave first."""
    swapped = [i for action in plan.actions if isinstance(action, Swap) for i in action.layers]
    return not snapshot.residencies or all(len(snapshot.residencies[i]) == 1 for i in swapped)


def _relieves(plan: Plan, snapshot: Snapshot) -> bool:
    """Whether a plan is against a shortage; without one there are only restores, replicas and wider limits."""
    first = plan.actions[0]
    if isinstance(first, ResizeKV):
        limit = first.limit_bytes
        most = next((p.kv_maximum_bytes for p in snapshot.places if p.name == first.place), 0)
        return limit is not None and limit < most
    return not isinstance(first, Restore | Replicate)


def _missing_bytes(snapshot: Snapshot, rates: CostWeights) -> float:
    """What the KV cache needs more, over all places."""
    return max(0.0, snapshot.kv.used_bytes / rates.kv_target - snapshot.kv.capacity_bytes)


def _each(bid: Candidate) -> float:
    """Seconds for each byte that it relieves."""
    return bid.seconds / bid.relieved_bytes if bid.relieved_bytes > 0 else math.inf


def _together(reasons: Iterable[str]) -> str:
    """Every reason once."""
    return "; ".join(dict.fromkeys(reasons))
