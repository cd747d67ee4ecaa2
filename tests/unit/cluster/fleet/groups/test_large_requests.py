"""A request larger than what any instance may have now, but not than what one could have, waits until it has that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic import CapacityError
from elastic.cluster.control.messages import Submit
from elastic.cluster.fleet import dispatcher as dispatching
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from elastic.planning.arrangement.caps import GAIN
from support.cluster.fake_group import ALONE, KV, LAYERS, SECTOR, GroupRank
from support.cluster.fake_rank import BLOCK, FakeLauncher
from support.serving.generations import Collector

SECTOR_BLOCKS = SECTOR * 4096 // KV.block_bytes


class World:
    """Two ranks with half of the layers each, idle, whose loads say what their caps are."""

    def __init__(self) -> None:
        ranks: dict[str, GroupRank] = {}
        launcher = FakeLauncher(lambda spec: GroupRank(spec.name, ranks))
        options: dict[str, Any] = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False}
        self.fleet = Fleet("no model", ranks=2, launch=launcher, **options)
        self.fleet.start()
        self.fleet._policies.stop()  # caps follow what is needed when a test says so
        self.ranks = list(ranks.values())
        self.heard = Collector()
        self.tell()
        assert self.fleet.drop(layers={"r0": range(3, LAYERS), "r1": range(3)}).status == "applied"
        self.tell()

    @property
    def caps(self) -> dict[str, int]:
        (group,) = self.fleet.groups()
        return {home: cap for home, cap in group.caps.items() if cap is not None}

    def tell(self) -> None:
        """Have all ranks say what their limits are, with nothing there."""
        for rank in self.ranks:
            rank.committed = 0
            rank.blocks = (ALONE if rank.cap is None else rank.cap) * SECTOR_BLOCKS
            rank.beat()

    def ask(self, sectors: int, name: str = "large") -> None:
        """Submit a request that needs so many sectors."""
        tokens = sectors * SECTOR_BLOCKS * BLOCK
        self.fleet.submit(Request((1,) * (tokens - 4), 4, ignore_eos=True, id=name), self.heard)

    def given(self) -> list[str]:
        return [m.states[0].request.id for rank in self.ranks for m in rank.inbox if isinstance(m, Submit)]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.fleet.stop(drain=False)


@pytest.mark.parametrize("more", [1, 10, 23])
def test_it_waits_until_the_group_has_given_one_instance_as_much(world: World, more: int) -> None:
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


def test_it_may_need_all_that_the_group_has(world: World) -> None:
    total = sum(world.caps.values())
    world.ask(total)
    assert world.fleet._groups.follow_needs() == 1
    assert sorted(world.caps.values()) == [0, total]
    world.tell()
    assert world.given() == ["large"]


def test_what_not_even_the_group_could_hold_is_refused(world: World) -> None:
    with pytest.raises(CapacityError, match="fits in no instance"):
        world.ask(sum(world.caps.values()) + 2)
    assert world.fleet.status().queued == 0


def test_it_ends_in_words_if_the_instances_part_and_it_could_never_begin(
    world: World, monkeypatch: pytest.MonkeyPatch
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


def test_others_are_not_held_up_by_one_that_has_become_impossible(world: World) -> None:
    world.ask(max(world.caps.values()) + 1)
    world.ask(1, "short")
    world.fleet.cancel("large")
    world.tell()
    assert world.given() == ["short"]
