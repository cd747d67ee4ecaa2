"""Swaps against an overload on ranks with models: what is promised comes, and what was swapped returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.overload.swaps import Swaps
from elastic.config import Overload
from elastic.controller.fleet_snapshot import FleetSnapshot, GroupReading, MemberReading
from elastic.controller.policies.arbiter import HORIZON_S, QUALITY_S
from elastic.engines.base import Request
from elastic.planning.arrangement.stages import Held
from support import architectures
from support.lossless_variant import HALF, exact
from support.processes import wait_until
from support.serving.generations import Collector, continuation, prompts, serve
from support.wrapped_model import assert_same_bits, bits, small

AT_ONCE = Overload(recovery_ticks=2, dwell_s=0.0)


@pytest.fixture
def models(wrapped: Any) -> list[Any]:
    build = architectures.build
    return [
        wrapped(exact(build("qwen3")), small(4 << 20, "cpu#0"), variants=[HALF]),
        wrapped(exact(build("qwen3")), small(4 << 20, "cpu#1")),
    ]


@pytest.fixture
def fleet(models: list[Any]) -> Iterator[Fleet]:
    with Fleet.of(*models, engine={"block_tokens": 8, "max_batch_tokens": 64}, beat_timeout_s=60) as fleet:
        yield fleet


def seen(fleet: Fleet, waiting: dict[str, int], queued: int = 0, used: int = 100, at_s: float = 0.0) -> FleetSnapshot:
    """A fleet of which each instance is full, and so many bytes wait at it."""
    layers = fleet.layer_bytes()
    groups = [
        GroupReading((MemberReading(Held(name, frozenset(range(len(layers)))), 100),), 100, used, waiting_bytes=nbytes)
        for name, nbytes in waiting.items()
    ]
    return FleetSnapshot(at_s, tuple(groups), layers, queued_bytes=queued)


def blocks(fleet: Fleet) -> int:
    return next(each.load.total_blocks for each in fleet.status().instances if each.name == "r0")


@pytest.mark.slow
def test_as_few_layers_as_suffice_make_room_and_return_bit_for_bit(fleet: Fleet, models: list[Any]) -> None:
    swaps, before, was = Swaps(fleet, AT_ONCE), bits(models[0]), blocks(fleet)
    half = fleet.layer_bytes()[0] // 2
    plan = swaps.plan(seen(fleet, {"r0": half + 1, "r1": 0}))
    assert plan is not None
    assert {rank: swap.layers for rank, swap in plan.swaps.items()} == {"r0": (1, 2)}, "the last ones first"
    assert (plan.offer.kind, plan.offer.lossless, plan.offer.relieved_bytes) == ("swap", False, half + 1)
    assert plan.offer.seconds == pytest.approx(2 * QUALITY_S / 2, abs=0.01)
    assert swaps.do(plan, 0.0, "an overload") == ("r0",)
    assert 0.1 < swaps.settled_s < 9.0
    assert swaps.done.keys() == {"r0"}
    wait_until(lambda: blocks(fleet) > was, "the memory did not come")
    prompt = prompts([20], architectures.VOCAB)[0]
    heard = serve(fleet, [request := Request(prompt, 8)])
    assert heard.tokens[request.id] == continuation(exact(architectures.build("qwen3")), prompt, 8)
    assert swaps.restore(seen(fleet, {"r0": 1, "r1": 0}, used=0)) == (), "somebody waits"
    assert swaps.restore(seen(fleet, {"r0": 0, "r1": 0}, used=0)) == ()
    fleet.check()
    done = swaps.done["r0"]
    done.freed_bytes = 0  # the caches of the test are made up: what would be left is all of them
    calm = seen(fleet, {"r0": 0, "r1": 0}, used=50)
    changing = replace(calm, groups=tuple(replace(group, busy=True) for group in calm.groups))
    assert [swaps.restore(changing) for _ in range(3)] == [()] * 3, "layers change their rank just now"
    assert [swaps.restore(calm) for _ in range(2)] == [(), ("r0",)]
    assert not swaps.done
    assert_same_bits(models[0], before)


@pytest.mark.slow
def test_what_can_be_swapped_at_no_rank_is_no_offer(fleet: Fleet) -> None:
    swaps = Swaps(fleet, AT_ONCE)
    assert swaps.plan(seen(fleet, {"r0": 0, "r1": 1})) is None, "r1 was wrapped without variants"
    assert swaps.plan(seen(fleet, {"r0": 0, "r1": 0})) is None, "nothing lacks"
    assert swaps.plan(seen(fleet, {"r9": 1})) is None, "it has gone"
    most = swaps.plan(seen(fleet, {"r1": 0, "r0": 0}, queued=1 << 30))
    assert most is not None
    assert most.offer.relieved_bytes == sum(fleet.layer_bytes()) // 2
    swaps.do(most, 0.0, "an overload")
    assert swaps.plan(seen(fleet, {"r0": 1 << 20})) is None, "no layer is left"
    swaps.restore(seen(fleet, {"r1": 0}))
    assert not swaps.done, "a rank that is not there any more has nothing to return"


@pytest.mark.slow
def test_each_remedy_has_a_price_before_there_is_an_overload(fleet: Fleet) -> None:
    (layer, *_), before = fleet.layer_bytes(), fleet.status()
    offers = {offer.kind: offer for offer in fleet.plan(layer // 2)}
    assert list(offers) == ["move", "drop", "swap", "add"]
    assert {kind for kind, offer in offers.items() if not offer.lossless} == {"swap"}
    assert offers["swap"].relieved_bytes == layer // 2
    assert offers["swap"].seconds == pytest.approx(QUALITY_S / 2, abs=0.01)
    planned = fleet.drop(layer // 2, whole=True, dry_run=True)  # as the policy does by default
    assert planned.price is not None
    assert (offers["drop"].seconds, offers["drop"].relieved_bytes) == (planned.price.seconds, planned.freed_bytes)
    assert 0 < offers["move"].seconds < offers["add"].seconds
    assert planned.price.slower == 0.0, "nothing runs"
    after = fleet.status()
    assert (after.totals, [rank.dropped for rank in after.ranks]) == (before.totals, [(), ()]), "nothing was done"
    kinds = [offer.kind for offer in fleet.plan("1GiB")]
    assert "drop" not in kinds, "no drop frees so much"


@pytest.mark.slow
def test_a_drop_is_dearer_while_requests_run_whose_steps_would_be_longer(fleet: Fleet) -> None:
    heard = Collector()
    request = Request(prompts([20], architectures.VOCAB)[0], 400)
    fleet.submit(request, heard)
    heard.wait_for_tokens(request.id, 8)
    price = fleet.drop(sum(fleet.layer_bytes()), dry_run=True).price
    fleet.cancel(request.id)
    heard.wait([request.id])
    assert price is not None
    assert price.slower > 0
    assert price.seconds > HORIZON_S * price.slower
