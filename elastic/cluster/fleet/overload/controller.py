"""The thread that has layers dropped when requests find no KV, and restored when the load has gone (KunServe)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from elastic import clock
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.price import learned_cost
from elastic.cluster.fleet.groups.results import Dropped
from elastic.cluster.fleet.overload.offers import FORM, MOVED, add_offer, lacking_bytes, move_offer, planned_offer
from elastic.cluster.fleet.overload.prices import PricedVerbs
from elastic.cluster.fleet.overload.readings import FleetReadings
from elastic.cluster.fleet.overload.shares import SharePlan, Shares
from elastic.cluster.fleet.overload.swaps import SwapPlan, Swaps
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.fleet.ticks import TickThread
from elastic.config import Overload
from elastic.controller.fleet_snapshot import FleetSnapshot
from elastic.controller.policies.action_costs import WEIGHT
from elastic.controller.policies.overload import OverloadPlan, OverloadPolicy, OverloadState
from elastic.controller.remedies import Choice, cheapest
from elastic.controller.sensors.sliding_window import moving_average
from elastic.planning.arrangement.drop import DropPlan

logger = logging.getLogger(__name__)
ACT_S = 30.0
"""How long one drop or restore may take; where it may not, all serve on with the layers where they are."""

ADD_REST_S = 5.0
"""How long no instance is added behind one that could not start; each time twice as long."""
MOVES_S = 3.0
"""How long moves may take to end an overload; after that they are offered no more until nothing waits."""


class OverloadController:
    """Asks the policy at each tick, from `start` to `stop`, and does what it says: one thing at a time.

    What a drop costs is compared with that of requests that move (`moves`: somebody has them moved), of layers that
    ranks share, up to `most_shared` of them (somebody has them part again), of layers that are swapped where ranks have
    variants of them, and of one more instance, and the cheapest that suffices is done. `add` starts so many more ranks,
    returns the names of those that came, and raises where none did (None: none can come); `settings.scale_out` says how
    many may be added in all.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        verbs: PricedVerbs,
        log: EventLog,
        settings: Overload,
        *,
        moves: bool = False,
        most_shared: int = 1,
        add: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        self.reason = ""
        """What the policy said last, and the figures that it saw."""
        self._verbs, self._log, self._settings = verbs, log, settings
        self._policy, self._state = OverloadPolicy(settings), OverloadState()
        self._readings, self._moves = FleetReadings(dispatcher), moves
        self._form: dict[str, Any] = {name: getattr(settings, name) for name in FORM}  # as `Fleet.drop` has them
        self._swaps = Swaps(verbs, settings)
        self._swap: SwapPlan | None = None  # what the offer to swap was
        self._shares = Shares(verbs, most_shared, self._form)
        self._share: SharePlan | None = None  # what the offer to share layers was
        self._add, self._addable = add, settings.scale_out
        self.adding: clock.Thread | None = None
        """Adds instances, or has done so: it ends when these have come, or their launcher is closed."""
        self._rest_s, self._add_after_s = ADD_REST_S, -math.inf
        self._short = False  # whether it was told that no drop suffices, and requests still wait
        self._added: Choice | None = None  # why one comes now, if it is instead of a drop
        self._moving_since: float | None = None  # when it was left to moves to end the overload
        failed = "the overload policy could not act"
        self._thread = TickThread(self._prepare_and_tick, settings.tick_s, "elastic-fleet-overload", failed)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Do nothing more; return when what is being done is done, but for instances that come: see `adding`."""
        self._thread.stop()

    def _prepare_and_tick(self) -> None:
        self._verbs.get_ready()
        self._verbs.keep_staging()
        self.tick()

    def tick(self) -> OverloadPlan | None:
        """Look once, and act; return what was decided. None: no rank serves. Raises what the fleet's verbs raise."""
        changing = self._verbs.changing
        snapshot = self._readings.read(self._verbs.groups(), self._verbs.layer_bytes(), busy=changing)
        if snapshot is None:
            return None
        waits = snapshot.queued_bytes > 0 or any(group.waiting_bytes for group in snapshot.groups)
        if waits and not changing:  # else nothing is dropped, and ranks answer late
            snapshot = self._verbs.budgets().of_all(snapshot)
        if max(self._swaps.settled_s, self._shares.settled_s) > snapshot.at_s:
            snapshot = _busy(snapshot)
        plan = self._policy.decide(snapshot, self._state)
        choice = self._choose(snapshot, plan) if plan.drops or plan.scale_out else None
        if plan.drops and (choice is not None or self._barred(plan)):
            plan = self._settled(snapshot, plan, choice)
        elif choice is not None:
            enough = choice.suffices and choice.offer.kind != "add"
            plan = replace(plan, reason=f"{plan.reason}; {choice.words}", scale_out=0 if enough else plan.scale_out)
        self._state = plan.state
        self.reason = f"{plan.reason}; {plan.figures}"
        self._tell_shortage(plan, waits)
        if choice is not None and choice.offer.kind != "drop" and not (choice.offer.kind == "add" and plan.scale_out):
            self._leave_to(choice, snapshot.at_s)
        elif not waits:
            self._moving_since = None
        for rank in self._swaps.restore(snapshot):
            self._log.add("swapped back", rank=rank, instance=rank, why=self.reason)
        if plan.drops:
            dropped = self._drop(plan, why=self.reason)
            logger.info("layers were dropped (%s): %s; %s", dropped.status, self.reason, dropped.why)
        for members in plan.restores:
            restored = self._verbs.restore(members[0], sharing=True, timeout_s=ACT_S, why=self.reason, **self._form)
            logger.info("layers were restored (%s): %s; %s", restored.status, self.reason, restored.why)
        return plan

    def _choose(self, snapshot: FleetSnapshot, plan: OverloadPlan) -> Choice | None:
        """Price what could be done instead of a drop, and the drop, and choose.

        Where none suffices it is the drop: requests move beside it, and the policy has instances added. Where nothing
        can be dropped it is what costs least for its bytes, unless an instance is on its way.
        """
        if self._is_adding and (self._added is not None or not plan.drops):
            return self._added if plan.drops else None
        drops, offers, lacking = [], [], lacking_bytes(snapshot)
        if plan.drops and not self._barred(plan):
            planned = self._drop(plan, dry_run=True)
            drops = [offer] if (offer := planned_offer("drop", planned)) is not None else []
        moved_in_vain = self._moving_since is not None and snapshot.at_s - self._moving_since > MOVES_S
        if self._moves and not moved_in_vain:
            cost = learned_cost(self._log.events(), MOVED)
            offers.append(move_offer(snapshot, self._settings.kv_high, cost))
        offers += drops
        self._share = None if self._barred(plan) else self._shares.plan(plan)
        if self._share is not None:
            offers.append(self._share.offer)
        self._swap = self._swaps.plan(snapshot)
        if self._swap is not None:
            offers.append(self._swap.offer)
        added = min(plan.scale_out or 1, self._addable)
        if self._may_add and added and not (plan.drops and plan.scale_out):
            offers.append(add_offer(snapshot, self._verbs.start_s, added))
        choice = cheapest(offers, lacking)
        return choice if choice is None or choice.suffices or not drops else cheapest(drops, lacking)

    def _drop(self, plan: OverloadPlan, **how: Any) -> Dropped:
        """Have layers dropped as the policy says; `how` are further arguments of `Fleet.drop`."""
        wanted = DropPlan(plan.drops, sum(group.freed_bytes for group in plan.drops))
        return self._verbs.drop(plan=wanted, timeout_s=ACT_S, **self._form, **how)

    def _barred(self, plan: OverloadPlan) -> set[str]:
        """Return the ranks that would drop layers, and have some in a variant: these come back first."""
        return self._swaps.done.keys() & {name for group in plan.drops for name in group.members}

    def _settled(self, snapshot: FleetSnapshot, plan: OverloadPlan, choice: Choice | None) -> OverloadPlan:
        """Return the policy's plan as it will be done: with its drop, or as if something else were under way."""
        words = choice.words if choice is not None else f"{', '.join(sorted(self._barred(plan)))} have swapped layers"
        reason = f"{plan.reason}; {words}"
        if choice is not None and choice.offer.kind == "drop":
            return replace(plan, reason=reason)
        kept = self._policy.decide(_busy(snapshot), self._state)
        return replace(plan, drops=(), reason=reason, state=kept.state)

    def _leave_to(self, choice: Choice, now: float) -> None:
        """Have another remedy than a drop; tell once."""
        if choice.offer.kind == "swap":
            assert self._swap is not None
            for rank in self._swaps.do(self._swap, now, self.reason):
                self._log.add("swapped", rank=rank, instance=rank, why=self.reason)
        elif choice.offer.kind == "reshard":
            assert self._share is not None
            shared = self._shares.do(self._share, now, ACT_S, self.reason)
            logger.info("layers are shared (%s): %s; %s", shared.status, self.reason, shared.why)
        elif choice.offer.kind == "add":
            if choice is not self._added:
                self._added = choice
                self._log.add("overloaded", why=self.reason)
                self._add_instances(1)
        elif self._moving_since is None:
            self._moving_since = now  # by the balancer
            self._log.add("overloaded", why=self.reason)

    def _tell_shortage(self, plan: OverloadPlan, waits: bool) -> None:
        """Tell once that no drop suffices, and have instances added, if they may be."""
        if plan.scale_out and not self._short:
            self._log.add("overloaded", why=f"{self.reason}; {plan.scale_out} more instances would have room")
        self._short = plan.scale_out > 0 or (self._short and waits)
        count = min(plan.scale_out, self._addable)
        if self._may_add and count:
            self._add_instances(count)

    @property
    def _is_adding(self) -> bool:
        return self.adding is not None and self.adding.is_alive()

    @property
    def _may_add(self) -> bool:
        return self._add is not None and not self._is_adding and clock.now() >= self._add_after_s

    def _add_instances(self, count: int) -> None:
        """Have instances added, beside the caller."""
        adding = clock.current().thread(partial(self._scale_out, count), "elastic-fleet-scale-out")
        adding.start()  # which may fail: then there is nothing to wait for
        self.adding = adding

    def _scale_out(self, count: int) -> None:
        assert self._add is not None
        began_s, names = clock.now(), tuple[str, ...]()
        try:
            names = tuple(self._add(count))
            self._verbs.start_s = moving_average(self._verbs.start_s, clock.now() - began_s, WEIGHT)
            logger.info("added %s: %s", ", ".join(names), self.reason)
        except Exception as error:  # whatever a launcher raises
            logger.warning("no instance could be added: %s", error)
        self._addable -= len(names)
        if len(names) < count:
            self._add_after_s, self._rest_s = clock.now() + self._rest_s, 2 * self._rest_s
        else:
            self._rest_s = ADD_REST_S


def _busy(snapshot: FleetSnapshot) -> FleetSnapshot:
    """Return a snapshot for a policy whose plan is not done: as if something were under way."""
    return replace(snapshot, groups=tuple(replace(group, busy=True) for group in snapshot.groups))
