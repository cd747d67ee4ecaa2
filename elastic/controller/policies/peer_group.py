"""Models of one process that are planned together: each reads what the others said last, and says what it does.

Every model keeps a controller of its own. Those of a group tick one at a time, under one lock, so a decision sees every
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
from elastic.controller.snapshot import PeerState, Snapshot
from elastic.planning.cost_model import CostModel
from elastic.planning.placement import ResourceDemand

SILENT_S = 5.0
SILENT_TICKS = 5
"""A model that has not looked for so long, the longer of both, is left out: it will answer nothing. But what it was
doing when it was last seen may still be done."""
ROWS_ALPHA = 0.1
_groups: weakref.WeakValueDictionary[str, PeerGroup] = weakref.WeakValueDictionary()
_joining = threading.Lock()


class PeerGroup:
    """The models under one name, and their last notices. It lives as long as one of its members."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while a member looks, decides and acts."""
        self._notices: dict[str, tuple[PeerState, float]] = {}  # name -> notice, until when it counts
        self._names = map(str, itertools.count(1))

    @classmethod
    def named(cls, name: str) -> PeerGroup:
        """The one of this process under a name; made at first use."""
        with _joining:
            found = _groups.get(name)
            if found is None:
                found = _groups[name] = cls()
            return found

    def next_name(self) -> str:
        with _joining:
            return next(self._names)

    def others(self, name: str, now: float) -> tuple[PeerState, ...]:
        """What the other members said last."""
        known = sorted(self._notices.items())
        return tuple(notice for other, (notice, until) in known if other != name and (now <= until or notice.pending))

    def last(self, name: str) -> PeerState | None:
        return self._notices[name][0] if name in self._notices else None

    def post(self, notice: PeerState, tick_s: float) -> None:
        until = notice.snapshot.at_s + max(SILENT_S, SILENT_TICKS * tick_s)
        self._notices[notice.name] = notice, until

    def leave(self, name: str) -> None:
        self._notices.pop(name, None)


class PeerModel:
    """The policy of a model in a group: it sees the others in its snapshots. `needs` and `model` are as for `scale`."""

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
        """What its policy says, which the others are let know. Not pure: to be called under the group's lock."""
        others = self.group.others(self.name, snapshot.at_s)
        plan = self.policy.decide(replace(snapshot, name=self.name, others=others), state)
        self.group.post(self._notice(snapshot, plan), self.tick_s)
        return plan

    def leave(self) -> None:
        """Be no member any more, until the next decision. Waits for a tick of another member that is under way."""
        with self.group.lock:
            self.group.leave(self.name)

    def _notice(self, snapshot: Snapshot, plan: Plan) -> PeerState:
        last = self.group.last(self.name)
        rows = last.rows if last else 0.0
        rows += ROWS_ALPHA * (snapshot.traffic.running - rows)
        pending = last.pending if last and snapshot.busy else ()
        pending = plan.actions or pending
        return PeerState(self.name, snapshot, self._needs, self._model, rows, pending, plan.short, plan.asks)


os.register_at_fork(after_in_child=_groups.clear)
