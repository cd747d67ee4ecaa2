"""What actions are done on: the model of this process, or the ranks of a fleet, all or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from elastic.engines.base import Engine
from elastic.errors import ConfigError, ElasticError, NotFound, StateError
from elastic.server.protocol.errors import APIError
from elastic.types import Action, PlanStep, Prepared, Result, Status

if TYPE_CHECKING:
    from elastic.cluster.fleet.fleet import Fleet

WHY = "by HTTP"
IDS_KEPT = 1000


@dataclass(frozen=True)
class Target:
    """One wrapped model, known by its rank. What can be done on it is called as that of `Runtime` is."""

    name: str
    """Of the rank; empty: the model of this process."""
    status: Callable[[], Status] = field(compare=False)
    plan: Callable[[Sequence[Action]], Sequence[PlanStep]] = field(compare=False)
    apply: Callable[[Sequence[Action]], Sequence[Result]] = field(compare=False)
    prepare: Callable[..., Prepared] = field(compare=False)
    commit: Callable[[str], Sequence[Result]] = field(compare=False)
    rollback: Callable[[str], Any] = field(compare=False)
    at_home: Sequence[int] | None = field(default=None, compare=False)
    """The layers that a restore without layers is about; None: all."""


Done = list[tuple[Target, Action, Any]]


class ActionTargets:
    """The models behind one engine. Thread-safe."""

    def __init__(self, engine: Engine, fleet: Fleet | None) -> None:
        """`fleet` is the engine, if it is one."""
        self._engine, self._fleet = engine, fleet
        self._prepared: dict[str, Mapping[Target, tuple[Action, ...]]] = {}
        """By id: who has prepared what; of the last ones."""

    def require(self) -> None:
        """Raise `APIError` where there is nothing to act on."""
        if self._fleet is None and self._engine.runtime is None:
            raise APIError(404, "the model of this server is not wrapped: there is nothing to act on", code="not_found")

    def named(self, rank: str | None) -> list[Target]:
        """Return those that a request means. Raises `NotFound` for a rank that does not serve."""
        self.require()
        if self._fleet is None:
            if rank is not None:
                raise ConfigError(f"rank={rank!r}: this server has one model and no ranks; leave it out")
            return [_of_process(self._engine.runtime)]
        serving = [each.name for each in self._fleet.status().ranks if each.serves]
        if rank is not None and rank not in serving:
            raise NotFound(f"there is no rank {rank!r} that serves; there are: {', '.join(serving) or 'none'}")
        if not serving:
            raise StateError("no rank serves now; try again when one does")
        return [_of_rank(self._fleet, name) for name in (serving if rank is None else [rank])]

    def apply(self, asked: Mapping[Target, Sequence[Action]]) -> Done:
        """Do actions: on one model as `Runtime.apply`; on several all or none, so that none of them is deferred."""
        if len(asked) == 1:
            ((target, actions),) = asked.items()
            return [(target, *pair) for pair in zip(actions, target.apply(actions), strict=True)]
        id = uuid4().hex
        self.prepare(asked, id, 60.0)
        return self.commit(id)

    def prepare(self, asked: Mapping[Target, Sequence[Action]], id: str, timeout_s: float) -> dict[Target, Prepared]:
        """Prepare actions on all models, or on none."""
        prepared: dict[Target, Prepared] = {}
        earlier = self._prepared.get(id)
        kept = {target: tuple(actions) for target, actions in asked.items()}
        if earlier is not None and earlier != kept:
            raise ConfigError(f"id={id!r} was prepared for other actions or ranks; choose another id")
        try:
            for target, actions in kept.items():
                prepared[target] = target.prepare(actions, id=id, timeout_s=timeout_s)
        except BaseException:
            for target in prepared:
                _undo(target, id)
            raise
        self._prepared[id] = kept
        while len(self._prepared) > IDS_KEPT:
            self._prepared.pop(next(iter(self._prepared)), None)
        return prepared

    def commit(self, id: str) -> Done:
        """Commit on all models what was prepared, and return what was done.

        Where the first cannot, none does. What another cannot do then is a `StateError` that says who has done it;
        those after it do not, and give back what they had prepared.
        """
        done: Done = []
        asked = self._asked(id)
        for position, (target, actions) in enumerate(asked.items()):
            try:
                done += [(target, *pair) for pair in zip(actions, target.commit(id), strict=True)]
            except ElasticError as error:
                for other in list(asked)[position + 1 :]:
                    _undo(other, id)
                if position == 0:
                    raise
                there = ", ".join(dict.fromkeys(each.name for each, _, _ in done))
                raise StateError(f"rank {target.name} could not commit {id!r} after {there} had: {error}") from error
        return done

    def rollback(self, id: str) -> None:
        """Give back on all models what was prepared. Raises what one has raised, when all were asked."""
        failure: ElasticError | None = None
        for target in self._asked(id):
            try:
                target.rollback(id)
            except ElasticError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _asked(self, id: str) -> Mapping[Target, tuple[Action, ...]]:
        if id not in self._prepared:
            raise NotFound(f"id={id!r} is no transaction of this server; POST /elastic/actions/prepare returns the id")
        return self._prepared[id]


def _of_process(runtime: Any) -> Target:
    return Target(
        "",
        runtime.status,
        runtime.plan,
        partial(runtime.apply, why=WHY),
        runtime.prepare,
        runtime.commit,
        runtime.rollback,
        runtime.at_home,
    )


def _of_rank(fleet: Fleet, name: str) -> Target:
    return Target(
        name,
        lambda: fleet.look(name).status,
        partial(fleet.apply, name, dry_run=True),
        partial(fleet.apply, name, why=WHY),
        partial(fleet.prepare, name),
        partial(fleet.commit, name),
        partial(fleet.rollback, name),
    )


def _undo(target: Target, id: str) -> None:
    """Roll back, as far as it is there: one that is gone has nothing to give back, and else its deadline does it."""
    try:
        target.rollback(id)
    except ElasticError:
        return
