"""The threads that do what the policies of a fleet say, and what its groups need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.cluster.fleet.balancer import Balancer
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.caps.follower import CapFollower, Follows
from elastic.cluster.fleet.moves import Mover
from elastic.cluster.fleet.overload.controller import OverloadController, Verbs
from elastic.cluster.fleet.planning.policies import FleetPolicies
from elastic.cluster.fleet.records.event_log import EventLog


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
        verbs: Verbs,
        groups: Follows,
        add: Callable[[int], Sequence[str]] | None,
    ) -> None:
        self._threads: list[Balancer | OverloadController | CapFollower] = [CapFollower(groups)]
        self._overload: OverloadController | None = None
        if chosen.balance:
            self._threads.append(Balancer(dispatcher, mover))
        if chosen.overload is not None:
            self._overload = OverloadController(dispatcher, verbs, log, chosen.overload, moves=chosen.balance, add=add)
            self._threads.append(self._overload)

    @property
    def reason(self) -> str:
        """What the overload policy said last; empty: there is none, or no tick yet."""
        return self._overload.reason if self._overload is not None else ""

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Do nothing more; return when what is being done is done. Can be called twice."""
        for thread in self._threads:
            thread.stop()
