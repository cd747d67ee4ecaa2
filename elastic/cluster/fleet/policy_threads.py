"""The threads that do what the policies of a fleet say, and what its groups need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from elastic.cluster.fleet.balancer import Balancer
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.groups import Groups
from elastic.cluster.fleet.lengths.controller import LengthController
from elastic.cluster.fleet.moves import Mover
from elastic.cluster.fleet.overload.controller import OverloadController
from elastic.cluster.fleet.overload.prices import PricedVerbs
from elastic.cluster.fleet.planning.policies import FleetPolicies
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.fleet.ticks import TickThread

TICK_S = 0.25
"""Between two moves, and between two looks at the caps of groups."""


class PolicyThreads:
    """Those of the policies that were chosen, and one for the caps of groups, from `start` to `stop`.

    `add`: see `OverloadController`.
    """

    def __init__(
        self,
        chosen: FleetPolicies,
        dispatcher: Dispatcher,
        log: EventLog,
        mover: Mover,
        verbs: PricedVerbs,
        groups: Groups,
        add: Callable[[int], Sequence[str]] | None,
    ) -> None:
        failed = "the caps of a group could not follow"  # a rank was lost, and its group is being repaired
        caps = TickThread(groups.follow_needs, TICK_S, "elastic-fleet-caps", failed, logging.DEBUG)
        self._threads: list[TickThread | OverloadController | LengthController] = [caps]
        self._changing: list[OverloadController | LengthController] = []  # who has layers change their rank
        if chosen.balance:
            balance = Balancer(dispatcher, mover).tick
            self._threads.append(TickThread(balance, TICK_S, "elastic-fleet-balancer", "no request could be moved"))
        if chosen.overload is not None:
            most_shared = 1 if chosen.lengths is None else chosen.lengths.most_ranks
            self._changing.append(
                OverloadController(
                    dispatcher, verbs, log, chosen.overload, moves=chosen.balance, most_shared=most_shared, add=add
                )
            )
        if chosen.lengths is not None:
            self._changing.append(LengthController(dispatcher, verbs, chosen.lengths))
        self._threads += self._changing

    @property
    def reason(self) -> str:
        """What the policies of overloads and of lengths said last; empty: there is none, or no tick yet."""
        return "; ".join(policy.reason for policy in self._changing if policy.reason)

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Do nothing more; return when what is being done is done. Can be called twice. See `join`."""
        for thread in self._threads:
            thread.stop()

    def join(self) -> None:
        """Return when instances that a policy has added have come, or cannot, as their launcher is closed."""
        for policy in self._changing:
            if isinstance(policy, OverloadController) and policy.adding is not None:
                policy.adding.join()
