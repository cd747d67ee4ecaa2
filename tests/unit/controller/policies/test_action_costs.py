"""Prices of actions are learned from what earlier ones did cost."""

from __future__ import annotations

import pytest

from elastic.controller.policies.action_costs import PRIORS, ActionCost, ActionCosts
from elastic.types import Action, Event, Migrate, Release, Swap


def event(number: int, action: Action, moved: int, prepare_ms: float, pause_ms: float, ok: bool = True) -> Event:
    return Event(number, action, 0.0, "", moved, 0, prepare_ms, 0.0, pause_ms, ok, "applied")


def test_prices_go_towards_what_was_seen() -> None:
    swap = Swap((0,), "int4")
    before = ActionCosts()
    after = before.learned([event(0, swap, 1000, 1.0, 5.0), event(1, Migrate((0,), "b"), 0, 9.0, 3.0)])
    prior = PRIORS[Swap]
    expected = ActionCost(prior.byte_s + (1e-6 - prior.byte_s) / 4, prior.pause_s + (5e-3 - prior.pause_s) / 4)
    assert after.by_kind[Swap].byte_s == pytest.approx(expected.byte_s)
    assert after.by_kind[Swap].pause_s == pytest.approx(expected.pause_s)
    assert after.by_kind[Migrate].byte_s == PRIORS[Migrate].byte_s  # nothing was copied: nothing is known of a byte
    assert after.by_kind[Release] == PRIORS[Release]
    assert before == ActionCosts()


def test_an_event_teaches_once_and_a_failed_one_nothing() -> None:
    events = [event(0, Swap((0,), "int4"), 1000, 1.0, 5.0), event(1, Swap((1,), "int4"), 1000, 9.0, 9.0, ok=False)]
    once = ActionCosts().learned(events)
    assert once.event == 1
    assert once.learned(events) is once
    assert once.by_kind == ActionCosts().learned(events[:1]).by_kind


def test_prices_settle_on_what_is_always_seen() -> None:
    prices = ActionCosts()
    for number in range(60):
        prices = prices.learned([event(number, Swap((0,), "int4"), 1000, 2.0, 4.0)])
    assert prices.by_kind[Swap] == ActionCost(pytest.approx(2e-6), pytest.approx(4e-3))  # type: ignore[arg-type]
