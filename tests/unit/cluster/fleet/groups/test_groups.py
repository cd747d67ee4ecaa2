"""Instances drop layers, compute them for each other and take them back, over ranks that only keep their books."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic import CapacityError, ConfigError, StateError
from elastic.cluster.control.stage_questions import (
    AttachStage,
    BeginExchange,
    CopyLayers,
    FlipLayers,
    LosePeer,
    MeetPeers,
    OpenPeers,
    OpenStage,
    PrepareLayers,
    Recover,
    Room,
    SetCap,
    WeightDigests,
)
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.group import Shape
from elastic.cluster.fleet.groups.targets import shape_keeping
from elastic.cluster.fleet.groups.transition import Books, most_coming, plan_transition
from elastic.cluster.fleet.records.requests import new_record
from elastic.engines.base import Request, Sampling
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ElasticError, NotFound, RankLost
from support.cluster.fake_group import ALONE, KV, LAYERS, SECTOR, WEIGHT, GroupRank, whole
from support.cluster.fake_rank import FakeLauncher
from support.cluster.rounds import layers_of_pauses, needed_at
from support.serving.generations import Collector

LAYER_BYTES = WEIGHT * 4096


def make(ranks: int) -> tuple[Fleet, list[GroupRank]]:
    world: dict[str, GroupRank] = {}
    launcher = FakeLauncher(lambda spec: GroupRank(spec.name, world))
    options: dict[str, Any] = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False}
    fleet = Fleet("no model", ranks=ranks, launch=launcher, **options)
    fleet.start()
    fleet._policies.stop()  # caps follow what is needed when a test says so
    return fleet, [world[name] for name in sorted(world)]


@pytest.fixture
def fleets() -> Iterator[Callable[[int], tuple[Fleet, list[GroupRank]]]]:
    made = []

    def fleet(ranks: int = 2) -> tuple[Fleet, list[GroupRank]]:
        made.append(make(ranks))
        return made[-1]

    yield fleet
    for each, _ in made:
        each.stop(drain=False)


def kinds(fleet: Fleet) -> list[str]:
    return [event.kind for event in fleet.events() if event.kind != "joined"]


def assert_alone(fleet: Fleet, ranks: list[GroupRank]) -> None:
    assert fleet.groups() == ()
    for rank in ranks:
        rank.check()
        assert rank.path.helpers == ()
        assert rank.resident == set(range(LAYERS))
        assert (rank.guests, rank.stages, rank.cap) == ({}, set(), None)


def test_full_instances_drop_half_of_their_layers_each_and_take_them_back(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    dropped = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    assert dropped.status == "applied"
    assert dropped.freed_bytes == 6 * LAYER_BYTES
    assert dropped.flips == 6
    assert a.path.ranks == b.path.ranks == ("r0",) * 3 + ("r1",) * 3
    (group,) = fleet.groups()
    assert group.keeps == {"r0": (0, 1, 2), "r1": (3, 4, 5)}
    for rank in (a, b):
        assert rank.cap is not None
        assert rank.cap >= ALONE * 1.15
        rank.fill()
        assert rank.committed == rank.cap
        rank.check()
    assert a.free() < 2 * LAYERS  # the pages are used
    restored = fleet.restore()
    assert (restored.status, restored.members, restored.flips) == ("applied", ("r0", "r1"), 6)
    assert restored.fetched_bytes == 6 * LAYER_BYTES
    assert_alone(fleet, [a, b])
    assert kinds(fleet) == ["dropped", "parted", "restored"]


def test_a_need_in_bytes_drops_as_few_layers_as_suffice(fleets: Any) -> None:
    fleet, ranks = fleets(2)
    assert fleet.layer_bytes() == (LAYER_BYTES,) * LAYERS
    planned = fleet.drop(2 * LAYER_BYTES - 5, dry_run=True)
    assert (planned.status, planned.freed_bytes, planned.flips) == ("planned", 2 * LAYER_BYTES, 2)
    assert_alone(fleet, ranks)
    dropped = fleet.drop(2 * LAYER_BYTES - 5)
    assert (dropped.status, dropped.freed_bytes, dropped.flips) == ("applied", 2 * LAYER_BYTES, 2)
    more = fleet.drop(2 * LAYER_BYTES)
    assert (more.status, more.freed_bytes) == ("applied", 2 * LAYER_BYTES)
    for rank in ranks:
        rank.check()
    assert sum(len(rank.resident) for rank in ranks) == 2 * LAYERS - 4
    with pytest.raises(CapacityError, match="no drop frees so much"):
        fleet.drop(3 * LAYER_BYTES)
    fleet.restore("r1")
    assert_alone(fleet, ranks)


def test_no_drop_is_planned_where_every_rank_was_just_lost(fleets: Any) -> None:
    fleet, ranks = fleets(2)
    fleet.layer_bytes()  # known from then on
    for rank in ranks:
        rank.die("killed by the test")
    with pytest.raises(StateError, match="no rank serves: no drop can be planned"):
        fleet.drop(1)
    with pytest.raises(StateError, match="no rank serves"):
        fleet.budgets()


def test_how_bytes_come_free_is_said_with_the_bytes(fleets: Any) -> None:
    fleet, ranks = fleets(2)
    for options in ({"whole": True}, {"most": 2}):
        with pytest.raises(ConfigError, match="give need= with them"):
            fleet.drop(layers={"r0": [0]}, **options)
    assert_alone(fleet, ranks)


def test_two_groups_merge_into_one_of_four_when_more_is_needed(fleets: Any) -> None:
    fleet, ranks = fleets(4)
    fleet.drop(12 * LAYER_BYTES)
    assert [len(group.members) for group in fleet.groups()] == [2, 2]
    fleet.drop(6 * LAYER_BYTES)
    (group,) = fleet.groups()
    assert len(group.members) == 4
    for rank in ranks:
        rank.check()
    assert sum(len(rank.resident) for rank in ranks) == LAYERS
    assert fleet.restore().status == "applied"
    assert_alone(fleet, ranks)


def test_requests_that_do_not_end_defer_a_drop_and_a_restore(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    a.stuck = b.stuck = True
    deferred = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}, timeout_s=0.05)
    assert (deferred.status, deferred.flips) == ("deferred", 0)
    assert_alone(fleet, [a, b])
    a.stuck = b.stuck = False
    fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    caps = dict(fleet.groups()[0].caps)
    for rank in (a, b):
        rank.fill()
        rank.stuck = True
    assert fleet.restore(timeout_s=0.05).status == "deferred"
    assert dict(fleet.groups()[0].caps) == caps
    assert (a.cap, b.cap) == (caps["r0"], caps["r1"])
    for rank in (a, b):
        rank.check()
        rank.stuck = False
    assert fleet.restore().status == "applied"
    assert_alone(fleet, [a, b])


def test_room_for_one_layer_lets_full_instances_drop_though_no_request_ends(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    fleet.keep_staging()
    kept = ALONE * LAYERS // (LAYERS + 1)
    assert (a.cap, b.cap) == (kept, kept)
    a.committed = b.committed = kept
    a.stuck = b.stuck = True
    dropped = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}, timeout_s=0.05)
    assert (dropped.status, dropped.flips) == ("applied", 6)
    assert min(a.cap, b.cap) > ALONE
    for rank in (a, b):
        rank.check()
    fleet.keep_staging()
    assert min(a.cap, b.cap) > ALONE
    assert fleet.restore(timeout_s=5).status == "applied"
    assert (a.cap, b.cap) == (kept, kept)
    fleet.kill("r1")
    fleet.keep_staging()
    assert a.cap is None


def test_room_for_one_layer_stays_in_a_group_that_can_drop_more(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    fleet.keep_staging()
    for layers in range(1, 4):
        for rank in (a, b):
            rank.committed, rank.stuck = rank.cap, True
        done = fleet.drop(layers={"r0": range(6 - layers, 6), "r1": range(layers)}, timeout_s=0.05)
        assert (done.status, done.flips) == ("applied", 2)
        for rank in (a, b):
            assert rank.committed < rank.cap
            rank.check()
            left = rank.free(rank.cap)
            assert left >= rank.cap * SECTOR if layers < 3 else left < 2 * LAYERS


@settings(max_examples=100, deadline=None)
@given(
    layers=st.integers(2, 12), weight=st.integers(0, 30), sectors=st.integers(1, 60), ranks=st.integers(2, 4),
    most=st.sampled_from([1, 2, 3, None]), data=st.data(),
)  # fmt: skip
def test_equal_ranks_that_keep_room_for_a_layer_find_an_order_however_full(
    layers: int, weight: int, sectors: int, ranks: int, most: int | None, data: st.DataObject
) -> None:
    names = [f"r{number}" for number in range(ranks)]
    sizes = (2,) * layers
    pages = sectors * sum(sizes) + data.draw(st.integers(0, 20))
    every = frozenset(range(layers))
    rooms = {
        name: Room(
            LayerPath.alone(name, layers),
            pages,
            4096,
            sizes,
            10**6,
            sectors,
            (0,) * layers,
            (whole(weight),) * layers,
            every,
        )
        for name in names
    }
    now = Shape({name: rooms[name].path for name in names}, dict.fromkeys(names, every))
    books = Books(rooms, replace(KV, groups=((tuple(range(layers)), None),)), now)
    caps = {name: books.staged(name) for name in names}
    kept = {name: frozenset(layer for layer in every if layer % ranks == number) for number, name in enumerate(names)}
    target = shape_keeping(now, kept, {})
    if min(caps.values()) and min(books.caps(target).values()) >= max(caps.values()):
        transition = plan_transition(now, target, books, caps, most)
        assert transition.caps == caps
        shape = replace(now, weights={name: now.kept(name, target.weights) for name in names})
        for flips in transition.rounds:
            assert all(len(flipped) <= (most or layers) for flipped in layers_of_pauses(flips, 1).values())
            for name in names:
                assert books.free(name, shape, caps) >= needed_at(name, flips, books, shape, caps)
            for flip in flips:
                shape = shape.after(flip, target.weights)
            assert all(books.free(name, shape, caps) >= 0 for name in names)
        assert shape.paths.keys() == target.paths.keys()
        assert all(shape.paths[name].ranks == target.paths[name].ranks for name in names)


def flips_of(ranks: list[GroupRank]) -> list[list[tuple[int, ...]]]:
    """List the layers of each pause of each rank's own instance."""
    asked = [[question.path.ranks for question in rank.asked if isinstance(question, FlipLayers)] for rank in ranks]
    alone = [(rank.name,) * LAYERS for rank in ranks]
    return [
        [tuple(i for i in range(LAYERS) if a[i] != b[i]) for a, b in pairwise([begin, *paths])]
        for begin, paths in zip(alone, asked, strict=True)
    ]


def test_as_many_layers_flip_at_a_pause_as_there_is_room_for_on_both_sides(fleets: Any) -> None:
    fleet, ranks = fleets()
    fleet.keep_staging()
    for rank in ranks:
        rank.committed, rank.stuck = rank.cap, True
    dropped = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}, timeout_s=0.05)
    assert (dropped.status, dropped.flips) == ("applied", 6)
    assert flips_of(ranks) == [[(3,), (4,), (5,)], [(0,), (1,), (2,)]]
    for rank in ranks:
        rank.check()


def test_instances_that_use_little_change_all_their_layers_at_one_pause(fleets: Any) -> None:
    fleet, ranks = fleets()
    for verb in (lambda: fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}), fleet.restore):
        for rank in ranks:
            rank.asked.clear()
            rank.committed = ALONE // 5
        assert verb().status == "applied"
        flips = [[each for each in rank.asked if isinstance(each, FlipLayers)] for rank in ranks]
        assert list(map(len, flips)) == [1, 1]
        assert not any(flip.hurried for each in flips for flip in each)  # nobody waits
    assert_alone(fleet, ranks)


def test_requests_that_come_as_caps_are_lowered_cost_pauses_and_not_the_drop(fleets: Any) -> None:
    fleet, ranks = fleets()
    fleet.keep_staging()

    def come(rank: GroupRank, question: Any) -> None:
        """Little is used when rooms are measured, all that there may be when the cap is to be less."""
        if isinstance(question, SetCap) and not rank.stuck:
            rank.committed, rank.stuck = rank.cap, True

    for rank in ranks:
        rank.committed, rank.fails = ALONE // 5, partial(come, rank)
    dropped = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}, timeout_s=0.05)
    assert (dropped.status, dropped.flips) == ("applied", 6)
    assert [len(flips) for flips in flips_of(ranks)] == [3, 3]
    for rank in ranks:
        rank.check()


def test_what_a_round_frees_lets_more_layers_flip_in_the_next_one() -> None:
    every, names = frozenset(range(LAYERS)), ("r0", "r1")
    sizes, weights = (
        (SECTOR,) * LAYERS,
        (whole(2 * ALONE),) * LAYERS,
    )  # weights of a layer: twice its keys and values
    pages = ALONE * LAYERS
    held = (0,) * len(sizes)
    rooms = {n: Room(LayerPath.alone(n, LAYERS), pages, 4096, sizes, 1000, ALONE, held, weights, every) for n in names}
    now = Shape({name: rooms[name].path for name in names}, dict.fromkeys(names, every))
    books = Books(rooms, KV, now)
    target = shape_keeping(now, {"r0": frozenset(range(3)), "r1": frozenset(range(3, 6))}, {})
    transition = plan_transition(now, target, books, {name: books.staged(name) for name in names})
    layers = [[(flip.home, flip.shards) for flip in flips] for flips in transition.rounds]
    assert layers == [[("r0", (3,)), ("r1", (0,))], [("r0", (4, 5)), ("r1", (1, 2))]]


def test_rounds_are_few_as_room_for_several_layers_is_kept_from_requests_that_wait() -> None:
    every, names = frozenset(range(LAYERS)), ("r0", "r1")
    weights = (whole(2 * ALONE),) * LAYERS  # of a layer: twice its keys and values
    rooms = {
        n: Room(
            LayerPath.alone(n, LAYERS),
            ALONE * LAYERS,
            4096,
            (SECTOR,) * LAYERS,
            1000,
            ALONE,
            (0,) * LAYERS,
            weights,
            every,
        )
        for n in names
    }
    shape = Shape({name: rooms[name].path for name in names}, dict.fromkeys(names, every))
    target = shape_keeping(shape, {"r0": frozenset(range(3)), "r1": frozenset(range(3, 6))}, {})
    books = Books(rooms, KV, shape)
    first = plan_transition(shape, target, books, {name: books.staged(name) for name in names}).rounds[0]
    assert most_coming(first, 1) == 1
    shape = replace(shape, weights={name: shape.kept(name, target.weights) for name in names})
    for flip in first:
        shape = shape.after(flip, target.weights)
    books = Books({n: replace(rooms[n], path=shape.paths[n], resident=shape.weights[n]) for n in names}, KV, shape)
    plans = [plan_transition(shape, target, books, books.caps(shape, staging=staging)) for staging in (1, 2)]
    assert [len(plan.rounds) for plan in plans] == [2, 1]
    assert all(alone > books.staged(name) for plan in plans for name, alone in plan.caps.items())


@pytest.mark.parametrize(("most", "pauses"), [(1, 3), (2, 2), (3, 1), (None, 1)])
def test_no_more_layers_flip_at_a_pause_than_is_asked(fleets: Any, most: int | None, pauses: int) -> None:
    fleet, ranks = fleets()
    fleet.keep_staging()
    for rank in ranks:
        rank.committed = rank.cap
        rank.budget += 3 * ALONE * SECTOR
    fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}, layers_per_step=most)
    assert [len(layers) for layers in flips_of(ranks)] == [pauses, pauses]
    assert all(len(layers) <= (most or LAYERS) for flips in flips_of(ranks) for layers in flips)
    for rank in ranks:
        rank.check()


def test_a_flip_beside_one_that_fails_is_done(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    b.fails = lambda question: StateError("the copy failed") if isinstance(question, FlipLayers) else None
    partial = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}, layers_per_step=1)
    assert (partial.status, partial.flips, partial.freed_bytes) == ("partial", 1, LAYER_BYTES)
    assert (len(a.path.helpers), b.path.helpers) == (1, ())
    for rank in (a, b):
        rank.check()


@pytest.mark.parametrize("question", [OpenStage, AttachStage])
def test_a_connection_that_fails_leaves_none_open(fleets: Any, question: type) -> None:
    fleet, (a, b) = fleets()
    b.fails = lambda asked: StateError("it does not connect") if isinstance(asked, question) else None
    deferred = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    assert (deferred.status, deferred.flips) == ("deferred", 0)
    assert "does not connect" in deferred.why
    assert_alone(fleet, [a, b])
    b.fails = lambda asked: None
    assert fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}).status == "applied"


def test_requests_that_wait_get_what_a_round_has_freed_before_the_next(fleets: Any) -> None:
    fleet, ranks = fleets()
    fleet.keep_staging()
    for rank in ranks:
        rank.committed, rank.stuck = rank.cap, True
        ask_for(fleet, rank, 1000)
    dropped = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}, timeout_s=0.05)
    assert (dropped.status, dropped.flips) == ("applied", 6)
    for rank in ranks:
        caps = [asked.sectors for asked in rank.asked if isinstance(asked, SetCap)]
        assert caps == sorted(caps)
        assert len(set(caps)) == 3
        exchanged = [asked for asked in rank.asked if isinstance(asked, BeginExchange | PrepareLayers | FlipLayers)]
        assert exchanged
        assert all(asked.hurried for asked in exchanged)
        rank.fill()
        rank.check()
    steps = [what for what, _ in dropped.timeline]
    assert steps[2:] == ["2 layers flipped", "4 layers flipped", "caps raised", "6 layers flipped", "caps raised"]
    assert [seconds for _, seconds in dropped.timeline] == sorted(seconds for _, seconds in dropped.timeline)


def test_layers_per_step_is_a_number(fleets: Any) -> None:
    fleet, _ = fleets()
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="layers_per_step"):
            fleet.drop(LAYER_BYTES, layers_per_step=wrong)


@pytest.mark.parametrize("question", [PrepareLayers, FlipLayers])
def test_a_flip_that_fails_leaves_a_group_that_serves_on(fleets: Any, question: type) -> None:
    fleet, (a, b) = fleets()
    seen: list[Any] = []

    def fail(asked: Any) -> Exception | None:
        if isinstance(asked, question):
            seen.append(asked)
        return StateError("the copy failed") if isinstance(asked, question) and len(seen) == 3 else None

    a.fails = b.fails = fail
    partial = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    assert (partial.status, partial.flips) == ("partial", 2)
    assert "the copy failed" in partial.why
    assert kinds(fleet) == ["drop failed"]
    for rank in (a, b):
        rank.fill()
        rank.check()
    assert fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}).status == "applied"
    assert fleet.restore().status == "applied"
    assert_alone(fleet, [a, b])


@pytest.mark.parametrize("question", [PrepareLayers, CopyLayers, FlipLayers])
def test_weights_that_came_for_a_flip_that_failed_leave_again(fleets: Any, question: type) -> None:
    fleet, (a, b) = fleets()
    fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    for rank in (a, b):
        rank.committed = 2
    had, blocks = [set(rank.resident) for rank in (a, b)], [rank.cap for rank in (a, b)]
    a.fails = b.fails = lambda asked: StateError("the copy failed") if isinstance(asked, question) else None
    restored = fleet.restore()
    assert (restored.status, restored.flips, restored.why) == ("deferred", 0, "the copy failed")
    assert restored.fetched_bytes > 0
    assert [rank.resident for rank in (a, b)] == had
    assert [rank.cap for rank in (a, b)] == blocks, "keys and values have the room that they had"
    for rank in (a, b):
        rank.fill()
        rank.check()
        rank.committed, rank.fails = 2, lambda asked: None
    assert fleet.restore().status == "applied"
    assert_alone(fleet, [a, b])


def test_weights_that_did_not_come_in_time_are_waited_for_no_more(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    for rank in (a, b):
        rank.committed = 2
    had, a.defers = set(a.resident), True
    restored = fleet.restore(timeout_s=0.05)
    assert restored.status == "deferred"
    assert "wait at rank 'r0' for pages" in restored.why
    assert a.resident == had
    assert not a.awaited, "they come later, and nobody knows of it"
    a.defers = False
    assert fleet.restore().status == "applied"
    assert_alone(fleet, [a, b])


@pytest.mark.parametrize("status", ["deferred", "partial"])
def test_a_rank_that_could_not_be_parted_from_others_is_not_removed(fleets: Any, status: str) -> None:
    fleet, (a, b) = fleets()
    fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    for rank in (a, b):
        rank.fill()
        rank.stuck = status == "deferred"
    if status == "partial":
        b.fails = lambda asked: StateError("the copy failed") if isinstance(asked, FlipLayers) else None
    with pytest.raises(StateError, match=rf"'r1' is not removed: .* others of r0, r1 \({status}: .*; try again"):
        fleet.remove("r1", timeout_s=0.05 if status == "deferred" else None)
    assert [(rank.name, rank.state) for rank in fleet.status().ranks] == [("r0", "serving"), ("r1", "serving")]
    assert (b.lost, b.ends) == (False, [])
    for rank in (a, b):
        rank.check()
        rank.stuck, rank.fails = False, lambda asked: None
    fleet.remove("r1")
    assert_alone(fleet, [a])
    assert kinds(fleet) == ["dropped", "restore failed", "parted", "restored", "removed"]


def test_layers_of_one_instance_are_computed_elsewhere_without_a_drop(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    moved = fleet.migrate("r0", (4, 5), "r1", layers_per_step=1)
    assert (moved.status, moved.flips, moved.layers) == ("applied", 2, (4, 5))
    assert a.path.ranks == ("r0",) * 4 + ("r1",) * 2
    assert b.path.helpers == ()
    instances = {each.name: each for each in fleet.status().instances}
    assert instances["r0"].ranks == ("r0", "r1")
    assert (instances["r0"].epoch, instances["r1"].epoch) == (2, 0)
    for rank in (a, b):
        rank.fill()
        rank.check()
    assert fleet.split("r0").status == "applied"
    assert_alone(fleet, [a, b])


def test_layers_that_could_not_go_to_another_rank_are_not_told_as_migrated(fleets: Any) -> None:
    fleet, (_, b) = fleets()
    b.fails = lambda asked: StateError("no pages") if isinstance(asked, PrepareLayers) else None
    assert fleet.migrate("r0", (4, 5), "r1").status == "deferred"
    assert [(e.kind, e.why) for e in fleet.events()][-1] == ("migration failed", "layers of r0 to r1; no pages")
    b.fails = lambda asked: None
    assert fleet.migrate("r0", (4, 5), "r1").status == "applied"
    assert kinds(fleet) == ["migration failed", "migrated"]


def test_a_replica_has_weights_and_keys_and_values_at_another_rank_until_it_is_evicted(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    done = fleet.replicate("r0", (4, 5), "r1")
    assert (done.status, done.flips, done.layers) == ("applied", 2, (4, 5))
    assert (a.path.copies, a.path.copies_of(3), a.path.copies_of(4)) == (2, (("r0",),), (("r0",), ("r1",)))
    (instance,) = [each for each in fleet.status().instances if each.name == "r0"]
    assert (instance.path, instance.tp) == (("r0",) * 4 + ("r0|r1",) * 2, 1)
    with pytest.raises(ConfigError, match="layer 5 of 'r0' is computed by 'r0' and 'r1'; evict its replica"):
        fleet.replicate("r0", [5], "r1")
    with pytest.raises(ConfigError, match="layer 3 of 'r0' is computed by 'r0'; evict"):
        fleet.replicate("r0", [3], "r0")
    for rank in (a, b):
        rank.fill()
        rank.check()
    with pytest.raises(ConfigError, match="rank 'r0' has no layer 9; its model has"):
        fleet.evict("r0", [4, 9])
    assert fleet.evict("r0", [4, 0]).layers == (4,)
    assert [len(a.path.copies_of(layer)) for layer in range(LAYERS)] == [1, 1, 1, 1, 1, 2]
    assert fleet.evict("r0").layers == (5,)
    assert (a.path.copies, a.path.helpers, b.path.copies) == (1, (), 1)
    assert kinds(fleet).count("evicted") == 2
    assert fleet.evict("r0").status == "applied"
    assert fleet.replicate("r0", (0,), "r1").status == "applied"
    assert fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}).status == "applied"
    assert (a.path.copies, a.path.ranks) == (1, ("r0",) * 3 + ("r1",) * 3), "a drop evicts replicas"
    assert fleet.restore().status == "applied"
    assert_alone(fleet, [a, b])


def test_what_makes_no_group_is_refused_in_words(fleets: Any) -> None:
    fleet, _ = fleets()
    with pytest.raises(ConfigError, match="one of need=, layers= and plan="):
        fleet.drop()
    with pytest.raises(ConfigError, match="would keep layer 5"):
        fleet.drop(layers={"r0": [5], "r1": [5]})
    with pytest.raises(ConfigError, match="no layer 9"):
        fleet.drop(layers={"r0": [9], "r1": ()})
    with pytest.raises(ConfigError, match="no rank 'r7'"):
        fleet.migrate("r0", [1], "r7")
    for verb in (fleet.migrate, fleet.replicate):
        with pytest.raises(ConfigError, match="names none; name one at least"):
            verb("r0", [], "r1")
    with pytest.raises(ConfigError, match="name two ranks"):
        fleet.merge("r0")
    with pytest.raises(ConfigError, match="plan=5 cannot be; it must be a DropPlan"):
        fleet.drop(plan=5)
    assert fleet.groups() == ()


def test_a_rank_that_never_was_is_another_error_than_one_that_has_gone(fleets: Any) -> None:
    fleet, (_, b) = fleets()
    b.die()
    for verb in (fleet.restore, fleet.split, fleet.evict):
        with pytest.raises(NotFound, match="no rank 'zz'; there are: r0"):
            verb("zz")
        with pytest.raises(RankLost, match="'r1' is not there any more"):
            verb("r1")


def test_requests_of_a_group_do_not_move(fleets: Any) -> None:
    fleet, ranks = fleets()
    heard, request = Collector(), Request((1, 2, 3), 50, Sampling(seed=0))
    fleet.submit(request, heard)
    for rank in ranks:
        rank.step(2)
    merged = fleet.merge("r0", "r1")
    assert merged.members == ("r0", "r1")
    assert merged.caps == {"r0": None, "r1": None}
    here = fleet.instance_of(request.id)
    with pytest.raises(StateError, match="restore them first"):
        fleet.move(request.id, "r1" if here == "r0" else "r0")
    fleet.restore()
    assert_alone(fleet, ranks)
    for rank in ranks:
        rank.step(60)
    heard.wait([request.id])


@pytest.mark.parametrize("question", [MeetPeers, WeightDigests])
def test_instances_that_could_not_be_merged_are_as_before(fleets: Any, question: type) -> None:
    fleet, (a, b, c) = fleets(3)
    heard, request = Collector(), Request((1, 2, 3), 60, Sampling(seed=0))
    fleet.submit(request, heard)
    for rank in (a, b, c):
        rank.step(2)
    c.fails = lambda asked: StateError("no connection") if isinstance(asked, question) else None
    with pytest.raises(StateError, match="no connection"):
        fleet.merge("r0", "r1", "r2")
    assert_alone(fleet, [a, b, c])
    here = fleet.instance_of(request.id)
    assert here is not None
    with ThreadPoolExecutor(1) as other:
        moved = other.submit(fleet.move, request.id, "r1" if here == "r0" else "r0")
        while not moved.done():
            for rank in (a, b, c) if any(rank.held for rank in (a, b, c)) else ():  # its target is to tell of it
                rank.step()
    assert moved.result().source == here
    fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    before = fleet.groups()
    with pytest.raises(StateError, match="no connection"):
        fleet.merge("r1", "r2")
    assert fleet.groups() == before
    assert {each.name: each.ranks for each in fleet.status().instances}["r2"] == ("r2",)
    c.fails = lambda asked: None
    assert fleet.merge("r1", "r2").members == ("r0", "r1", "r2")
    assert fleet.restore().status == "applied"
    assert_alone(fleet, [a, b, c])


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_lost_member_is_told_at_once_and_the_others_go_on_alone(fleets: Any) -> None:
    fleet, (a, b, c) = fleets(3)
    fleet.drop(12 * LAYER_BYTES)
    b.die("killed by the test")
    until(lambda: "recovered" in kinds(fleet))
    for rank in (a, c):
        told = [question for question in rank.asked if isinstance(question, LosePeer | Recover)]
        assert [type(question) for question in told] == [LosePeer, Recover]
    assert_alone(fleet, [a, c])
    assert fleet.status().totals.recomputed_tokens == 14
    assert fleet.drop(3 * LAYER_BYTES).status == "applied"


def test_a_member_that_cannot_go_on_alone_is_fenced(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    fleet.drop(6 * LAYER_BYTES)
    a.fails = lambda question: StateError("no checkpoint") if isinstance(question, Recover) else None
    b.die()
    until(lambda: a.lost and not fleet.groups())


def test_a_member_lost_in_the_middle_of_a_drop_ends_the_drop(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    flips: list[Any] = []

    def die(question: Any) -> Exception | None:
        if isinstance(question, FlipLayers):
            flips.append(question)
            if len(flips) == 2:
                threading.Thread(target=b.die).start()
                until(lambda: any(isinstance(asked, LosePeer) for asked in a.asked))
                return RankLost("rank 'r1' has gone", rank="r1")
        return None

    a.fails = die
    with pytest.raises(ElasticError):
        fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    until(lambda: "recovered" in kinds(fleet))
    assert_alone(fleet, [a])


def ask_for(fleet: Fleet, rank: GroupRank, sectors: int) -> None:
    """Have the fleet know of a request at a rank that waits for so many sectors."""
    tokens = sectors * SECTOR * 4096 // KV.block_bytes * KV.block_tokens
    record = new_record(Request((1,), tokens - 1), Collector(), time.perf_counter())
    instance = fleet._dispatcher.instances[rank.name]
    instance.records = {record.request.id: record}
    instance.load, rank.waiting = replace(instance.load, waiting=1), 1


def test_caps_go_where_requests_wait_and_stay_there(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    total = sum(fleet.groups()[0].caps.values())
    b.committed = 3
    a.fill()
    assert fleet._groups.follow_needs() == 0  # nobody waits
    ask_for(fleet, a, 1000)
    assert fleet._groups.follow_needs() == 1
    assert not fleet.changing
    caps = fleet.groups()[0].caps
    assert (caps["r0"], caps["r1"]) == (a.cap, b.cap)
    assert caps["r0"] > 0.8 * total > 3 <= caps["r1"]
    a.fill()
    for rank in (a, b):
        rank.check()
    assert a.committed == caps["r0"]
    assert fleet._groups.follow_needs() == 0
    assert fleet.restore().status == "applied"
    assert_alone(fleet, [a, b])


def test_caps_stay_where_requests_do_not_end(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    before = dict(fleet.groups()[0].caps)
    b.committed, b.stuck = 0, True

    def grow(question: Any) -> None:
        if isinstance(question, SetCap):
            b.committed = before["r1"]  # requests came in between

    b.fails = grow
    ask_for(fleet, a, 1000)
    assert fleet._groups.follow_needs() == 0
    assert fleet.groups()[0].caps == before
    assert {a.name: a.cap, b.name: b.cap} == before
    a.fill()
    for rank in (a, b):
        rank.check()


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.long)])
def test_verbs_in_any_order_never_need_more_than_there_is(examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(data=st.data(), ranks=st.integers(2, 4))(verbs_in_any_order))()


def verbs_in_any_order(data: st.DataObject, ranks: int) -> None:
    fleet, world = make(ranks)
    try:
        for _ in range(data.draw(st.integers(1, 5))):
            failing = data.draw(st.sampled_from([0, 0, 0, 3, 8, 15]))
            questions = iter(range(1, 1000))

            def fail(question: Any, failing: int = failing, questions: Iterator[int] = questions) -> Exception | None:
                mutable = isinstance(question, PrepareLayers | FlipLayers)
                return StateError("chosen to fail") if mutable and next(questions) == failing else None

            for rank in world:
                rank.fails = fail
            verb = data.draw(
                st.sampled_from(["drop", "restore", "migrate", "replicate", "evict", "fill", "drain", "follow"])
            )
            if verb == "fill":
                for rank in world:
                    rank.fill()
            elif verb == "drain":
                for rank in world:
                    rank.committed = data.draw(st.integers(0, rank.committed))
            elif verb == "follow":
                for rank in world:
                    rank.stuck = data.draw(st.booleans())
                ask_for(fleet, data.draw(st.sampled_from(world)), data.draw(st.integers(1, 40)))
                before = [(group.shape, group.caps_in_force()) for group in fleet._groups.registry.groups]
                fleet._groups.follow_needs()
                for rank in world:
                    rank.stuck = False
                after = [(group.shape, group.caps_in_force()) for group in fleet._groups.registry.groups]
                assert [shape for shape, _ in after] == [shape for shape, _ in before]
            elif verb == "evict":
                fleet.evict(data.draw(st.sampled_from(world)).name, timeout_s=5)
            elif verb == "restore":
                fleet.restore(data.draw(st.sampled_from([None, *(rank.name for rank in world)])), timeout_s=5)
            else:
                try:
                    home, rank = data.draw(st.permutations([rank.name for rank in world]))[:2]
                    layers = data.draw(st.sets(st.integers(0, LAYERS - 1), min_size=1))
                    if verb == "drop":
                        fleet.drop(data.draw(st.integers(1, (ranks - 1) * LAYERS)) * LAYER_BYTES, timeout_s=5)
                    elif verb == "migrate":
                        fleet.migrate(home, layers, rank)
                    else:
                        fleet.replicate(home, layers, rank, timeout_s=5)
                except (CapacityError, ConfigError):  # no memory for it; a layer that is there already
                    pass
            for rank in world:
                rank.check()
        for rank in world:
            rank.fails = lambda question: None
        assert fleet.restore(timeout_s=5).status == "applied"
        assert_alone(fleet, world)
    finally:
        fleet.stop(drain=False)


def test_ranks_get_ready_once_and_a_drop_finds_them_so(fleets: Any) -> None:
    fleet, ranks = fleets()
    for _ in range(2):
        fleet.get_ready()
    for rank in ranks:
        asked = [type(question) for question in rank.asked]
        assert (asked.count(OpenPeers), asked.count(WeightDigests)) == (1, 1)
    assert fleet.drop(layers={"r0": range(3, 6), "r1": range(3)}).status == "applied"
    for rank in ranks:
        assert [type(question) for question in rank.asked].count(OpenPeers) == 1


def test_ranks_that_cannot_get_ready_are_not_asked_again_and_again(fleets: Any) -> None:
    fleet, ranks = fleets()
    ranks[0].fails = lambda question: StateError("no") if isinstance(question, OpenPeers) else None
    for _ in range(2):
        fleet.get_ready()
    assert [type(question) for question in ranks[0].asked].count(OpenPeers) == 1
    dropped = fleet.drop(layers={"r0": range(3, 6), "r1": range(3)})
    assert (dropped.status, dropped.why) == ("deferred", "no")
