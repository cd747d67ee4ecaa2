"""Ranks with unlike memory: layers stay where there is room for them and for what live requests have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic import CapacityError
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.overload.readings import FleetReadings
from elastic.engines.base import Request
from elastic.planning.arrangement.drop import drop_plan
from support import architectures
from support.cluster.fake_group import LAYERS, SECTOR, WEIGHT, GroupRank
from support.cluster.fake_rank import FakeLauncher
from support.serving.generations import Collector, is_continuation, prompts
from support.wrapped_model import tight

MODEL_BYTES = LAYERS * WEIGHT * 4096
SMALL, LARGE = 4, 40
"""Sectors that the ranks have by themselves."""


@pytest.fixture
def ranks() -> dict[str, GroupRank]:
    return {}


@pytest.fixture
def fleet(ranks: dict[str, GroupRank]) -> Iterator[Fleet]:
    """A small rank and a large one, whose requests have nearly all and do not end."""
    launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, ranks))
    made = Fleet("no model", ranks=2, launch=launcher, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False)
    made.start()
    made._policies.stop()
    for name, sectors, committed in (("r0", SMALL, 2), ("r1", LARGE, LARGE - 2)):
        ranks[name].budget = LAYERS * WEIGHT + sectors * SECTOR * LAYERS
        ranks[name].committed, ranks[name].stuck = committed, True
    yield made
    made.stop(drain=False)


def test_a_drop_leaves_a_small_rank_the_layers_that_it_has_room_for(fleet: Fleet, ranks: dict[str, GroupRank]) -> None:
    done = fleet.drop(MODEL_BYTES, timeout_s=0.2)
    assert done.status == "applied", done.why
    assert [len(ranks[name].resident) for name in ("r0", "r1")] == [1, LAYERS - 1]
    for rank in ranks.values():
        rank.check()


def test_the_policy_of_drops_plans_so_too(fleet: Fleet, ranks: dict[str, GroupRank]) -> None:
    seen = FleetReadings(fleet._dispatcher).read(fleet.groups(), fleet.layer_bytes())
    assert seen is not None
    groups = [[member.held for member in group.members] for group in fleet.budgets().of_all(seen).groups]
    plan = drop_plan(groups, seen.layer_bytes, MODEL_BYTES)
    assert plan is not None
    done = fleet.drop(plan=plan, timeout_s=0.2)
    assert done.status == "applied", done.why
    assert len(ranks["r0"].resident) == 1


def test_where_no_stage_fits_nothing_is_dropped(fleet: Fleet, ranks: dict[str, GroupRank]) -> None:
    ranks["r1"].budget += 60 * SECTOR * LAYERS
    ranks["r1"].committed += 60
    with pytest.raises(CapacityError, match=r"no drop frees so much.*room for live requests"):
        fleet.drop(MODEL_BYTES, timeout_s=0.2)
    assert fleet.groups() == ()


@pytest.mark.slow
def test_long_answers_go_on_while_layers_leave_a_small_rank_and_a_large_one(wrapped: Any) -> None:
    models = []
    for number, pages in enumerate((600, 42)):
        place = replace(tight(architectures.build("qwen3"), pages), name=f"cpu#{number}")
        models.append(wrapped(architectures.build("qwen3"), place))
    heard, requests = Collector(), [Request(prompt, 420) for prompt in prompts([40] * 2, architectures.VOCAB)]
    with Fleet.of(*models, engine={"block_tokens": 8, "max_batch_tokens": 64}, beat_timeout_s=60) as fleet:
        for request in requests:
            fleet.submit(request, heard)
            heard.wait_for_tokens(request.id, 2)
            assert fleet.instance_of(request.id) == "r0", "it does not fit the other one"
        done = fleet.drop(sum(fleet.layer_bytes()), timeout_s=0.2)
        assert done.status == "applied", done.why
        assert len(models[1].elastic.dropped) > len(models[0].elastic.dropped)
        heard.wait([request.id for request in requests])
        assert fleet.restore().status == "applied"
        fleet.check()
    plain = architectures.build("qwen3")
    for request in requests:
        assert is_continuation(plain, request.prompt, 420, heard.tokens[request.id])
