"""Instances become tensor-parallel and plain again, over ranks that only keep their books."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic import CapacityError, ConfigError
from elastic.cluster.control.messages import Apply
from elastic.cluster.control.stage_questions import CopyLayers, FlipLayers, PrepareLayers
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups import targets
from elastic.cluster.fleet.groups.group import Shape
from elastic.cluster.fleet.groups.transition import Books, plan_transition
from elastic.errors import StateError
from elastic.planning.sharding.heads import kv_shards
from elastic.types import Fetch
from support.cluster.fake_group import ALONE, LAYERS, SECTOR, WEIGHT, GroupRank, kv_of, pages_of
from support.cluster.fake_rank import FakeLauncher
from support.cluster.rounds import layers_of_pauses, needed_at

Made = tuple[Fleet, list[GroupRank]]


@pytest.fixture
def fleets() -> Iterator[Callable[..., Made]]:
    """fleets(ranks, shards, kv_heads): started, of ranks whose layers are cut in so many shards."""
    made = []

    def fleet(ranks: int = 2, shards: int = 4, kv_heads: int = 4) -> Made:
        world: dict[str, GroupRank] = {}
        parts = kv_shards(shards, kv_heads)
        launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world, shards, parts))
        options: dict[str, Any] = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False}
        made.append(Fleet("no model", ranks=ranks, launch=launcher, **options))
        made[-1].start()
        made[-1]._policies.stop()
        return made[-1], [world[name] for name in sorted(world)]

    yield fleet
    for each in made:
        each.stop(drain=False)


def layer_ranks(rank: GroupRank) -> set[tuple[str, ...]]:
    """The ranks of a layer's shards, of all layers."""
    return {rank.path.ranks_of(layer) for layer in range(LAYERS)}


def check(ranks: list[GroupRank]) -> None:
    for rank in ranks:
        rank.check()


def test_two_instances_share_every_layer_and_part_again(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    done = fleet.reshard(["r0", "r1"], tp=2)
    assert (done.status, done.tp, done.members, done.flips) == ("applied", 2, ("r0", "r1"), 2 * LAYERS)
    assert layer_ranks(a) == layer_ranks(b) == {("r0", "r0", "r1", "r1")}
    assert (len(a.resident), a.resident & b.resident) == (2 * LAYERS, set())
    (group,) = fleet.groups()
    assert (group.tp, group.keeps, group.dropped) == (2, {"r0": (), "r1": ()}, {"r0": (), "r1": ()})
    check([a, b])
    left = a.budget - a.weights()
    assert done.freed_bytes == 2 * (LAYERS * WEIGHT - a.weights()) * 4096
    assert a.cap + b.cap == left // (2 * SECTOR * LAYERS)  # each has half of the parts of both instances
    for rank in (a, b):
        rank.fill()
        assert rank.committed == rank.cap
        rank.check()
    a.committed = b.committed = 3
    back = fleet.reshard("r1", tp=1)
    assert (back.status, back.tp, back.fetched_bytes) == ("applied", 1, done.freed_bytes)
    assert fleet.groups() == ()
    check([a, b])
    assert [rank.cap for rank in (a, b)] == [None, None]
    assert [event.kind for event in fleet.events() if event.kind != "joined"] == ["resharded", "resharded", "parted"]


def test_a_group_of_four_divides_into_pairs_that_go_on_alone(fleets: Any) -> None:
    fleet, ranks = fleets(4)
    assert fleet.reshard([rank.name for rank in ranks], tp=4).status == "applied"
    (group,) = fleet.groups()
    assert (group.tp, group.members) == (4, ("r0", "r1", "r2", "r3"))
    check(ranks)
    for rank in ranks:
        rank.committed = 2
    assert fleet.reshard("r0", tp=2).status == "applied"
    assert [group.members for group in fleet.groups()] == [("r0", "r1"), ("r2", "r3")]
    assert [group.tp for group in fleet.groups()] == [2, 2]
    assert [rank.stages for rank in ranks] == [{"r1"}, {"r0"}, {"r3"}, {"r2"}]
    check(ranks)
    assert fleet.reshard("r3", tp=1).members == ("r2", "r3")
    assert [group.members for group in fleet.groups()] == [("r0", "r1")]
    assert ranks[2].resident == ranks[3].resident == set(range(4 * LAYERS))
    check(ranks)


def test_pairs_become_four_and_keep_what_they_have(fleets: Any) -> None:
    fleet, ranks = fleets(4)
    fleet.reshard(["r0", "r1", "r2", "r3"], tp=2)
    for rank in ranks:
        rank.committed = 2
        rank.asked.clear()
    done = fleet.reshard(["r0", "r2"], tp=4)
    assert (done.status, done.members, done.fetched_bytes) == ("applied", ("r0", "r1", "r2", "r3"), 0)
    assert not any(map(fetches, ranks))
    check(ranks)


def fetches(rank: GroupRank) -> list[Fetch]:
    """What a rank was told to fetch."""
    applied = [action for each in rank.asked if isinstance(each, Apply) for action in each.actions]
    return [action for action in applied if isinstance(action, Fetch)]


def test_weights_come_back_at_once_from_each_rank_that_has_them(fleets: Any) -> None:
    fleet, ranks = fleets(4)
    for rank in ranks:
        rank.budget *= 4
    fleet.reshard(["r0", "r1", "r2", "r3"], tp=4)
    for rank in ranks:
        rank.asked.clear()
    done = fleet.reshard("r0", tp=1)
    assert done.status == "applied"
    for rank in ranks:
        flips = sum(isinstance(each, FlipLayers) for each in rank.asked)
        told = fetches(rank)
        assert (len(told), flips) == (1, 1)  # not one for each layer, nor for each of the others
        (fetch,) = told
        own = {4 * layer + ranks.index(rank) for layer in range(LAYERS)}
        assert set(fetch.shards) == set(range(4 * LAYERS)) - own
        assert [name for name, _ in fetch.sources] == [other.name for other in ranks if other is not rank]
    check(ranks)


def test_weights_that_came_are_known_though_another_rank_could_not_fetch(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    for rank in (a, b):
        rank.budget *= 4
    fleet.reshard(["r0", "r1"], tp=2)

    def no_fetch(question: Any) -> Exception | None:
        fetch = isinstance(question, Apply) and isinstance(question.actions[0], Fetch)
        return StateError("cannot be read") if fetch else None

    b.fails = no_fetch
    done = fleet.reshard("r0", tp=1)
    assert (done.status, done.why) in {("partial", "cannot be read"), ("deferred", "cannot be read")}
    b.fails = lambda question: None
    a.asked.clear()
    assert fleet.reshard("r0", tp=1).status == "applied"
    assert fetches(a) == []  # it had them all
    assert fleet.groups() == ()
    check([a, b])


def pauses(rank: GroupRank) -> int:
    """How often an instance stood still for its layers."""
    return sum(isinstance(each, FlipLayers) for each in rank.asked)


@pytest.mark.parametrize(("most", "expected"), [(None, 1), (2, 3), (1, LAYERS)])
def test_layers_go_to_all_ranks_at_one_pause(fleets: Any, most: int | None, expected: int) -> None:
    fleet, ranks = fleets(4)
    names = [rank.name for rank in ranks]
    for rank in ranks:
        rank.budget *= 4
    for tp in (4, 1):
        planned = fleet.reshard(names, tp=tp, dry_run=True, layers_per_step=most)
        assert planned.price is not None
        assert planned.price.flips == 4 * expected
        assert fleet.reshard(names, tp=tp, layers_per_step=most).status == "applied"
        assert [pauses(rank) for rank in ranks] == [expected] * 4
        check(ranks)
        for rank in ranks:
            rank.asked.clear()


@pytest.mark.parametrize("question", [PrepareLayers, CopyLayers, FlipLayers])
@pytest.mark.parametrize("at", [1, 3])
def test_a_failure_at_one_of_several_ranks_undoes_it_at_all(fleets: Any, question: type, at: int) -> None:
    fleet, ranks = fleets(4)
    names = [rank.name for rank in ranks]
    for rank in ranks:
        rank.budget *= 4
    fails = ranks[0] if question is FlipLayers else ranks[at]
    fails.fails = lambda asked: (
        StateError("no") if isinstance(asked, question) and getattr(asked, "home", "r0") == "r0" else None
    )
    done = fleet.reshard(names, tp=4)
    assert (done.status, done.why) == ("partial", "no")  # other instances have changed
    assert ranks[0].path.helpers == ()
    assert not ranks[0].exchanging
    assert all(not rank.guests["r0"].coming for rank in ranks[1:])
    check(ranks)
    fails.fails = lambda asked: None
    assert fleet.reshard(names, tp=4).status == "applied"
    assert layer_ranks(ranks[0]) == {("r0", "r1", "r2", "r3")}
    check(ranks)


def test_degrees_are_changed_by_several_layers_at_a_pause(fleets: Any) -> None:
    fleet, ranks = fleets()
    fleet.keep_staging()
    for rank in ranks:
        rank.committed, rank.budget = rank.cap, 2 * rank.budget
    fleet.reshard(["r0", "r1"], tp=2, layers_per_step=2)
    assert [sum(isinstance(each, FlipLayers) for each in rank.asked) for rank in ranks] == [LAYERS // 2] * 2
    check(ranks)


def test_a_rank_that_has_a_part_of_the_cache_already_gets_no_copy_of_it(fleets: Any) -> None:
    fleet, ranks = fleets(2, shards=4, kv_heads=1)  # every rank of a layer has all keys and values
    before = [rank.free() for rank in ranks]
    done = fleet.reshard(["r0", "r1"], tp=2)
    assert done.status == "applied"
    check(ranks)
    assert [rank.free() < pages for rank, pages in zip(ranks, before, strict=True)]
    assert any(isinstance(each, CopyLayers) for rank in ranks for each in rank.asked)


def test_layers_that_are_shared_are_dropped_by_pairs(fleets: Any) -> None:
    fleet, ranks = fleets(4)
    fleet.reshard(["r0", "r1", "r2", "r3"], tp=2)
    for rank in ranks:
        rank.committed = 2
    half = LAYERS // 2
    done = fleet.drop(
        layers={"r0": range(half), "r1": range(half), "r2": range(half, LAYERS), "r3": range(half, LAYERS)}
    )
    assert done.status == "applied"
    assert {rank.path.ranks for rank in ranks} == {
        ("r2", "r2", "r3", "r3") * half + ("r0", "r0", "r1", "r1") * half,
    }
    (group,) = fleet.groups()
    assert group.dropped == {"r0": tuple(range(half)), "r1": tuple(range(half))} | {
        name: tuple(range(half, LAYERS)) for name in ("r2", "r3")
    }
    check(ranks)
    for rank in ranks:
        rank.committed = 1
    assert fleet.reshard("r2", tp=2).status == "applied"
    assert [group.members for group in fleet.groups()] == [("r0", "r1"), ("r2", "r3")]
    assert fleet.restore().status == "applied"
    assert fleet.groups() == ()
    check(ranks)


def test_a_flip_that_fails_leaves_layers_shared_and_whole(fleets: Any) -> None:
    fleet, (a, b) = fleets()
    flips = []

    def third(question: Any) -> Exception | None:
        flips.append(question) if isinstance(question, FlipLayers) else None
        return StateError("no") if isinstance(question, FlipLayers) and len(flips) == 3 else None

    b.fails = third
    done = fleet.reshard(["r0", "r1"], tp=2, layers_per_step=1)
    assert (done.status, done.why) == ("partial", "no")
    assert len(layer_ranks(b)) == 2
    check([a, b])
    b.fails = lambda question: None
    a.committed = b.committed = 2
    assert fleet.reshard(["r0", "r1"], tp=2).status == "applied"
    check([a, b])
    assert fleet.restore().status == "applied"
    check([a, b])


def test_a_dry_run_says_what_would_be_freed(fleets: Any) -> None:
    fleet, _ = fleets()
    planned = fleet.reshard(["r0", "r1"], tp=2, dry_run=True)
    assert (planned.status, planned.flips, fleet.groups()) == ("planned", 2 * LAYERS, ())
    assert planned.price is not None
    done = fleet.reshard(["r0", "r1"], tp=2)
    assert (done.freed_bytes, done.flips) == (planned.freed_bytes, planned.flips)
    assert planned.moved_bytes == 2 * ALONE * 2 * LAYERS * SECTOR * 4096


@pytest.mark.parametrize(
    ("names", "tp", "match"),
    [
        (["r0"], 2, "r0 are 1 ranks"),
        (["r0", "r1", "r2"], 2, "3 ranks"),
        (["r0", "r1"], 8, "in 4 shards"),
        (["r0", "r1"], 0, "tp=0 cannot be; it must be a power of two"),
        (["r0", "r1", "r2"], 3, "tp=3 cannot be; it must be a power of two"),
        (["r0", "nobody"], 2, "no rank 'nobody'"),
        ([], 2, "name one instance"),
    ],
)
def test_what_cannot_be_is_refused_in_words(fleets: Any, names: list[str], tp: int, match: str) -> None:
    fleet, _ = fleets(3)
    with pytest.raises(ConfigError, match=match):
        fleet.reshard(names, tp=tp)
    assert fleet.groups() == ()


def test_layers_that_were_not_cut_are_refused_in_words(fleets: Any) -> None:
    fleet, _ = fleets(2, shards=1)
    with pytest.raises(ConfigError, match="is not cut; start the fleet with"):
        fleet.reshard(["r0", "r1"], tp=2)
    assert fleet.reshard("r0", tp=1).status == "applied"


def test_ranks_without_room_are_refused_and_nothing_changes(fleets: Any) -> None:
    fleet, ranks = fleets(2, kv_heads=1)
    for rank in ranks:
        rank.committed, rank.budget = 1, rank.weights() + SECTOR * LAYERS
    with pytest.raises(CapacityError):
        fleet.reshard(["r0", "r1"], tp=2)
    assert fleet.groups() == ()


@pytest.mark.parametrize("fault", ["cache", "exchange", "layers"])
def test_groups_that_were_put_together_for_nothing_are_those_of_before(fleets: Any, fault: str) -> None:
    """Of one group a lost rank would have all members repaired, and requests of others held up."""
    fleet, ranks = fleets(5)
    for pair in (["r0", "r1"], ["r2", "r3"]):
        fleet.reshard(pair, tp=2)
    before = {group.members: group.paths for group in fleet.groups()}
    for rank in ranks:
        rank.committed = 10**6 if fault == "cache" else 0
        rank.fails = lambda asked: StateError("no") if isinstance(asked, PrepareLayers) else None
    for others in () if fault == "layers" else ("r2", "r4"):
        assert fleet.migrate("r0", [1], others, timeout_s=0.01).status == "deferred"
    if fault == "layers":
        every = dict.fromkeys(["r0", "r1", "r2", "r3", "r4"], range(LAYERS))
        with pytest.raises(ConfigError, match="would keep layer 0"):
            fleet.drop(layers=every)
    assert {group.members: group.paths for group in fleet.groups()} == before
    assert ranks[4].guests == {}
    assert ranks[2].guests.keys() == {"r3"}
    for rank in ranks:
        rank.committed, rank.fails = 1, lambda asked: None
    assert fleet.reshard(["r0", "r2"], tp=4).status == "applied"
    assert fleet.restore().status == "applied"
    check(ranks)


@settings(max_examples=30, deadline=None)
@given(
    shards=st.sampled_from([2, 4]), kv_heads=st.sampled_from([1, 2, 4]),
    degrees=st.lists(st.sampled_from([1, 2, 4]), max_size=4),
    sectors=st.integers(2, 40), room=st.integers(0, 60), most=st.none() | st.integers(1, 3),
)  # fmt: skip
def test_no_rank_ever_needs_more_than_it_has(
    shards: int, kv_heads: int, degrees: list[int], sectors: int, room: int, most: int | None
) -> None:
    world: dict[str, GroupRank] = {}
    parts = kv_shards(shards, kv_heads)
    ranks = [GroupRank(f"r{number}", world, shards, parts) for number in range(4)]
    for rank in ranks:
        rank.committed, rank.budget = sectors, rank.weights() + room + (sectors + 1) * SECTOR * parts * LAYERS
    rooms = {rank.name: rank.on_measure_room(None) for rank in ranks}  # type: ignore[arg-type]
    now = Shape(
        {name: each.path for name, each in rooms.items()}, {name: each.resident for name, each in rooms.items()}
    )
    books = Books(rooms, kv_of(parts), now)
    caps = {name: books.staged(name) for name in rooms}
    for tp in degrees:
        if shards % tp or not min(caps.values()):
            continue
        target = targets.sharded(now, targets.units_of(now.members, tp))
        transition = plan_transition(now, target, books, caps, most)
        for flips in transition.rounds:
            assert all(len(layers) <= (most or LAYERS) for layers in layers_of_pauses(flips, shards).values())
            for rank in rooms:
                coming = needed_at(rank, flips, books, now, transition.caps)
                assert coming <= max(0, books.free(rank, now, transition.caps))
            for flip in flips:
                left = books.free(flip.target, now, caps) - books.needed(flip, now, caps)
                now = now.after(flip, target.weights)
                assert books.free(flip.target, now, caps) == left
        assert {home: path.ranks for home, path in now.paths.items()} == {
            home: path.ranks for home, path in target.paths.items()
        }
        now = Shape(now.paths, {rank: now.weights[rank] | target.weights[rank] for rank in rooms})
        caps = books.caps(now)
        assert all(books.free(rank, now, caps) >= 0 for rank in rooms)


def test_pages_of_shards_are_those_of_a_layer() -> None:
    for shards in (1, 2, 4):
        assert pages_of(shards).pages(range(shards)) == WEIGHT


def test_instances_that_have_no_room_by_themselves_have_equal_shares_of_a_group() -> None:
    world: dict[str, GroupRank] = {}
    ranks = [GroupRank(f"r{number}", world, 2, 2) for number in range(2)]
    for rank in ranks:
        rank.committed, rank.budget = 0, rank.weights()
    rooms = {rank.name: rank.on_measure_room(None) for rank in ranks}  # type: ignore[arg-type]
    now = Shape(
        {name: each.path for name, each in rooms.items()}, {name: each.resident for name, each in rooms.items()}
    )
    books = Books(rooms, kv_of(2), now)
    assert [books.alone(name) for name in rooms] == [0, 0]
    caps = books.caps(targets.sharded(now, targets.units_of(now.members, 2)))
    assert caps["r0"] > 0
    assert abs(caps["r0"] - caps["r1"]) <= 1
