"""Several policies at once: of what they would do against a shortage, the cheapest that suffices is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.controller.decision import ControllerPolicy, Plan, checked, error_text
from elastic.controller.policies.action_costs import ActionCosts
from elastic.controller.policies.precision_steps import LayerSize
from elastic.controller.remedies import PricedRemedy, suited
from elastic.controller.snapshot import Snapshot
from elastic.errors import is_integer, require
from elastic.planning.cost_model import CostModel, cost
from elastic.planning.placement import Placement, ResourceDemand
from elastic.types import KINDS, Action, Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Swap

DISTURBANCE = 0.05
"""Share of serving that is lost while bytes are copied beside it."""
HORIZON_S = 30.0
"""Time for which a slower or faster step is counted."""
QUALITY_S = 5.0
"""Price of one layer whose bytes were all quantized away, in seconds of serving; half of them: half of it."""
STREAMING = 1.0
"""Share by which released layers make a step longer, for each share of the layers that they are."""
KV_TARGET = 0.75
"""Use of the KV capacity that a remedy has to lead to, to suffice."""


@dataclass(frozen=True)
class PricedPlan(PricedRemedy):
    """One plan of one policy, with its price."""

    plan: Plan
    policy: int
    seconds: float
    """Seconds of serving that it costs."""
    relieved_bytes: int
    """Bytes that the KV cache gains."""
    relieves: bool
    """True when it is against a shortage."""


@dataclass(frozen=True)
class PolicyOffer:
    """What one policy would do, or why that is nothing it could be asked for."""

    plans: tuple[Plan, ...]
    """At least one."""
    priced: tuple[PricedPlan, ...] = ()
    """Those of them that have actions, and are possible."""
    fault: str = ""


@dataclass(frozen=True)
class ArbiterState:
    """The states of the policies, and the costs of earlier actions."""

    states: tuple[Any, ...]
    costs: ActionCosts
    asked: tuple[Action, ...] = ()
    """What was asked for last, while nothing has been done since."""


class Arbiter:
    """Asks several policies, and does what the cheapest says. Pure.

    `sizes` and `needs` are of all decoder layers; `model` makes the cost model for a number of rows. A policy may offer
    several plans by a method `options(snapshot, state)`; else its `decide` is used. One that is not chosen is told that
    an action is under way, so it remembers nothing that did not happen. One that raises, or asks for what the model has
    not, offers nothing at this tick and keeps its state; the plan's `fault` has its name. What the runtime refused is
    passed over while there is another plan, until something has been done.
    """

    def __init__(
        self,
        policies: Sequence[ControllerPolicy],
        sizes: Sequence[LayerSize],
        needs: Sequence[ResourceDemand],
        model: Callable[[int], CostModel],
    ) -> None:
        self.policies = tuple(policies)
        self.tick_s = min(float(getattr(policy, "tick_s", 0.1)) for policy in policies)
        self._sizes, self._needs, self._model = tuple(sizes), tuple(needs), model

    def decide(self, snapshot: Snapshot, state: ArbiterState | None = None) -> Plan:
        """Return the plan for now; its `state` is to be given at the next tick."""
        state = state or ArbiterState((None,) * len(self.policies), ActionCosts())
        done = any(event.ok and event.id > state.costs.event for event in snapshot.events)
        asked, costs = () if done else state.asked, state.costs.learned(snapshot.events)
        states = zip(self.policies, state.states, strict=True)
        offers = [self._offer(i, policy, snapshot, remembered, costs) for i, (policy, remembered) in enumerate(states)]
        plans = [offer.plans[0] for offer in offers]
        swapped = any(variant != size.full for variant, size in zip(snapshot.layers, self._sizes, strict=True))
        short = swapped or any(plan.short for offer in offers for plan in offer.plans)
        asking = next((plan for plan in plans if plan.asks), None)  # nothing is done before guests leave
        candidates = [] if asking else [candidate for offer in offers for candidate in offer.priced]
        chosen, why = self._choose(snapshot, candidates, asked)
        if asking is not None:
            plan = asking
        elif chosen is not None:
            plan = replace(chosen.plan, reason=chosen.plan.reason + why)
        else:
            reason = "; ".join(dict.fromkeys(plan.reason for plan in plans))
            plan = Plan((), reason, figures="; ".join(plan.figures for plan in plans if plan.figures))
        then = [self._state(i, snapshot, old, offers[i], chosen) for i, old in enumerate(state.states)]
        errors = [*(offer.fault for offer in offers), *(error for _, error in then)]
        named = zip(self.policies * 2, errors, strict=True)
        faults = dict.fromkeys(f"{type(policy).__name__}: {error}" for policy, error in named if error)
        asked = chosen.plan.actions if chosen is not None else asked
        after = ArbiterState(tuple(remembered for remembered, _ in then), costs, asked)
        return replace(plan, state=after, short=short, fault="; ".join(faults))

    def _offer(
        self, number: int, policy: ControllerPolicy, snapshot: Snapshot, remembered: Any, costs: ActionCosts
    ) -> PolicyOffer:
        """Ask one policy, and check and price its plans: its faults are its own, the others are asked too."""
        try:
            options = getattr(policy, "options", None)
            asked = options(snapshot, remembered) if callable(options) else (policy.decide(snapshot, remembered),)
            plans = tuple(map(checked, asked))
            require(len(plans) > 0, "options", plans, "at least one plan")
            for plan in plans:
                self._require_possible(plan)
            return PolicyOffer(plans, self._priced(number, plans, snapshot, costs))
        except (Exception, SystemExit) as error:
            return PolicyOffer((Plan((), f"{type(policy).__name__} failed", remembered),), (), error_text(error))

    def _require_possible(self, plan: Plan) -> None:
        """Raise `ConfigError` for layers and variants that the model has not, and for none: they have no price."""
        for action in plan.actions:
            require(type(action) in KINDS, "actions", action, f"one of {', '.join(KINDS.values())}")
            if isinstance(action, Swap | Migrate | MigrateKV | Replicate | Evict):
                require(len(action.layers) > 0, "layers", action.layers, "one index of a layer or more")
            for layer in () if isinstance(action, ResizeKV) else action.layers:
                there = is_integer(layer) and 0 <= layer < len(self._sizes)
                require(there, "layers", layer, f"the index of a layer, from 0 to {len(self._sizes) - 1}")
            if isinstance(action, Swap):
                for size in (self._sizes[layer] for layer in action.layers):
                    variants = (size.full, *size.variants)
                    require(action.variant in variants, "variant", action.variant, f"one of {', '.join(variants)}")

    def _state(
        self, number: int, snapshot: Snapshot, remembered: Any, offer: PolicyOffer, chosen: PricedPlan | None
    ) -> tuple[Any, str]:
        """Return the state of a policy, and its fault: if its actions are not done, as if another's were under way."""
        if chosen is not None and number == chosen.policy:
            return chosen.plan.state, ""
        if offer.fault or (chosen is None and not offer.plans[0].actions):
            return offer.plans[0].state, ""
        policy = self.policies[number]
        try:
            return checked(policy.decide(replace(snapshot, busy=True), remembered)).state, ""
        except (Exception, SystemExit) as error:
            return remembered, error_text(error)

    def _priced(
        self, number: int, plans: Sequence[Plan], snapshot: Snapshot, costs: ActionCosts
    ) -> tuple[PricedPlan, ...]:
        """Price the plans with actions that are possible: replicas leave before their layers are swapped."""
        candidates = []
        for plan in (plan for plan in plans if plan.actions):
            swapped = [i for action in plan.actions if isinstance(action, Swap) for i in action.layers]
            if snapshot.residencies and any(len(snapshot.residencies[i]) > 1 for i in swapped):
                continue
            seconds = math.fsum(self._seconds(action, snapshot, costs) for action in plan.actions)
            relieved_bytes = sum(self._relieved_bytes(action, snapshot) for action in plan.actions)
            candidates.append(PricedPlan(plan, number, seconds, relieved_bytes, _relieves(plan, snapshot)))
        return tuple(candidates)

    def _choose(
        self, snapshot: Snapshot, candidates: Sequence[PricedPlan], asked: tuple[Action, ...]
    ) -> tuple[PricedPlan | None, str]:
        """Return the best candidate, and the words that say why; what was `asked` for last only if there is no other.

        Where some relieve, another one does, too: what does not is no remedy for what was refused.
        """
        anew = [bid for bid in candidates if bid.plan.actions != asked]
        if not any(candidate.relieves for candidate in candidates):  # layers return before memory goes to replicas
            bids = anew or candidates
            return min(bids, key=lambda bid: not isinstance(bid.plan.actions[0], Restore), default=None), ""
        bids = anew if any(bid.relieves for bid in anew) else candidates
        relief = [bid for bid in bids if bid.relieves or isinstance(bid.plan.actions[0], Replicate)]
        if len(relief) == 1:
            return relief[0], ""
        missing_bytes = max(0.0, snapshot.kv.used_bytes / KV_TARGET - snapshot.kv.capacity_bytes)
        priced, words = suited(relief, missing_bytes)
        _, best = min(priced, key=lambda each: (each[0], each[1].policy))  # at the same price the first policy wins
        return best, f"; {words}: {best.seconds:.3g} s of {len(relief)} remedies"

    def _relieved_bytes(self, action: Action, snapshot: Snapshot) -> int:
        """Return the bytes that the KV cache gains where memory is short."""
        if isinstance(action, Swap):
            pairs = [(self._sizes[layer], snapshot.layers[layer]) for layer in action.layers]
            present = [(size, variant) for size, variant in pairs if variant == size.full or variant in size.variants]
            return sum(size.nbytes(variant) - size.nbytes(action.variant) for size, variant in present)
        if isinstance(action, Migrate | Evict | Release):
            return sum(self._needs[layer].nbytes for layer in action.layers)
        if isinstance(action, MigrateKV) and snapshot.residencies:
            place = snapshot.residencies[action.layers[0]][0]
            layers = sum(places[0] == place for places in snapshot.residencies)
            used_bytes = sum(reading.kv_used_bytes for reading in snapshot.places if reading.name == place)
            return used_bytes * len(action.layers) // max(1, layers)
        return 0

    def _seconds(self, action: Action, snapshot: Snapshot, costs: ActionCosts) -> float:
        """Return the seconds of serving that an action costs: copying, pausing, quality, and the steps after it."""
        price, moved_bytes, lost = costs.by_kind[type(action)], 0, 0.0
        if isinstance(action, Swap):
            sizes = [self._sizes[layer] for layer in action.layers]
            moved_bytes = sum(size.nbytes(action.variant) for size in sizes)
            lost = math.fsum(1 - size.nbytes(action.variant) / size.full_bytes for size in sizes)
        elif isinstance(action, Migrate | Replicate | Restore):
            moved_bytes = sum(self._needs[layer].nbytes for layer in action.layers)
        seconds = DISTURBANCE * price.byte_s * moved_bytes + price.pause_s + QUALITY_S * lost
        return seconds + HORIZON_S * self._slower(action, snapshot)

    def _slower(self, action: Action, snapshot: Snapshot) -> float:
        """Return the share by which steps are longer afterwards; below zero: shorter."""
        if isinstance(action, Release):
            return STREAMING * len(action.layers) / len(snapshot.layers)
        if not snapshot.residencies:
            return 0.0
        if not isinstance(action, Migrate | Replicate | Evict) or (isinstance(action, Migrate) and action.parts):
            return 0.0
        before = Placement(snapshot.residencies)
        after = before.after(action)
        model = self._model(max(1, snapshot.traffic.running))
        return cost(model, after) / cost(model, before) - 1


def _relieves(plan: Plan, snapshot: Snapshot) -> bool:
    """Tell whether a plan is against a shortage; without one there are only restores, replicas and wider limits."""
    first = plan.actions[0]
    if isinstance(first, ResizeKV):
        places = (place for place in snapshot.places if place.name == first.place)
        limits = (p.kv_maximum_bytes if p.kv_limit_bytes is None else p.kv_limit_bytes for p in places)
        return first.limit_bytes is not None and first.limit_bytes < next(limits, 0)
    return not isinstance(first, Restore | Replicate)
