"""Executors of several ranks under one coordinator: transactions end alike on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from elastic.actions.base import ActionHandler, Layers
from elastic.actions.transactions.executor import ActionExecutor
from elastic.actions.transactions.transaction import RETRY, ActionOutcome
from elastic.engines.vllm.agreement import Coordinator, RankAgreement
from elastic.errors import CapacityError, StateError
from elastic.hooks.forward_gate import ForwardGate
from elastic.types import Action, Change, PlanStep, Restore


class PagedLayers(ActionHandler):
    """Restores as many layers as there are pages for; the others wait."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.full: set[int] = set()
        self.waiting: Layers = ()
        self.fails = False

    def dry_run(self, action: Restore) -> PlanStep:
        return PlanStep(action, "applied", 0, 0, 0, 0.0)

    def prepare(self, action: Restore) -> dict[str, Layers]:
        if self.fails:
            raise CapacityError("host memory is full", requested_bytes=1, free_bytes=0, total_bytes=0)
        layers = action.layers[: self.pages]
        self.pages -= len(layers)
        return {"layers": layers, "deferred": action.layers[len(layers) :]}

    def layers(self, prepared: dict[str, Layers]) -> Layers:
        return prepared["layers"]

    def shorten(self, prepared: dict[str, Layers], layers: Layers) -> None:
        dropped = tuple(layer for layer in prepared["layers"] if layer not in layers)
        self.pages += len(dropped)
        prepared["layers"] = tuple(layer for layer in prepared["layers"] if layer in layers)
        prepared["deferred"] = dropped + prepared["deferred"]

    def commit(self, prepared: dict[str, Layers]) -> None:
        self.full.update(prepared["layers"])

    def rollback(self, prepared: dict[str, Layers]) -> None:
        self.full.difference_update(prepared["layers"])
        self.pages += len(prepared["layers"])

    def finish(self, prepared: dict[str, Layers]) -> Change:
        self.waiting = prepared["deferred"]
        return Change("deferred" if self.waiting else "applied", prepared["layers"], self.waiting)

    def deferred(self) -> Sequence[Action]:
        return (Restore(self.waiting),) if self.waiting else ()


class Rank:
    """One rank's layers, executor and agreement."""

    def __init__(self, pages: int) -> None:
        self.layers = PagedLayers(pages)
        self.agreement = RankAgreement()
        self.outcomes: list[ActionOutcome] = []
        handlers: dict[type, ActionHandler] = {Restore: self.layers}
        self.executor = ActionExecutor(ForwardGate(), handlers, self.outcomes.append, self.agreement)
        self.agreement.begin = self.executor.submit
        self.executor.thread.start()


@contextmanager
def ranks_of(*pages: int) -> Iterator[list[Rank]]:
    ranks = [Rank(count) for count in pages]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.agreement.close()
            rank.executor.close(10)


def step_until(ranks: list[Rank], done: Any) -> None:
    """Step: every rank reports, and carries out what all are told."""
    coordinator = Coordinator(len(ranks))
    for _ in range(100_000):
        if done():
            return
        for number, rank in enumerate(ranks):
            report = rank.agreement.report()
            if report is not None:
                coordinator.receive(number, report)
        orders = coordinator.orders()
        for rank in ranks:
            rank.agreement.execute(orders)
    raise AssertionError("no end")


def restore(ranks: list[Rank], layers: Layers) -> list[Future[Any]]:
    futures = [rank.executor.submit((Restore(layers),), "by hand") for rank in ranks]
    step_until(ranks, lambda: all(future.done() for future in futures))
    return futures


def test_ranks_with_fewer_pages_decide() -> None:
    with ranks_of(3, 1, 2) as ranks:
        results = [future.result() for future in restore(ranks, (4, 5, 6))]
        assert results == [(Change("deferred", (4,), (5, 6)),)] * 3
        assert [rank.layers.full for rank in ranks] == [{4}] * 3
        assert [rank.layers.pages for rank in ranks] == [2, 0, 1]


def test_a_rank_that_fails_to_prepare_takes_all_back() -> None:
    with ranks_of(3, 3) as ranks:
        ranks[1].layers.fails = True
        first, second = restore(ranks, (4, 5))
        with pytest.raises(StateError, match="rank 1: CapacityError: host memory is full"):
            first.result()
        with pytest.raises(CapacityError):
            second.result()
        assert [rank.layers.full for rank in ranks] == [set(), set()]
        assert [rank.layers.pages for rank in ranks] == [3, 3]
        ranks[1].layers.fails = False
        assert [future.result()[0].layers for future in restore(ranks, (4, 5))] == [(4, 5), (4, 5)]


def test_deferred_layers_are_retried_by_all_ranks_together() -> None:
    with ranks_of(0, 0) as ranks:
        restore(ranks, (4, 5))
        assert [rank.layers.waiting for rank in ranks] == [(4, 5)] * 2
        for rank in ranks:
            rank.layers.pages = 2
            rank.executor.retry()  # pages came free: each proposes, and one job comes of it
        step_until(ranks, lambda: all(rank.layers.full == {4, 5} for rank in ranks))
        step_until(ranks, lambda: all(len(rank.outcomes) == 2 for rank in ranks))
        assert [rank.outcomes[-1].why for rank in ranks] == [RETRY, RETRY]
