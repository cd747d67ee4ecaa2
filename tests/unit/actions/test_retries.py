"""Deferred actions that are tried again: when pages came free, and not for what a failed try itself gave back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from elastic.actions.base import ActionHandler
from elastic.actions.transactions.executor import ActionExecutor
from elastic.actions.transactions.transaction import RETRY, ActionOutcome, Agreement
from elastic.errors import StateError
from elastic.hooks.forward_gate import ForwardGate
from elastic.types import Action, Change, PlanStep, Restore


class Place:
    """Pages that several models share; all of them are told when some come free."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.listeners: list[Callable[[], object]] = []

    def give_back(self, pages: int) -> None:
        self.pages += pages
        for listener in self.listeners:
            listener()


class Greedy(ActionHandler):
    """Takes the pages of a layer one after the other, and gives them back where it does not get all."""

    def __init__(self, place: Place, needed: int) -> None:
        self.place, self.needed = place, needed
        self.waiting: tuple[int, ...] = ()
        self.tries = 0
        self.meanwhile: list[Callable[[], object]] = []
        self.error: Exception | None = None

    def dry_run(self, action: Restore) -> PlanStep:
        return PlanStep(action, "applied", 0, 0, 0, 0.0)

    def prepare(self, action: Restore) -> tuple[int, ...]:
        self.tries += 1
        taken = min(self.needed, self.place.pages)
        self.place.pages -= taken
        if taken == self.needed and self.error is None:
            return action.layers
        self.waiting = action.layers
        if self.meanwhile:
            self.meanwhile.pop()()
        self.place.give_back(taken)
        if self.error is not None:
            raise self.error
        return ()

    def commit(self, prepared: tuple[int, ...]) -> None:
        self.waiting = () if prepared else self.waiting

    def rollback(self, prepared: tuple[int, ...]) -> None:
        self.place.give_back(self.needed if prepared else 0)

    def finish(self, prepared: tuple[int, ...]) -> Change:
        return Change("applied" if prepared else "deferred", prepared, self.waiting)

    def deferred(self) -> tuple[Action, ...]:  # type: ignore[override]
        return (Restore(self.waiting),) if self.waiting else ()


class Models:
    """Executors of models that share a place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.outcomes: list[ActionOutcome] = []
        self.executors: list[ActionExecutor] = []

    def add(self, needed: int) -> tuple[ActionExecutor, Greedy]:
        handler = Greedy(self.place, needed)
        executor = ActionExecutor(ForwardGate(), {Restore: handler}, self.outcomes.append, Agreement())
        self.executors.append(executor)
        self.place.listeners.append(executor.retry)
        executor.thread.start()
        return executor, handler

    def settle(self) -> None:
        """Wait until no model has anything to do."""
        deadline = time.monotonic() + 20
        while any(executor.unfinished for executor in self.executors):
            assert time.monotonic() < deadline, "they never end"
            time.sleep(0.001)

    def close(self) -> None:
        self.place.listeners.clear()
        for executor in self.executors:
            executor.close(10)


@pytest.fixture
def models() -> Iterator[Models]:
    """Two pages for all models."""
    place = Models(Place(2))
    yield place
    place.close()


def test_a_try_in_vain_does_not_wake_itself(models: Models) -> None:
    executor, handler = models.add(3)
    executor.submit((Restore((1,)),), "by hand").result(10)
    models.settle()
    assert handler.tries <= 2
    models.place.give_back(1)
    models.settle()
    assert not handler.waiting


def test_two_models_do_not_wake_each_other_for_ever(models: Models) -> None:
    (first, waiting), (second, other) = models.add(3), models.add(4)
    first.submit((Restore((1,)),), "by hand").result(10)
    second.submit((Restore((1,)),), "by hand").result(10)
    models.settle()
    assert [waiting.waiting, other.waiting] == [(1,), (1,)]
    assert waiting.tries + other.tries < 10
    models.place.give_back(2)
    models.settle()
    assert models.place.pages == 4 - sum(each.needed for each in (waiting, other) if not each.waiting)
    assert [each.waiting for each in (waiting, other)].count((1,)) == 1


def test_an_action_that_fails_each_time_is_recorded_once_for_each_time_that_pages_came_free(models: Models) -> None:
    _, handler = models.add(2)
    handler.waiting, handler.error = (1,), StateError("its source has gone")
    for _ in range(3):
        models.place.give_back(0)
        models.settle()
    failed = [outcome.error for outcome in models.outcomes if outcome.why == RETRY]
    assert failed == ["its source has gone"] * 3


def test_what_failed_while_another_model_held_pages_in_vain_is_tried_again(models: Models) -> None:
    (first, greedy), (second, modest) = models.add(3), models.add(2)
    greedy.waiting = (1,)
    greedy.meanwhile.append(lambda: second.submit((Restore((1,)),), "by hand").result(10))
    first.retry()
    models.settle()
    assert modest.tries == 2
    assert not modest.waiting
    assert greedy.waiting
