"""Requests of a killed rank wait for the repair of its group, and find what its others have computed for them."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic import StateError
from elastic.cluster.control.messages import News, Submit
from elastic.cluster.control.stage_questions import CloseStage, KeptLayers, Recover
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.records import held_requests
from elastic.engines.base import Request
from elastic.engines.core.kv_state import KVReport, KVSource, LayersKV, SectorPages, SequenceKV
from elastic.memory.backends.shared_file import host_name, share
from support.cluster.fake_group import KV, LAYERS, GroupRank
from support.cluster.fake_rank import FakeLauncher, alone
from support.serving.generations import Collector

FIRST, LAST = tuple(range(3)), tuple(range(3, LAYERS))
PAGES = 4096


class TellingRank(GroupRank):
    """Its memory is in a file; it tells where each request is, and keeps what it had computed for others."""

    heard_all = True

    def __init__(self, name: str, world: dict[str, GroupRank], descriptor: int) -> None:
        super().__init__(name, world)
        self.file = share(descriptor)
        self.hello = replace(self.hello, host=host_name(), memory=KVSource(self.file, PAGES, KV))

    def tell_kv(self, request: str) -> None:
        """It has told of a request that it is in a block of sector 2."""
        kv = KVReport((SectorPages(0, 2, (7, 8, 9), FIRST),), (SequenceKV(request, 3, ((17,),), True),))
        self.on_message(News((), (), self.load(), replace(kv, epoch=self.path.epoch)))

    def on_kept_layers(self, question: KeptLayers) -> LayersKV:
        assert question.home in self.guests
        return LayersKV(self.file, PAGES, KV, {layer: {sector: (sector,) for sector in (2, 5)} for layer in LAST})

    def on_close_stage(self, question: CloseStage) -> None:
        if not question.keep:
            super().on_close_stage(question)

    def submitted(self) -> list[Submit]:
        return [message for message in self.inbox if isinstance(message, Submit)]


@pytest.fixture
def served() -> Iterator[tuple[Fleet, list[TellingRank]]]:
    """Two ranks, of which the first computes the first three layers of both, the other one the last three."""
    world: dict[str, Any] = {}
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), 16 * PAGES)
        launcher: Any = FakeLauncher(lambda spec: TellingRank(spec.name, world, file.fileno()))
        options: dict[str, Any] = {"replace": False, "policy": None, "beat_timeout_s": 1e6, "hang_timeout_s": 1e6}
        with Fleet("no model", ranks=2, launch=launcher, **options) as fleet:
            assert fleet.drop(layers={"r0": LAST, "r1": FIRST}).status == "applied"
            yield fleet, [world[name] for name in sorted(world)]
            fleet.stop(drain=False)


def begin(fleet: Fleet, home: TellingRank, other: TellingRank) -> tuple[Collector, Request]:
    """Have a request at a rank that told of it; the other one takes nothing meanwhile."""
    heard, request = Collector(), Request((1, 2, 3), 20, id="q", ignore_eos=True)
    fleet._dispatcher.instances[other.name].state = "draining"
    fleet.submit(request, heard)
    home.step()
    home.tell_kv("q")
    fleet._dispatcher.instances[other.name].state = "serving"
    return heard, request


def until(true: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < give_up_s
        time.sleep(0.002)


def closed(rank: TellingRank, home: str) -> list[bool]:
    """What a rank was asked to keep of a home, each time."""
    return [asked.keep for asked in rank.asked if isinstance(asked, CloseStage) and asked.home == home]


def test_a_request_waits_for_the_repair_and_is_given_with_what_others_computed(
    served: tuple[Fleet, list[TellingRank]],
) -> None:
    fleet, (a, b) = served
    heard, request = begin(fleet, a, b)
    at_repair: list[Any] = []

    def look(question: Any) -> None:
        if isinstance(question, Recover):
            at_repair.append((b.submitted(), closed(b, "r0"), fleet.status().queued))
            fleet._dispatcher.check()

    b.fails = look
    a.die()
    until(b.submitted)
    assert at_repair == [([], [True], 0)]
    (submit,) = b.submitted()
    assert submit.kv == (SequenceKV("q", 3, ((17,),), True),)
    assert submit.source is not None
    assert submit.source.sectors == (SectorPages(0, 2, (7, 8, 9), FIRST),)
    (other,) = submit.source.others
    assert other.pages == {layer: {2: (2,)} for layer in LAST}
    until(lambda: not fleet.groups())
    held = fleet._dispatcher.held
    with fleet._dispatcher.lock:
        held.give_back(fleet._dispatcher.clock() + 1e6)
    assert closed(b, "r0") == [True], "it may be reading"
    assert fleet._dispatcher.instances["r1"].moves == 1
    b.step()
    with fleet._dispatcher.lock:
        held.give_back(fleet._dispatcher.clock())
    assert closed(b, "r0") == [True, False]
    b.step(20)
    heard.wait(["q"])
    assert heard.tokens["q"] == alone(request, submit.states[0].seed)
    assert not held._kept
    assert fleet._dispatcher.instances["r1"].moves == 0


def test_what_is_kept_is_given_back_where_requests_find_no_room(
    served: tuple[Fleet, list[TellingRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_requests, "KEPT_S", 0.0)
    fleet, (a, b) = served
    heard, _ = begin(fleet, a, b)
    fleet._dispatcher.instances["r1"].state = "draining"
    a.die()
    until(lambda: closed(b, "r0") == [True, False])
    assert fleet.status().queued == 1
    fleet._dispatcher.instances["r1"].state = "serving"
    b.beat()
    (submit,) = b.submitted()
    assert (submit.kv, submit.source) == ((), None)
    b.step(20)
    heard.wait(["q"])


def test_a_request_whose_layers_are_not_kept_goes_on_without(served: tuple[Fleet, list[TellingRank]]) -> None:
    fleet, (a, b) = served
    heard, _ = begin(fleet, a, b)
    b.fails = lambda question: StateError("it needed the room") if isinstance(question, KeptLayers) else None
    a.die()
    until(b.submitted)
    assert closed(b, "r0") == [True, False]
    (submit,) = b.submitted()
    assert submit.source is not None
    assert submit.source.others == ()
    b.step(20)
    heard.wait(["q"])


def test_what_a_rank_keeps_that_is_just_being_removed_is_not_read(served: tuple[Fleet, list[TellingRank]]) -> None:
    """It ends in order: its pages are given back while somebody might copy them."""
    fleet, (a, b) = served
    heard, _ = begin(fleet, a, b)

    def leave(question: Any) -> None:
        if isinstance(question, KeptLayers):
            fleet._dispatcher.instances["r1"].leaving = True

    b.fails = leave
    a.die()
    until(b.submitted)
    (submit,) = b.submitted()
    assert submit.source is not None
    assert submit.source.others == ()
    assert fleet._dispatcher.instances["r1"].moves == 0
    b.step(20)
    heard.wait(["q"])


def test_a_request_that_is_cancelled_while_it_waits_ends(served: tuple[Fleet, list[TellingRank]]) -> None:
    fleet, (a, b) = served
    heard, _ = begin(fleet, a, b)
    b.fails = lambda question: fleet.cancel("q") if isinstance(question, Recover) else None  # type: ignore[func-returns-value]
    a.die()
    heard.wait(["q"])
    assert heard.ends["q"].finish == "cancelled"
    until(lambda: closed(b, "r0") == [True, False])
    assert b.submitted() == []
    fleet._dispatcher.check()


def test_requests_that_wait_end_where_no_rank_is_left(served: tuple[Fleet, list[TellingRank]]) -> None:
    fleet, (a, b) = served
    heard, _ = begin(fleet, a, b)
    b.fails = lambda question: b.die() if isinstance(question, Recover) else None  # type: ignore[func-returns-value]
    a.die()
    heard.wait(["q"])
    assert heard.ends["q"].finish == "failed"
    assert "no rank is left" in str(heard.ends["q"].error)


def test_a_request_that_waits_for_a_repair_fails_once_when_no_rank_is_left(
    served: tuple[Fleet, list[TellingRank]],
) -> None:
    fleet, (a, b) = served
    heard, _ = begin(fleet, a, b)
    repaired = threading.Event()

    def wait(question: Any) -> None:
        if isinstance(question, Recover):
            repaired.wait(20)

    b.fails = wait
    a.die()
    b.die()
    fleet._supervisor.fail_if_hopeless("as the thread of each lost rank says")
    assert heard.ends["q"].finish == "failed"
    repaired.set()
    until(lambda: not fleet.groups())
    fleet._dispatcher.check()
