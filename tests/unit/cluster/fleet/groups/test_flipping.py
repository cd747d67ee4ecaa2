"""A rank is told to be `flipping` while it takes part in a change of who computes which layers, and only then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic import StateError
from elastic.cluster.control.messages import Apply
from elastic.cluster.control.stage_questions import (
    AttachStage,
    BeginExchange,
    CopyLayers,
    FlipLayers,
    OpenStage,
    PrepareLayers,
    Recover,
    SetCap,
    SetCopies,
)
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support.cluster.fake_group import GroupRank
from support.cluster.fake_rank import FakeLauncher
from support.serving.generations import Collector

STEPS = (BeginExchange, PrepareLayers, CopyLayers, FlipLayers)
AROUND = (Apply, AttachStage, OpenStage, SetCap)
DROP = {"r0": range(3, 6), "r1": range(3)}


class Watched:
    """Three ranks, and what the fleet's status said whenever one was asked something: question -> sets of states."""

    def __init__(self) -> None:
        world: dict[str, GroupRank] = {}
        launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world))
        options: dict[str, Any] = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False}
        self.fleet = Fleet("no model", ranks=3, launch=launcher, **options)
        self.fleet.start()
        self.fleet._policies.stop()
        self.ranks, self.seen = [world[name] for name in sorted(world)], dict[type, list[dict[str, str]]]()
        for rank in self.ranks:
            rank.fails = self.note

    def note(self, question: Any) -> None:
        self.seen.setdefault(type(question), []).append(self.states())

    def states(self) -> dict[str, str]:
        return {rank.name: rank.state for rank in self.fleet.status().ranks}

    def flipping(self, *questions: type) -> set[tuple[str, ...]]:
        """Which ranks were flipping as these were asked."""
        told = [states for question in questions for states in self.seen.get(question, [])]
        assert told
        return {tuple(name for name, state in states.items() if state == "flipping") for states in told}


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.fleet.stop(drain=False)


def until(true: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 30
    while not true():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def test_ranks_flip_from_prepared_to_flipped_and_not_while_weights_come_or_leave(watched: Watched) -> None:
    assert watched.fleet.drop(layers=DROP).status == "applied"
    for verb in (lambda: None, watched.fleet.restore):
        verb()
        assert watched.flipping(*STEPS) == {("r0", "r1")}
        assert watched.flipping(*AROUND) == {()}
        assert set(watched.states().values()) == {"serving"}


def test_a_flip_that_is_undone_leaves_ranks_serving(watched: Watched) -> None:
    def fails(question: Any) -> Exception | None:
        watched.note(question)
        return StateError("the copy failed") if isinstance(question, FlipLayers) else None

    watched.ranks[1].fails = fails
    assert watched.fleet.drop(layers=DROP).status == "partial"
    assert watched.flipping(FlipLayers) >= {("r0", "r1")}
    assert set(watched.states().values()) == {"serving"}


def test_an_instance_flips_with_all_ranks_that_compute_its_layers(watched: Watched) -> None:
    fleet = watched.fleet
    fleet.migrate("r0", [5], "r1")
    assert watched.flipping(*STEPS) == {("r0", "r1")}
    watched.seen.clear()
    fleet.migrate("r0", [4], "r2")
    assert watched.flipping(*STEPS) == {("r0", "r1", "r2")}, "r1 goes on by another path, too"


def test_ranks_flip_while_requests_are_shared_out_among_copies(watched: Watched) -> None:
    watched.fleet.migrate("r0", [0], "r2")
    assert watched.fleet.replicate("r0", (4, 5), "r1").status == "applied"
    assert watched.fleet.evict("r0").status == "applied"
    assert watched.flipping(SetCopies) == {("r0", "r2")}


def test_ranks_that_go_on_without_a_lost_one_flip_meanwhile(watched: Watched) -> None:
    watched.fleet.drop(layers=DROP)
    watched.ranks[1].die()
    until(lambda: not watched.fleet.groups())
    assert watched.flipping(Recover) == {("r0",)}
    assert watched.states() == {"r0": "serving", "r1": "lost", "r2": "serving"}


def test_a_rank_that_flips_takes_requests(watched: Watched) -> None:
    heard, given = Collector(), list[str | None]()

    def submit(question: Any) -> None:
        if isinstance(question, FlipLayers) and not given:
            requests = [Request((1, 2), 4, id=f"request-{i}") for i in range(3)]
            for request in requests:
                watched.fleet.submit(request, heard)
            given.extend(watched.fleet.instance_of(request.id) for request in requests)

    watched.ranks[0].fails = submit
    watched.fleet.drop(layers=DROP)
    assert set(given) == {"r0", "r1", "r2"}
