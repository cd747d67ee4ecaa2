"""Models of one process that are planned together: each reads its peers' last states, and posts its own.

Every model has a controller of its own. Those of a group tick one at a time, under one lock, so a decision sees every
earlier one; what is decided is pure, and is in `elastic.controller.policies.sharing`.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from elastic.controller.decision import ControllerPolicy, Plan
from elastic.controller.policies.shortage import ROWS_WEIGHT
from elastic.controller.sensors.sliding_window import moving_average
from elastic.controller.snapshot import PeerState, Snapshot
from elastic.planning.cost_model import CostModel
from elastic.planning.placement import ResourceDemand

SILENT_S = 5.0
SILENT_TICKS = 5
"""A model that has not ticked for so long, the longer of both, is left out: it will answer nothing. But what it was
doing at its last tick may still be done, for `PENDING_S` more."""
PENDING_S = 60.0
"""After that it is done, and seen at its places, or it never will be: a controller that was stopped does not say so."""
_groups: weakref.WeakValueDictionary[str, PeerGroup] = weakref.WeakValueDictionary()
_joining = threading.Lock()


class PeerGroup:
    """The models under one name, and their last states. It lives as long as one of its members."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while a member senses, decides and acts."""
        self.states: dict[str, tuple[PeerState, float]] = {}
        """name -> state, seconds until which it counts."""
        self._names = map(str, itertools.count(1))

    @classmethod
    def named(cls, name: str) -> PeerGroup:
        """Return the group of this process under a name; made at first use."""
        with _joining:
            group = _groups.get(name)
            if group is None:
                group = _groups[name] = cls()
            return group

    def next_name(self) -> str:
        """Return a name that no member has had."""
        with _joining:
            return next(self._names)


class PeerModel:
    """The policy of a model in a group: it sees its peers in its snapshots. `needs` and `model` are as for `scale`."""

    def __init__(
        self,
        group: PeerGroup,
        policy: ControllerPolicy,
        needs: Sequence[ResourceDemand],
        model: Callable[[int], CostModel],
    ) -> None:
        self.group = group
        self.policy = policy
        self.name = group.next_name()
        self.tick_s = float(getattr(policy, "tick_s", 0.1))
        self._needs, self._model = tuple(needs), model

    def decide(self, snapshot: Snapshot, state: Any = None) -> Plan:
        """Return the plan of its policy, and post it to its peers. Not pure: to be called under the group's lock."""
        now, states = snapshot.at_s, self.group.states
        others = tuple(
            peer
            for name, (peer, until_s) in sorted(states.items())
            if name != self.name and now <= until_s + (PENDING_S if peer.pending else 0.0)
        )
        plan = self.policy.decide(replace(snapshot, name=self.name, others=others), state)
        last = states[self.name][0] if self.name in states else None
        rows = moving_average(last.rows if last else 0.0, snapshot.traffic.running, ROWS_WEIGHT)
        pending = plan.actions or (last.pending if last and snapshot.busy else ())
        mine = PeerState(self.name, snapshot, self._needs, self._model, rows, pending, plan.short, plan.asks)
        states[self.name] = mine, now + max(SILENT_S, SILENT_TICKS * self.tick_s)
        return plan

    def leave(self) -> None:
        """Leave the group, until the next decision. Waits for a tick of another member, but for none that hangs."""
        waited = self.group.lock.acquire(timeout=SILENT_S)
        self.group.states.pop(self.name, None)
        if waited:
            self.group.lock.release()


os.register_at_fork(after_in_child=_groups.clear)
