"""Totals of actions, of which runtimes remember only the last ones."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.server.generation.collector import ActionTotals, Families
from elastic.types import Event, Release


def events(ids: Sequence[int], since_s: float) -> list[Event]:
    return [Event(n, Release((0,)), since_s + n, "", 0, 0, 0.0, 0.0, 0.0, True, "applied") for n in ids]


def counted(totals: ActionTotals) -> float:
    actions, *_ = totals.collect(Families("m", ("instance", "rank")))
    return sum(sample.value for sample in actions.samples if sample.name.endswith("_total"))


def test_each_action_counts_once_in_whatever_order_scrapes_come() -> None:
    totals = ActionTotals()
    for ids, count in (([0, 1], 2), ([0, 1, 2, 3], 4), ([0, 1, 2], 4), ([], 4), ([3, 4], 5), ([4], 5)):
        totals.add(("i", "a"), events(ids, 100.0))
        assert counted(totals) == count


def test_a_rank_that_begins_anew_under_its_name_counts_on() -> None:
    totals = ActionTotals()
    for ids, since_s, count in (([0, 1, 2], 100.0, 3), ([0], 200.0, 4), ([0, 1], 200.0, 5), ([0, 1], 300.0, 7)):
        totals.add(("i", "a"), events(ids, since_s))
        assert counted(totals) == count
