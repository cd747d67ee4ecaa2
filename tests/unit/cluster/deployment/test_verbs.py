"""Verbs of deployments: what cannot be is refused in words and changes nothing, and one that ends holds up no other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import elastic
from elastic.cluster.deployment import deployments
from elastic.cluster.deployment.deployed import Deployed
from elastic.cluster.deployment.deployments import Deployments
from elastic.cluster.deployment.hysteresis import Replanning
from elastic.cluster.deployment.ranks import DeployedRanks, RankViews
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.engines.base import Output, Request
from elastic.errors import CapacityError, ConfigError, NotFound, StateError
from elastic.planning.estimate.performance import Load
from support import architectures

DEVICES = "cpu#verbs1=12MiB,cpu#verbs2=12MiB"
OPTIONS: dict[str, Any] = {"launch": "in-process", "replanning": None}
LOAD = Load(32, 16, 0.1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "model"
    architectures.build("llama-gqa").save_pretrained(folder)
    return folder


@pytest.fixture
def fleet() -> Iterator[Deployments]:
    with Deployments(DEVICES, **OPTIONS) as running:
        yield running


@pytest.mark.parametrize(
    "options",
    [
        {"theta": "high"},
        {"fleet": 3},
        {"fleet": {"tp": 2}},
        {"fleet": {"engine": 3}},
        {"replanning": 3},
        {"harvest": "yes"},
        {"store": 3},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"theta=|fleet|engine=|replanning=|harvest=|store="):
        Deployments(DEVICES, **{**OPTIONS, **options})
    with pytest.raises(ConfigError, match="dwell_s='long' cannot be"):
        Replanning(dwell_s="long")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="patience_s=True cannot be"):
        Replanning(patience_s=True)
    assert Replanning(dwell_s=float("inf")).dwell_s == float("inf"), "it never changes by itself"


def test_arguments_that_cannot_be_are_refused_and_nothing_has_changed(fleet: Deployments, path: Path) -> None:
    for wrong in (None, 5, "model\0"):
        with pytest.raises(ConfigError, match=r"path=.* cannot be; it must be the directory of a model"):
            fleet.deploy(wrong)  # type: ignore[arg-type]
    for name in (5, "", " ", "a\nb", "\ud800"):
        with pytest.raises(ConfigError, match=r"name=.* cannot be; it must be a text that is not empty"):
            fleet.deploy(path, name=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no device"):
        fleet.resize(["cpu#verbs1"], 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no option 'ranks' can be said here"):
        fleet.deploy(path, fleet={"ranks": 2})
    fleet.deploy(path, load=LOAD)
    with pytest.raises(ConfigError, match="load=3 cannot be"):
        fleet.intend("model", load=3)  # type: ignore[arg-type]
    assert fleet.expected("model") == LOAD
    with pytest.raises(ConfigError, match="drain='no' cannot be"):
        fleet.remove("model", drain="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="drain='no' cannot be"):
        fleet.stop(drain="no")  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="no deployment"):
        fleet.remove(["model"])  # type: ignore[arg-type]
    assert fleet.names() == ("model",)
    assert fleet["model"].serving


def test_what_may_not_be_ended_here_stays_deployed(
    fleet: Deployments, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(path, load=LOAD)
    with monkeypatch.context() as listening:
        listening.setattr(Delivery._inside, "depth", 1, raising=False)
        with pytest.raises(StateError, match="by a listener"):
            fleet.remove("model")
    assert (fleet.names(), fleet["model"].serving) == (("model",), True)
    fleet.remove("model")
    assert all(device.free_bytes == device.memory_bytes for device in fleet.devices())


def test_a_listener_is_refused_to_change_deployments(fleet: Deployments, path: Path) -> None:
    """It would wait for what a rank answers on the thread that reads it."""
    fleet.deploy(path, load=LOAD)
    refused, heard = list[str](), threading.Event()

    def hear(output: Output) -> None:
        verbs = (lambda: fleet.deploy(path, name="other"), lambda: fleet.intend("model"), fleet.stop)
        for verb in (*verbs, lambda: fleet.remove("model")) if output.finish else ():
            with pytest.raises(StateError, match="by a listener; use another thread") as error:
                verb()
            refused.append(str(error.value))
        if output.finish:
            heard.set()

    fleet["model"].submit(Request((5, 6, 7), 4), hear)
    assert heard.wait(60)
    assert len(refused) == 4
    assert fleet.deploy(path, load=LOAD, name="other").name == "other"


def test_what_is_interrupted_as_it_ends_can_be_ended_again(
    fleet: Deployments, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(path, load=LOAD)
    with monkeypatch.context() as interrupted:

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        interrupted.setattr(fleet["model"], "_drain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fleet.remove("model")
    assert fleet.names() == ("model",)
    fleet.remove("model")
    assert fleet.names() == ()
    assert all(device.free_bytes == device.memory_bytes for device in fleet.devices())


def test_a_fork_that_ends_ends_no_deployment_of_its_parent(fleet: Deployments, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = list[Deployments]()
    monkeypatch.setattr(Deployments, "stop", lambda self, **_: stopped.append(self))
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        deployments._stop_all()
    assert stopped == []
    deployments._stop_all()
    assert fleet in stopped


def test_ranks_have_the_forms_of_the_deployment_beside_variants_of_the_users(path: Path) -> None:
    options = {**OPTIONS, "fleet": {"wrap": {"variants": ("int4",)}}}
    with Deployments(DEVICES, weights=("full", "int8"), **options) as fleet:
        fleet.deploy(path, load=LOAD)
        assert set(fleet["model"].look("r0").variants) == {"int4", "int8"}


def test_a_change_waits_for_room_that_one_that_begins_has(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Deployments("cpu#verbs4=24MiB,cpu#verbs5=24MiB", **OPTIONS) as fleet:
        may_begin, threads = a_change_that_waits(fleet, path, monkeypatch)
        may_begin.set()
        for thread in threads:
            thread.join(60)
        assert [each.replicas for each in fleet.status()] == [2, 2]


def test_a_change_that_waits_for_room_says_that_all_were_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that there was no such deployment."""
    said, intend = list[str](), Deployments.intend

    def listening(*args: Any, **options: Any) -> None:
        with pytest.raises(StateError) as error:
            intend(*args, **options)
        said.append(str(error.value))

    monkeypatch.setattr(Deployments, "intend", listening)
    with Deployments("cpu#verbs6=24MiB,cpu#verbs7=24MiB", **OPTIONS) as fleet:
        may_begin, threads = a_change_that_waits(fleet, path, monkeypatch)
        fleet.stop(drain=False)
        may_begin.set()
        for thread in threads:
            thread.join(60)
    assert said == ["the deployments were stopped while a change of 'model' waited for room"]


def a_change_that_waits(
    fleet: Deployments, path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, list[threading.Thread]]:
    """Have a deployment begin with an event, and a change of another one wait for it; return that and both threads."""
    start, change = Deployed.start, Deployed.change
    begun, may_begin, refused = threading.Event(), threading.Event(), threading.Event()

    def slow(deployed: Deployed) -> None:
        begun.set()
        assert may_begin.wait(30)
        start(deployed)

    def deploy() -> None:
        with suppress(StateError):  # all were stopped
            fleet.deploy(path, "memory", load=LOAD, name="wide", replicas=2)

    def refusing(*args: Any, **options: Any) -> Any:
        try:
            return change(*args, **options)
        except CapacityError:
            refused.set()
            raise

    fleet.deploy(path, "memory", load=LOAD)
    monkeypatch.setattr(Deployed, "start", slow)
    monkeypatch.setattr(Deployed, "change", refusing)
    threads = [threading.Thread(target=deploy)]
    threads.append(threading.Thread(target=fleet.intend, args=("model",), kwargs={"replicas": 2}))
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    assert refused.wait(30)
    return may_begin, threads


def test_one_that_ends_holds_up_no_other_and_stopping_all_does_not_wait_for_its_requests(
    fleet: Deployments, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(path, load=LOAD, name="ends")
    fleet.deploy(path, load=LOAD, name="stays")
    stop, begun, may_end = DeployedRanks.stop, threading.Event(), threading.Event()

    def patient(ranks: DeployedRanks, *, drain: bool) -> None:
        if drain:
            begun.set()
            may_end.wait(20)
        else:
            may_end.set()  # as a fleet cancels the requests for which another call waits
        stop(ranks, drain=False)

    monkeypatch.setattr(DeployedRanks, "stop", patient)
    ending = threading.Thread(target=fleet.remove, args=("ends",))
    ending.start()
    assert begun.wait(30)
    assert fleet.intend("stays", "latency", dry_run=True).status in ("planned", "unchanged")
    assert not may_end.is_set()
    assert ending.is_alive()
    assert fleet.names() == ("stays",)
    with pytest.raises(StateError, match="'ends' ends when its requests have"):
        fleet.deploy(path, name="ends")
    fleet.stop(drain=False)
    ending.join(30)
    assert not ending.is_alive()
    assert fleet.names() == ()


def test_one_that_begins_holds_up_no_other_and_stopping_all_ends_it(
    fleet: Deployments, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(path, load=LOAD, name="stays")
    start, begun, may_begin, raised = Deployed.start, threading.Event(), threading.Event(), list[StateError]()

    def slow(deployed: Deployed) -> None:
        begun.set()
        assert may_begin.wait(30)
        start(deployed)

    def deploy() -> None:
        try:
            fleet.deploy(path, load=LOAD, name="begins")
        except StateError as error:
            raised.append(error)

    monkeypatch.setattr(Deployed, "start", slow)
    beginning = threading.Thread(target=deploy)
    beginning.start()
    assert begun.wait(30)
    assert fleet.intend("stays", "latency", dry_run=True).status in ("planned", "unchanged")
    with pytest.raises(StateError, match="'begins' begins; wait until it serves"):
        fleet.deploy(path, name="begins")
    fleet.remove("stays")
    assert fleet.names() == ()
    fleet.stop(drain=False)
    may_begin.set()
    beginning.join(30)
    assert not beginning.is_alive()
    assert len(raised) == 1
    assert all(device.free_bytes == device.memory_bytes for device in fleet.devices())


def test_one_that_serves_as_all_are_stopped_is_ended(
    fleet: Deployments, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops all has said so, and looks for what there is only when this one is there no more."""
    start = Deployed.start

    def late(deployed: Deployed) -> None:
        start(deployed)
        monkeypatch.setattr(fleet, "_ended", True)

    monkeypatch.setattr(Deployed, "start", late)
    with pytest.raises(StateError, match="were stopped while 'begins' began"):
        fleet.deploy(path, load=LOAD, name="begins")
    assert all(device.free_bytes == device.memory_bytes for device in fleet.devices())


def test_two_that_begin_at_once_both_find_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins has all that is free of its device, until it serves."""
    start, begun, may_begin, others = Deployed.start, threading.Event(), threading.Event(), list[Any]()

    def slow(deployed: Deployed) -> None:
        begun.set()
        assert may_begin.wait(30)
        start(deployed)

    monkeypatch.setattr(Deployed, "start", slow)
    with Deployments("cpu#verbs3=24MiB", **OPTIONS) as fleet:

        def deploy(name: str) -> None:
            others.append(fleet.deploy(path, load=LOAD, name=name))

        threads = [threading.Thread(target=deploy, args=(name,)) for name in ("first", "second")]
        threads[0].start()
        assert begun.wait(30)
        threads[1].start()
        may_begin.set()
        for thread in threads:
            thread.join(60)
        assert sorted(fleet.names()) == ["first", "second"]
        assert len(others) == 2


def test_a_fault_in_a_look_ends_no_later_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def look(deployed: Deployed, now_s: float, views: RankViews) -> None:
        looks.append(now_s)
        raise ValueError("a fault")

    monkeypatch.setattr(Deployed, "look", look)
    with Deployments(DEVICES, launch="in-process", replanning=elastic.Replanning(tick_s=0.01)) as fleet:
        fleet.deploy(path, load=LOAD)
        until_s = time.monotonic() + 30
        while len(looks) < 3:
            assert time.monotonic() < until_s
            time.sleep(0.01)
