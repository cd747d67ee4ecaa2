"""What a drop would cost is known before it is done, and is what it did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.control.status import FleetEvent
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.exchange import LIVE
from elastic.cluster.fleet.groups.flip import ExchangeForm
from elastic.cluster.fleet.groups.group import Shape
from elastic.cluster.fleet.groups.price import HOP_S, learned_cost, slowdown, step_waits
from elastic.cluster.fleet.overload.offers import MOVED
from elastic.cluster.fleet.records.requests import new_record
from elastic.config import Overload
from elastic.controller.policies.action_costs import PRIORS, WEIGHT, ActionCost
from elastic.controller.policies.arbiter import DISTURBANCE, HORIZON_S
from elastic.engines.base import Request
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ElasticError
from elastic.memory.rate_limit import YieldingPace
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost, ModelCost
from elastic.types import MigrateKV
from support.cluster.fake_group import ALONE, LAYERS, SECTOR, GroupRank
from support.cluster.fake_group import WEIGHT as PAGES
from support.cluster.fake_rank import FakeLauncher
from support.serving.generations import Collector

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
    planned = fleet.drop(3 * PAGES * 4096, dry_run=True, layers_per_step=1)
    price = planned.price
    assert price is not None
    assert (price.relieved_bytes, price.flips, price.slower) == (planned.freed_bytes, 3, 0.0)
    assert planned.moved_bytes == price.wire_bytes == 3 * ALONE * SECTOR * 4096
    copying_s = DISTURBANCE * PRIOR.byte_s * price.wire_bytes
    assert price.seconds == pytest.approx(copying_s + 3 * PRIOR.pause_s)
    assert fleet.groups() == ()
    done = fleet.drop(3 * PAGES * 4096)
    assert (done.flips, done.freed_bytes, done.price) == (price.flips, price.relieved_bytes, None)


def test_a_drop_of_several_layers_at_a_pause_costs_fewer_pauses(fleet: Fleet) -> None:
    planned = {most: fleet.drop(6 * PAGES * 4096, dry_run=True, layers_per_step=most).price for most in (1, 2, 3, None)}
    pauses = {most: price.flips for most, price in planned.items() if price is not None}
    assert pauses == {1: 6, 2: 4, 3: 2, None: 2}
    copying_s = DISTURBANCE * PRIOR.byte_s * 6 * ALONE * SECTOR * 4096
    seconds = {most: price.seconds - copying_s for most, price in planned.items() if price is not None}
    assert seconds == pytest.approx({most: count * PRIOR.pause_s for most, count in pauses.items()})


def test_a_larger_drop_costs_more_and_a_second_one_what_it_adds(fleet: Fleet) -> None:
    prices = [fleet.drop(count * PAGES * 4096, dry_run=True).price for count in (1, 2, 4, 6)]
    seconds = [price.seconds for price in prices if price is not None]
    assert len(seconds) == 4
    assert seconds == sorted(set(seconds))
    fleet.drop(4 * PAGES * 4096)
    more = fleet.drop(2 * PAGES * 4096, dry_run=True).price
    assert more is not None
    assert (more.relieved_bytes, more.flips) == (2 * PAGES * 4096, 2)


def state(fleet: Fleet) -> Any:
    """All that a dry run must not change."""
    ranks = [instance.client for instance in fleet._dispatcher.instances.values()]
    books = [(set(rank.resident), rank.path, dict(rank.guests), set(rank.stages), rank.cap) for rank in ranks]
    return books, fleet.groups(), fleet.status().totals, [event.kind for event in fleet.events()]


VERBS: dict[str, Callable[..., Any]] = {
    "drop": lambda fleet, **dry: fleet.drop(layers={"r0": range(3, LAYERS), "r1": [0]}, **dry),
    "migrate": lambda fleet, **dry: fleet.migrate("r0", [1, 2], "r1", **dry),
    "replicate": lambda fleet, **dry: fleet.replicate("r0", range(2), "r1", **dry),
    "restore": lambda fleet, **dry: fleet.restore(**dry),
    "restore a rank's": lambda fleet, **dry: fleet.restore("r1", sharing=True, **dry),
}


@pytest.mark.parametrize("verbs", [["drop", "restore"], ["drop", "migrate", "restore a rank's"], ["replicate"]])
def test_what_a_dry_run_says_is_what_is_done_and_it_changes_nothing(fleet: Fleet, verbs: list[str]) -> None:
    for instance in fleet._dispatcher.instances.values():
        rank: Any = instance.client
        rank.committed = 2
    for verb in verbs:
        before = state(fleet)
        planned = VERBS[verb](fleet, dry_run=True)
        assert state(fleet) == before
        assert (planned.status, planned.price.flips > 0, planned.price.seconds > 0) == ("planned", True, True)
        assert planned.seconds == pytest.approx(
            PRIOR.byte_s * planned.price.wire_bytes + learned_cost(fleet.events()).pause_s * planned.price.flips
        )
        done = VERBS[verb](fleet)
        assert done.status == "applied"
        assert (done.flips, done.fetched_bytes) == (planned.flips, planned.fetched_bytes)
        assert getattr(done, "freed_bytes", 0) == getattr(planned, "freed_bytes", 0)
        assert planned.price.relieved_bytes == getattr(planned, "freed_bytes", 0) - planned.fetched_bytes


def test_replicas_take_the_keys_and_values_of_half_of_the_requests(fleet: Fleet) -> None:
    planned = fleet.replicate("r0", range(4), "r1", dry_run=True)
    assert planned.moved_bytes == 4 * ALONE * SECTOR * 4096 // 2
    assert (planned.flips, planned.layers) == (4, (0, 1, 2, 3))
    whole = fleet.migrate("r0", range(4), "r1", dry_run=True)
    assert (whole.moved_bytes, whole.flips, whole.fetched_bytes) == (2 * planned.moved_bytes, 4, 0)


def test_a_dry_run_is_refused_as_the_verb_is(fleet: Fleet) -> None:
    for wrong in (
        lambda: fleet.drop(layers={"r0": range(LAYERS), "r1": [0]}, dry_run=True),
        lambda: fleet.migrate("r0", [LAYERS], "r1", dry_run=True),
        lambda: fleet.replicate("r0", [0], "r0", dry_run=True),
        lambda: fleet.restore("r9", dry_run=True),
    ):
        with pytest.raises(ElasticError):
            wrong()
    nothing = fleet.restore(dry_run=True)
    assert (nothing.status, nothing.flips, nothing.price.seconds if nothing.price else None) == ("planned", 0, 0.0)


def test_a_plan_prices_each_mechanism_and_that_layers_return(fleet: Fleet) -> None:
    def of(need: int) -> dict[str, Any]:
        before = state(fleet)
        offers = {offer.kind: offer for offer in fleet.plan(need)}
        assert state(fleet) == before
        return offers

    layer = PAGES * 4096
    assert list(of(layer)) == ["move", "drop", "add"], "no rank has variants, and layers are not cut"
    assert fleet.drop(2 * layer).status == "applied"
    offers = of(layer)
    planned = fleet.restore(dry_run=True)
    assert planned.price is not None
    assert offers["restore"].relieved_bytes == planned.price.relieved_bytes == -planned.fetched_bytes == -2 * layer
    assert offers["restore"].seconds == planned.price.seconds


def test_a_plan_prices_as_the_policy_of_the_fleet_compares() -> None:
    world: dict[str, GroupRank] = {}
    launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world))
    policy = Overload(tick_s=3600.0, kv_high=0.8, restore_below=0.4, partial=True, most_stages=2, layers_per_step=1)
    with Fleet(
        "no model", ranks=3, launch=launcher, policy=policy, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False
    ) as fleet:
        layer, model = PAGES * 4096, PAGES * 4096 * LAYERS
        fleet.start_s = 4.0
        offers = {offer.kind: offer for offer in fleet.plan(2 * layer)}
        planned = fleet.drop(2 * layer, most=2, layers_per_step=1, dry_run=True)
        assert planned.price is not None
        assert (offers["drop"].seconds, offers["drop"].relieved_bytes) == (planned.price.seconds, 2 * layer)
        assert offers["add"].seconds == 4.0
        assert "drop" not in {offer.kind for offer in fleet.plan(model + layer)}, "of three instances"
        assert fleet.drop(model + layer, dry_run=True).status == "planned"
        moved = 0.8 * sum(i.load.total_blocks for i in fleet.status().instances)
        assert (
            offers["move"].relieved_bytes
            <= moved * next(iter(fleet._dispatcher.instances.values())).kv_format.group_block_bytes
        )


def test_a_plan_prices_that_ranks_share_their_layers() -> None:
    world: dict[str, GroupRank] = {}
    launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world, 4, 4))
    with Fleet("no model", ranks=4, launch=launcher, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False) as fleet:
        two, four = (fleet.reshard([f"r{i}" for i in range(tp)], tp=tp, dry_run=True) for tp in (2, 4))
        for need, planned in ((1, two), (two.freed_bytes + 1, four), (1 << 40, four)):
            (offer,) = [offer for offer in fleet.plan(need) if offer.kind == "reshard"]
            assert planned.price is not None
            assert (offer.relieved_bytes, offer.seconds) == (planned.freed_bytes, planned.price.seconds)
        assert fleet.groups() == ()


def test_pauses_and_copies_are_learned_from_what_was_done() -> None:
    def event(kind: Any, stalled_ms: float, moved_bytes: int = 0, copy_s: float = 0.0) -> FleetEvent:
        return FleetEvent(0, kind, 0.0, stalled_ms=stalled_ms, moved_bytes=moved_bytes, copy_s=copy_s)

    assert learned_cost([]) == PRIOR
    assert learned_cost([event("moved", 50.0), event("restored", 0.0)]) == PRIOR
    learned = learned_cost([event("dropped", 9.0)])
    assert learned.pause_s == pytest.approx(PRIOR.pause_s + WEIGHT * (9e-3 - PRIOR.pause_s))
    assert learned.byte_s == PRIOR.byte_s
    moves = [event("moved", 0.0, 1000, 2.0), event("moved", 0.0, 0, 9.0), event("dropped", 0.0, 1, 1.0)]
    assert learned_cost(moves, MOVED) == ActionCost(PRIOR.byte_s + WEIGHT * (2e-3 - PRIOR.byte_s), PRIOR.pause_s)


@pytest.mark.parametrize("verb", ["drop", "restore"])
def test_the_price_has_copies_as_earlier_ones_took_them(fleet: Fleet, verb: str) -> None:
    def price() -> Any:
        return VERBS[verb](fleet, dry_run=True).price

    if verb == "restore":
        VERBS["drop"](fleet)
    fleet._dispatcher.instances["r0"].client.step_s = 0.02
    record = new_record(Request((1, 2), 9), Collector(), time.perf_counter())
    fleet._dispatcher.instances["r0"].records = {record.request.id: record}
    record.answers[0].tokens.append(5)
    before, byte_s = price(), 1e-6
    target = Shape({name: LayerPath(name, (name,) * LAYERS) for name in ("r0", "r1")}, {})
    for what in ("kv", "weights"):
        fleet._groups.dry_runs.learn(LIVE, target, what, 1000, 1000 * byte_s)
    after = price()
    fleet._dispatcher.instances["r0"].records = {}
    assert before.wire_bytes > 0
    prior_s = (1 + YieldingPace.PATIENCE) * PRIOR.byte_s
    learned_s = DISTURBANCE * (byte_s - prior_s) * before.wire_bytes if verb == "restore" else 0.0
    assert after.seconds == pytest.approx(before.seconds + learned_s, rel=1e-9), "of copies that come home alone"


DECODE = Chunk("", 0, 1)
LAYER, REST = ChunkCost(0.0, 0.0, 1e-3, 0.0, 0.0), ChunkCost(0.0, 0.0, 5e-4, 0.0, 0.0)
MODEL = ModelCost(LAYER, REST, 2)


def shape(*paths: tuple[str, ...]) -> Shape:
    return Shape({name: LayerPath(name, ranks) for name, ranks in zip("ab", paths, strict=True)}, {})


ALONE_EACH = shape(("a", "a"), ("b", "b"))
PIPELINE = shape(("a", "b"), ("a", "b"))


def test_a_full_pipeline_computes_as_much_and_an_uneven_one_waits_for_its_busiest_rank() -> None:
    ten = [Chunk("", 0, 1)] * 100
    even = slowdown([(ALONE_EACH, PIPELINE)], {}, MODEL, {"a": ten, "b": ten})
    assert even == pytest.approx(2 * HOP_S / (100 * 2.5e-3))
    uneven = slowdown([(ALONE_EACH, shape(("a", "a"), ("a", "b")))], {}, MODEL, {"a": ten, "b": ten})
    assert uneven == pytest.approx(3.5 / 2.5 - 1)  # three layers of two, and what is around two


def test_a_change_waits_for_steps_around_it_and_in_each_round_of_flips() -> None:
    live, one, stall = ExchangeForm(), ExchangeForm(layers_per_step=1), ExchangeForm(exchange="stall")
    both = shape(("b", "b"), ("b", "b"))
    waits = {
        form: (step_waits(ALONE_EACH, both, form), step_waits(both, ALONE_EACH, form)) for form in (live, one, stall)
    }
    assert waits == {live: (2 + 3, 2 + 3), one: (2 + 2 * 3, 2 + 2 * 3), stall: (3, 3)}
    assert step_waits(PIPELINE, both, live) == 1 + 3, "what is connected stays so"


def test_steps_are_no_longer_where_nothing_runs() -> None:
    assert slowdown([(ALONE_EACH, PIPELINE)], {}, MODEL, {}) == 0.0


def seen(**step_s: float) -> dict[str, Room]:
    """Ranks alone, by the seconds that steps took there."""
    return {n: Room(LayerPath(n, (n, n)), 0, 4096, (), 0, 0, (), (), frozenset(), step_s=s) for n, s in step_s.items()}


def test_steps_are_longer_by_hops_as_ranks_saw_them() -> None:
    running = {"a": [DECODE], "b": [DECODE]}
    rooms = seen(a=0.02, b=0.02)
    rooms = {name: replace(room, hop_s=hop_s) for (name, room), hop_s in zip(rooms.items(), (4e-3, 2e-3), strict=True)}
    for model, step_s in ((None, 0.02), (MODEL, 2.5e-3)):
        assert slowdown([(ALONE_EACH, PIPELINE)], rooms, model, running) == pytest.approx(2 * 3e-3 / step_s)


@pytest.mark.parametrize("idle", [False, True])
def test_without_a_measured_cost_steps_are_longer_by_the_hops_of_the_last_ones(idle: bool) -> None:
    running = {"a": [Chunk("", 0, 1)] * 3, "b": [] if idle else [Chunk("", 0, 1)]}
    assert slowdown([(ALONE_EACH, PIPELINE)], seen(a=0.02, b=0.02), None, running) == pytest.approx(2 * HOP_S / 0.02)


def test_the_last_steps_say_that_an_uneven_pipeline_waits_for_its_busiest_rank() -> None:
    one = {"a": [Chunk("", 0, 1)], "b": [Chunk("", 0, 1)]}
    uneven = [(ALONE_EACH, shape(("a", "a"), ("a", "b")))]
    assert slowdown(uneven, seen(a=0.02, b=0.02), None, one) == pytest.approx(0.5)
    assert slowdown(uneven, seen(a=0.02, b=0.0), None, one) == 0.0
    assert slowdown(uneven, seen(a=0.0, b=0.0), None, one) == 0.0


def test_the_last_steps_say_of_no_change_that_steps_become_shorter() -> None:
    one = {"a": [Chunk("", 0, 1)], "b": []}
    assert slowdown([(PIPELINE, ALONE_EACH)], seen(a=0.02, b=0.02), None, one) == 0.0


@pytest.mark.parametrize("measured", [True, False])
def test_the_price_of_a_drop_has_the_longer_steps(fleet: Fleet, measured: bool) -> None:
    idle = fleet.drop(3 * PAGES * 4096, dry_run=True)
    without = idle.price
    instance = fleet._dispatcher.instances["r0"]
    if measured:
        instance.hello = replace(instance.hello, cost=replace(MODEL, layers=LAYERS))
    else:
        instance.client.step_s = 0.02
    record = new_record(Request((1, 2), 9), Collector(), time.perf_counter())
    record.answers[0].tokens.append(5)
    instance.records = {record.request.id: record}
    loaded = fleet.drop(3 * PAGES * 4096, dry_run=True)
    longer = loaded.price
    instance.records = {}
    assert without is not None
    assert longer is not None
    assert longer.slower > without.slower == 0.0
    behind_steps_s = YieldingPace.PATIENCE * PRIOR.byte_s * idle.moved_bytes
    longer_s = HORIZON_S * longer.slower + DISTURBANCE * behind_steps_s
    assert longer.seconds == pytest.approx(without.seconds + longer_s)
    step_s = MODEL.layer.batch([DECODE]) * LAYERS + MODEL.rest.batch([DECODE]) if measured else 0.02
    assert loaded.seconds == pytest.approx(idle.seconds + 5 * step_s + behind_steps_s)
