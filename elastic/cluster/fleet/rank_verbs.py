"""The verbs of a fleet for the runtime of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.cluster.control.messages import (
    Apply,
    CommitActions,
    Look,
    PrepareActions,
    Question,
    RollbackActions,
    RuntimeView,
)
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.ranks import result
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.refusals import VerbChecks, not_there
from elastic.types import Action


class RankVerbs(VerbChecks):
    """What is asked of one rank, by its name. Raises what it raises, `ConfigError` for one that is not there."""

    _dispatcher: Dispatcher

    def look(self, rank: str) -> RuntimeView:
        """Return the status, events and request statistics of a rank's runtime."""
        view: RuntimeView = self._ask(rank, Look())
        return view

    def apply(
        self, rank: str, actions: Action | Sequence[Action], *, dry_run: bool = False, why: str = "by the fleet"
    ) -> Any:
        """Do actions at a rank, all or none; return their results, with `dry_run` the steps of a plan."""
        self._require_verb(dry_run=dry_run, why=why)
        return self._ask(rank, Apply(_several(actions), why, dry_run))

    def prepare(self, rank: str, actions: Action | Sequence[Action], id: str, timeout_s: float = 60.0) -> Any:
        """Prepare actions at a rank; see `Runtime.prepare`."""
        self._require_verb(id=id)
        return self._ask(rank, PrepareActions(_several(actions), id, timeout_s))

    def commit(self, rank: str, id: str) -> Any:
        """Commit prepared actions at a rank; see `Runtime.commit`."""
        self._require_verb(id=id)
        return self._ask(rank, CommitActions(id))

    def rollback(self, rank: str, id: str) -> Any:
        """Undo prepared actions at a rank; see `Runtime.rollback`."""
        self._require_verb(id=id)
        return self._ask(rank, RollbackActions(id))

    def _ask(self, rank: str, question: Question) -> Any:
        Delivery.forbid("ranks cannot be asked")
        instance = self._instance(rank)
        return result(instance, instance.client.ask(question))

    def _instance(self, name: str) -> Instance:
        self._require_verb(rank=name)
        with self._dispatcher.lock:
            if name not in self._dispatcher.instances:
                raise not_there(f"rank {name!r}", self._dispatcher.instances)
            return self._dispatcher.instances[name]


def _several(actions: Action | Sequence[Action]) -> tuple[Action, ...]:
    return tuple(actions) if isinstance(actions, Sequence) else (actions,)
