"""A request larger than what any instance may have now, but not than what one could have, waits until it has that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic import CapacityError
from elastic.cluster.fleet import dispatcher as dispatching
from elastic.planning.arrangement.caps import GAIN
from support.cluster.half_group import SECTOR_BLOCKS, HalfGroup


@pytest.fixture
def world() -> Iterator[HalfGroup]:
    made = HalfGroup()
    yield made
    made.fleet.stop(drain=False)


@pytest.mark.parametrize("more", [1, 10, 23])
def test_it_waits_until_the_group_has_given_one_instance_as_much(world: HalfGroup, more: int) -> None:
    """Also where that is less than caps change for otherwise."""
    most = max(world.caps.values())
    assert GAIN * most > 1
    world.ask(most + more)
    world.ask(1, "short")
    assert world.given() == []
    assert world.fleet._groups.follow_needs() == 1
    assert max(world.caps.values()) >= most + more
    world.tell()
    assert world.given()[0] == "large"
    for _ in range(4):
        for rank in world.ranks:
            rank.step()
    assert world.heard.ends.keys() == {"large", "short"}


def test_it_may_need_all_that_the_group_has(world: HalfGroup) -> None:
    total = sum(world.caps.values())
    world.ask(total)
    assert world.fleet._groups.follow_needs() == 1
    assert sorted(world.caps.values()) == [0, total]
    world.tell()
    assert world.given() == ["large"]


def test_what_not_even_the_group_could_hold_is_refused(world: HalfGroup) -> None:
    with pytest.raises(CapacityError, match="fits in no instance"):
        world.ask(sum(world.caps.values()) + 2)
    assert world.fleet.status().queued == 0


def test_it_ends_in_words_if_the_instances_part_and_it_could_never_begin(
    world: HalfGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ask(max(world.caps.values()) + 1)
    assert world.fleet.restore().status == "applied"
    world.tell()
    assert world.heard.ends == {}, "a rank may come in the place of another"
    monkeypatch.setattr(dispatching, "UNREACHABLE_S", 0.0)
    world.tell()
    end = world.heard.ends["large"]
    assert end.finish == "failed"
    assert "fits in no instance" in str(end.error)
    world.ask(1, "short")
    assert world.given() == ["short"]
    world.fleet.check()


def test_others_are_not_held_up_by_one_that_has_become_impossible(world: HalfGroup) -> None:
    world.ask(max(world.caps.values()) + 1)
    world.ask(1, "short")
    world.fleet.cancel("large")
    world.tell()
    assert world.given() == ["short"]


def test_it_may_need_what_a_group_keeps_for_a_layer_more() -> None:
    world = HalfGroup(staging=True)
    kept, instances = sum(world.caps.values()), world.fleet._dispatcher.instances
    most = instances["r0"].group_blocks // SECTOR_BLOCKS
    assert most > kept
    world.ask(most)
    assert world.fleet.status().queued == 1
    assert world.fleet._groups.follow_needs() == 1
    assert world.caps == {"r0": most, "r1": 0}
    world.tell()
    assert world.given() == ["large"]
    for rank in world.ranks[:2]:
        rank.check()
    with pytest.raises(CapacityError, match="fits in no instance"):
        world.ask(most + 1, "too large")
    world.fleet.stop(drain=False)
