"""What a drop would cost is known before it is done, and is what it did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic.cluster.control.status import FleetEvent
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.price import learned_cost
from elastic.controller.policies.action_costs import PRIORS, WEIGHT
from elastic.controller.policies.arbiter import CostWeights
from elastic.types import MigrateKV
from support.cluster.fake_group import ALONE, SECTOR, GroupRank
from support.cluster.fake_group import WEIGHT as PAGES
from support.cluster.fake_rank import FakeLauncher

PRIOR = PRIORS[MigrateKV]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    world: dict[str, GroupRank] = {}
    launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world))
    made = Fleet("no model", ranks=2, launch=launcher, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False)
    made.start()
    yield made
    made.stop(drain=False)


def test_a_drop_costs_the_kv_of_its_layers_and_a_pause_for_each(fleet: Fleet) -> None:
    planned = fleet.drop(3 * PAGES * 4096, dry_run=True)
    price = planned.price
    assert price is not None
    assert (price.relieved_bytes, price.flips, price.slower) == (planned.freed_bytes, 3, 0.0)
    assert planned.moved_bytes == price.wire_bytes == 3 * ALONE * SECTOR * 4096
    copying_s = CostWeights().disturbance * PRIOR.byte_s * price.wire_bytes
    assert price.seconds == pytest.approx(copying_s + 3 * PRIOR.pause_s)
    assert fleet.groups() == ()
    done = fleet.drop(3 * PAGES * 4096)
    assert (done.flips, done.freed_bytes, done.price) == (price.flips, price.relieved_bytes, None)


def test_a_larger_drop_costs_more_and_a_second_one_what_it_adds(fleet: Fleet) -> None:
    prices = [fleet.drop(count * PAGES * 4096, dry_run=True).price for count in (1, 2, 4, 6)]
    seconds = [price.seconds for price in prices if price is not None]
    assert len(seconds) == 4
    assert seconds == sorted(set(seconds))
    fleet.drop(4 * PAGES * 4096)
    more = fleet.drop(2 * PAGES * 4096, dry_run=True).price
    assert more is not None
    assert (more.relieved_bytes, more.flips) == (2 * PAGES * 4096, 2)


def test_pauses_are_learned_from_what_was_done() -> None:
    def event(kind: Any, stalled_ms: float) -> FleetEvent:
        return FleetEvent(0, kind, 0.0, stalled_ms=stalled_ms)

    assert learned_cost([]) == PRIOR
    assert learned_cost([event("moved", 50.0), event("restored", 0.0)]) == PRIOR
    learned = learned_cost([event("dropped", 9.0)])
    assert learned.pause_s == pytest.approx(PRIOR.pause_s + WEIGHT * (9e-3 - PRIOR.pause_s))
    assert learned.byte_s == PRIOR.byte_s
