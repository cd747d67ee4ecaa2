"""What actions are done on: the model of this process, or the ranks of a fleet, all or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from elastic.engines.base import Engine
from elastic.errors import ConfigError, ElasticError, NotFound, StateError
from elastic.runtime.runtime import Runtime
from elastic.server.fleets.fleet import as_fleet
from elastic.server.protocol.errors import APIError
from elastic.types import Action, PlanStep, Prepared, Result, Status

if TYPE_CHECKING:
    from elastic.cluster.fleet.fleet import Fleet

WHY = "by HTTP"
IDS_KEPT = 1000


@dataclass(frozen=True)
class RuntimeTarget:
    """The model of this process."""

    name = ""
    """Of the rank; empty: it is none."""

    runtime: Runtime

    def status(self) -> Status:
        return self.runtime.status()

    def at_home(self) -> tuple[int, ...]:
        """Return the layers that a restore without layers is about."""
        return self.runtime.at_home

    def plan(self, actions: Sequence[Action]) -> Sequence[PlanStep]:
        return self.runtime.plan(actions)

    def apply(self, actions: Sequence[Action]) -> Sequence[Result]:
        results: Sequence[Result] = self.runtime.apply(actions, why=WHY)
        return results

    def prepare(self, actions: Sequence[Action], id: str, timeout_s: float) -> Prepared:
        return self.runtime.prepare(actions, id=id, timeout_s=timeout_s)

    def commit(self, id: str) -> Sequence[Result]:
        return self.runtime.commit(id)

    def rollback(self, id: str) -> None:
        self.runtime.rollback(id)


@dataclass(frozen=True)
class RankTarget:
    """The model of a rank."""

    fleet: Fleet
    name: str

    def status(self) -> Status:
        status: Status = self.fleet.look(self.name).status
        return status

    def at_home(self) -> tuple[int, ...]:
        return tuple(range(self.status().layers))

    def plan(self, actions: Sequence[Action]) -> Sequence[PlanStep]:
        steps: Sequence[PlanStep] = self.fleet.apply(self.name, tuple(actions), dry_run=True)
        return steps

    def apply(self, actions: Sequence[Action]) -> Sequence[Result]:
        results: Sequence[Result] = self.fleet.apply(self.name, tuple(actions))
        return results

    def prepare(self, actions: Sequence[Action], id: str, timeout_s: float) -> Prepared:
        prepared: Prepared = self.fleet.prepare(self.name, tuple(actions), id, timeout_s)
        return prepared

    def commit(self, id: str) -> Sequence[Result]:
        results: Sequence[Result] = self.fleet.commit(self.name, id)
        return results

    def rollback(self, id: str) -> None:
        self.fleet.rollback(self.name, id)


Target = RuntimeTarget | RankTarget
"""One wrapped model."""
Done = list[tuple[Target, Action, Any]]


class ActionTargets:
    """The models behind one engine. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._fleet = engine, as_fleet(engine)
        self._prepared: dict[str, Mapping[Target, tuple[Action, ...]]] = {}
        """By id: who has prepared what; of the last ones."""

    def require(self) -> None:
        """Raise `APIError` where there is nothing to act on."""
        if self._fleet is None and self._engine.runtime is None:
            raise APIError(404, "the model of this server is not wrapped: there is nothing to act on", code="not_found")

    def named(self, rank: str | None) -> list[Target]:
        """Return those that a request means. Raises `ConfigError` for a rank that does not serve."""
        self.require()
        if self._fleet is None:
            if rank is not None:
                raise ConfigError(f"rank={rank!r}: this server has one model and no ranks; leave it out")
            assert self._engine.runtime is not None
            return [RuntimeTarget(self._engine.runtime)]
        serving = [each.name for each in self._fleet.status().ranks if each.serves]
        if rank is not None and rank not in serving:
            raise ConfigError(f"rank={rank!r} does not serve; there are {serving}")
        if not serving:
            raise StateError("no rank serves now; try again when one does")
        return [RankTarget(self._fleet, name) for name in (serving if rank is None else [rank])]

    def apply(self, asked: Mapping[Target, Sequence[Action]]) -> Done:
        """Do actions: on one model as `Runtime.apply`; on several all or none, so that none of them is deferred."""
        if len(asked) == 1:
            ((target, actions),) = asked.items()
            return _paired(target, actions, target.apply(actions))
        return self.commit(next(iter(self.prepare(asked, None, 60.0).values())).id)

    def prepare(
        self, asked: Mapping[Target, Sequence[Action]], id: str | None, timeout_s: float
    ) -> dict[Target, Prepared]:
        """Prepare actions on all models, or on none."""
        chosen = id or uuid4().hex
        prepared: dict[Target, Prepared] = {}
        earlier = self._prepared.get(chosen)
        kept = {target: tuple(actions) for target, actions in asked.items()}
        if earlier is not None and earlier != kept:
            raise ConfigError(f"id={chosen!r} was prepared for other actions or ranks; choose another id")
        try:
            for target, actions in kept.items():
                prepared[target] = target.prepare(actions, chosen, timeout_s)
        except BaseException:
            for target in prepared:
                _undo(target, chosen)
            raise
        self._prepared[chosen] = kept
        while len(self._prepared) > IDS_KEPT:
            self._prepared.pop(next(iter(self._prepared)), None)
        return prepared

    def commit(self, id: str) -> Done:
        """Commit on all models what was prepared, and return what was done.

        Where the first cannot, none does. What another cannot do then is a `StateError` that says who has done it.
        """
        done: Done = []
        asked = self._asked(id)
        for position, (target, actions) in enumerate(asked.items()):
            try:
                done += _paired(target, actions, target.commit(id))
            except ElasticError as error:
                if position == 0:
                    for other in list(asked)[1:]:
                        _undo(other, id)
                    raise
                there = ", ".join(dict.fromkeys(each.name for each, _, _ in done))
                raise StateError(f"rank {target.name} could not commit {id!r} after {there} had: {error}") from error
        return done

    def rollback(self, id: str) -> None:
        """Give back on all models what was prepared."""
        for target in self._asked(id):
            target.rollback(id)

    def _asked(self, id: str) -> Mapping[Target, tuple[Action, ...]]:
        if id not in self._prepared:
            raise NotFound(f"id={id!r} is no transaction of this server; POST /elastic/actions/prepare returns the id")
        return self._prepared[id]


def _paired(target: Target, actions: Sequence[Action], results: Sequence[Any]) -> Done:
    return [(target, action, result) for action, result in zip(actions, results, strict=True)]


def _undo(target: Target, id: str) -> None:
    """Roll back, as far as it is there: one that is gone has nothing to give back, and else its deadline does it."""
    try:
        target.rollback(id)
    except ElasticError:
        return
