"""The thread that has layers dropped when requests find no KV, and restored when the load has gone (KunServe)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.results import Dropped, GroupStatus, Restored
from elastic.cluster.fleet.overload.readings import FleetReadings
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.config import Overload
from elastic.controller.policies.overload import OverloadPlan, OverloadPolicy, OverloadState
from elastic.errors import ElasticError
from elastic.planning.arrangement.drop import DropPlan

logger = logging.getLogger(__name__)
ACT_S = 30.0
"""How long one drop or restore may take; where it may not, all serve on with the layers where they are."""


class Verbs(Protocol):
    """What is asked of a fleet."""

    @property
    def changing(self) -> bool: ...
    def groups(self) -> tuple[GroupStatus, ...]: ...
    def layer_bytes(self) -> tuple[int, ...]: ...
    def keep_staging(self) -> None: ...
    def drop(
        self,
        *,
        plan: DropPlan | None = None,
        timeout_s: float = ...,
        why: str = ...,
        exchange: Literal["live", "stall"] = ...,
        coordinated: bool = ...,
    ) -> Dropped: ...
    def restore(
        self,
        rank: str | None = None,
        *,
        timeout_s: float = ...,
        why: str = ...,
        exchange: Literal["live", "stall"] = ...,
        coordinated: bool = ...,
    ) -> Restored: ...


class OverloadController:
    """Asks the policy at each tick, from `start` to `stop`, and does what it says: one thing at a time.

    `add` starts so many more ranks (None: none can come); `settings.scale_out` says how many may be added in all.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        verbs: Verbs,
        log: EventLog,
        settings: Overload,
        *,
        moves: bool = False,
        add: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        self.reason = ""
        """What the policy said last, and the figures that it saw."""
        self._verbs, self._log, self._settings = verbs, log, settings
        self._policy, self._state = OverloadPolicy(settings), OverloadState()
        self._readings = FleetReadings(dispatcher, moves=moves)
        self._add, self._addable = add, settings.scale_out
        self._adding: threading.Thread | None = None
        self._short = False  # whether it was told that no drop suffices, and requests still wait
        self._fault = ""  # why the last tick could not act
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-fleet-overload", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Do nothing more; return when what is being done is done."""
        self._stopping.set()
        for thread in (self._thread, self._adding):
            if thread is not None and thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._settings.tick_s):
            try:
                self._verbs.keep_staging()
                self.tick()
                self._fault = ""
            except ElasticError as error:  # a rank was lost meanwhile, or there is no room after all
                if str(error) != self._fault:
                    logger.warning("the overload policy could not act: %s", error)
                self._fault = str(error)

    def tick(self) -> OverloadPlan | None:
        """Look once, and act; return what was decided. None: no rank serves. Raises what the fleet's verbs raise."""
        snapshot = self._readings.read(self._verbs.groups(), self._verbs.layer_bytes(), busy=self._verbs.changing)
        if snapshot is None:
            return None
        plan = self._policy.decide(snapshot, self._state)
        self._state = plan.state
        self.reason = f"{plan.reason}; {plan.figures}"
        waits = snapshot.queued_bytes > 0 or any(group.waiting_bytes for group in snapshot.groups)
        self._tell_shortage(plan, waits)
        exchange, coordinated = self._settings.exchange, self._settings.coordinated
        if plan.drops:
            freed_bytes = sum(group.freed_bytes for group in plan.drops)
            drops = DropPlan(plan.drops, freed_bytes)
            dropped = self._verbs.drop(
                plan=drops, timeout_s=ACT_S, why=self.reason, exchange=exchange, coordinated=coordinated
            )
            logger.info("layers were dropped (%s): %s; %s", dropped.status, self.reason, dropped.why)
        for members in plan.restores:
            restored = self._verbs.restore(
                members[0], timeout_s=ACT_S, why=self.reason, exchange=exchange, coordinated=coordinated
            )
            logger.info("layers were restored (%s): %s; %s", restored.status, self.reason, restored.why)
        return plan

    def _tell_shortage(self, plan: OverloadPlan, waits: bool) -> None:
        """Tell once that no drop suffices, and have instances added, if they may be."""
        if plan.scale_out and not self._short:
            self._log.add("overloaded", why=f"{self.reason}; {plan.scale_out} more instances would have room")
        self._short = plan.scale_out > 0 or (self._short and waits)
        count = min(plan.scale_out, self._addable)
        if self._add is not None and count and (self._adding is None or not self._adding.is_alive()):
            self._addable -= count
            self._adding = threading.Thread(target=self._scale_out, args=(count,), daemon=True)
            self._adding.name = "elastic-fleet-scale-out"
            self._adding.start()

    def _scale_out(self, count: int) -> None:
        assert self._add is not None
        try:
            names = self._add(count)
            logger.info("added %s: no drop frees enough", ", ".join(names))
        except ElasticError as error:
            logger.warning("no instance could be added: %s", error)
