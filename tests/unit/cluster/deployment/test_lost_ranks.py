"""Ranks of deployments that are lost: at rest, in the middle of a change, for good."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.deployment.deployments import Deployments
from elastic.cluster.deployment.ranks import forms_in
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.instance import Instance
from elastic.engines.base import Request
from elastic.errors import CapacityError, StateError
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from elastic.types import Restore
from support import architectures
from support.processes import wait_until
from support.serving.generations import Collector, continuation, prompts, serve

LOAD = Load(64, 32, 1.0)
PROMPT = prompts([40], architectures.VOCAB)[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> str:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    architectures.build("llama-gqa").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def fleet() -> Iterator[Deployments]:
    options: dict[str, Any] = {"engine": {"block_tokens": 8}, "beat_timeout_s": 60}
    with Deployments(
        "cpu#a=12MiB,cpu#b=12MiB", weights=("full",), launch="in-process", fleet=options, replanning=None
    ) as running:
        yield running


def serving(fleet: Deployments) -> set[str]:
    return {rank.name for rank in fleet["model"].status().ranks if rank.serves}


def test_a_fleet_serves_on_while_its_only_rank_is_replaced(fleet: Deployments, path: str) -> None:
    """From the moment in which the rank is forgotten: requests wait for the next one, and none is refused."""
    fleet.deploy(path, load=LOAD, name="model")
    engine, seen = fleet["model"], list[bool]()
    replace = engine._members.on_lost

    def noting(instance: Instance) -> None:
        seen.append(engine.serving)
        replace(instance)

    engine._members.on_lost = noting
    engine.kill("r0")
    heard = serve(engine, [Request(PROMPT, 8, id="beside", ignore_eos=True)])
    assert heard.tokens["beside"] == continuation(architectures.build("llama-gqa"), PROMPT, 8)
    assert seen == [True]


def test_a_change_waits_until_a_lost_rank_is_replaced(fleet: Deployments, path: str) -> None:
    fleet.deploy(path, load=LOAD, name="model")
    fleet["model"].kill("r0")
    with pytest.raises(StateError, match="rank r0 of 'model' was lost, and another one begins in its place; try again"):
        fleet.intend("model", replicas=2)
    deployed = fleet._named("model")
    assert deployed.look(time.monotonic(), deployed.ranks.look()) is None
    wait_until(lambda: not deployed.ranks.replaced())
    assert fleet.intend("model", replicas=2).status == "applied"
    assert set(deployed.ranks.by_device.values()) == serving(fleet) == {"r1", "r2"}


def test_a_rank_that_is_lost_in_the_middle_of_a_change_leaves_none_that_nobody_knows(
    fleet: Deployments, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(path, load=LOAD, name="model")
    engine, deployed = fleet["model"], fleet._named("model")
    add = engine.add

    def add_and_lose(*places: Any) -> str:
        name = add(*places)
        engine.kill("r0")
        return name

    monkeypatch.setattr(engine, "add", add_and_lose)
    stopped = fleet.intend("model", replicas=2)
    assert stopped.status == "partial"
    monkeypatch.undo()
    wait_until(lambda: not deployed.ranks.replaced())
    assert fleet.intend("model", replicas=2).status in ("applied", "unchanged")
    assert len(serving(fleet)) == fleet.status()[0].replicas == 2
    assert set(deployed.ranks.by_device.values()) == serving(fleet)
    assert fleet.intend("model", replicas=1).status == "applied"
    assert set(deployed.ranks.by_device.values()) == serving(fleet)
    heard = serve(engine, [Request(PROMPT, 8, id="last", ignore_eos=True)])
    assert heard.tokens["last"] == continuation(architectures.build("llama-gqa"), PROMPT, 8)


def test_ranks_that_a_stopped_change_left_serve_when_one_of_them_is_replaced(
    fleet: Deployments, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has planned what they are to have for keys and values."""
    fleet.deploy(path, load=LOAD, name="model")
    engine, deployed = fleet["model"], fleet._named("model")

    def refuse(*_: Any, **__: Any) -> None:
        raise StateError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "apply", refuse)
        assert fleet.intend("model", replicas=2).status == "partial"
    assert set(deployed.ranks.by_device.values()) == {"r0", "r1"}
    engine.kill("r1")
    wait_until(lambda: not deployed.ranks.replaced())
    told = deployed.look(time.monotonic(), deployed.ranks.look())
    assert told is not None
    assert told.why == "a rank was lost, and replaced"
    assert all(engine.look(rank).status.kv[0].limit_bytes for rank in serving(fleet))
    engine.kill("r0")
    heard = serve(engine, [Request(PROMPT, 8, id="last", ignore_eos=True)])
    assert heard.ends["last"].finish == "length"


def test_a_deployment_whose_last_rank_is_lost_in_a_change_is_told_of(
    fleet: Deployments, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no stages any more, and the status of all deployments was a ValueError."""
    fleet.deploy(path, load=LOAD, name="model", fleet={"replace": False})
    engine = fleet["model"]

    def lose(*_: Any, **__: Any) -> None:
        engine.kill("r0")
        raise StateError("it has gone")

    monkeypatch.setattr(engine, "add", lose)
    assert fleet.intend("model", replicas=2).status == "partial"
    assert [each.replicas for each in fleet.status()] == [1]
    with pytest.raises(StateError, match="no rank of 'model' is left"):
        fleet.intend("model")


def test_replicas_of_which_one_has_changed_are_not_taken_for_changed(
    fleet: Deployments, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing restored the second one any more."""
    fleet.deploy(path, "latency", load=LOAD, name="model", weights=("full", "int8"), replicas=2)
    engine, deployed = fleet["model"], fleet._named("model")
    apply, exact = engine.apply, Intent("latency", quality_loss=0.0)

    def refuse_second(rank: str, actions: Any, **options: Any) -> Any:
        if rank == "r1" and isinstance(actions[0], Restore):
            raise CapacityError("no room", requested_bytes=1, free_bytes=0, total_bytes=1)
        return apply(rank, actions, **options)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "apply", refuse_second)
        told = fleet.intend("model", exact)
    assert (told.status, told.after, fleet.status()[0].configuration) == ("partial", "TP1 PP1 int8", "TP1 PP1 int8")
    assert deployed.look(time.monotonic(), deployed.ranks.look()) is None
    done = deployed.look(time.monotonic() + 1000, deployed.ranks.look())
    assert done is not None
    assert [(step.kind, len(step.devices)) for step in done.steps] == [("restore", 1), ("limit", 2)]
    assert {*chain(*map(forms_in, deployed.ranks.look().values()))} == {"full"}


def test_ranks_that_none_replaces_are_forgotten_and_others_come(fleet: Deployments, path: str) -> None:
    fleet.deploy(path, load=LOAD, name="model", replicas=2, fleet={"replace": False})
    deployed = fleet._named("model")
    fleet["model"].kill("r1")
    told = deployed.look(time.monotonic(), deployed.ranks.look())
    assert told is not None
    assert (told.status, [step.kind for step in told.steps]) == ("applied", ["add", "limit"])
    assert set(deployed.ranks.by_device.values()) == serving(fleet) == {"r0", "r2"}
    fleet["model"].kill("r0")
    fleet["model"].kill("r2")
    with pytest.raises(StateError, match="no rank of 'model' is left, and none comes; remove it, and deploy it anew"):
        fleet.intend("model", "memory")
    assert fleet.status()[0].replicas == 2
    fleet.remove("model")
    assert all(device.free_bytes == device.memory_bytes for device in fleet.devices())


def test_requests_of_a_lost_rank_are_finished_by_the_next_one_where_their_deployment_ends(
    fleet: Deployments, path: str
) -> None:
    fleet.deploy(path, load=LOAD, name="model")
    engine, heard = fleet["model"], Collector()
    engine.submit(Request(PROMPT, 60, id="last", ignore_eos=True), heard)
    heard.wait_for_tokens("last", 3)
    engine.kill("r0")
    fleet.remove("model")
    assert heard.ends["last"].finish == "length"
    assert heard.tokens["last"] == continuation(architectures.build("llama-gqa"), PROMPT, 60)


def test_a_rank_that_is_lost_as_it_begins_is_told_in_words(
    fleet: Deployments, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Fleet.start

    def start_and_lose(engine: Fleet) -> None:
        start(engine)
        engine.kill("r0")

    monkeypatch.setattr(Fleet, "start", start_and_lose)
    with pytest.raises(StateError, match=r"the rank of 'model' on cpu#\w was lost meanwhile; try again"):
        fleet.deploy(path, load=LOAD, name="model", weights=("int8",), replicas=2)
    assert fleet.names() == ()
    assert all(device.free_bytes == device.memory_bytes for device in fleet.devices())


@pytest.mark.parametrize("weights", [("int8",), ("full", "int8")])
def test_a_dry_run_leaves_a_replaced_rank_to_get_the_configuration(
    weights: tuple[str, ...], fleet: Deployments, path: str
) -> None:
    """It begins with full weights, which may be a form that the deployment may not have."""
    fleet.deploy(path, "latency", load=LOAD, name="model", weights=weights)
    deployed = fleet._named("model")
    assert deployed.plan.configuration.weights == "int8"
    fleet["model"].kill("r0")
    wait_until(lambda: not deployed.ranks.replaced())
    told = fleet.intend("model", dry_run=True)
    assert (told.status, told.before, told.after) == ("planned", "TP1 PP1 full", "TP1 PP1 int8")
    done = deployed.look(time.monotonic(), deployed.ranks.look())
    assert done is not None
    assert (done.status, done.why) == ("applied", "a rank was lost, and replaced")
    assert deployed.observed().weights == "int8"


def test_a_rank_that_is_lost_while_requests_have_more_than_its_limit_gets_the_configuration(
    fleet: Deployments, path: str
) -> None:
    fleet.deploy(path, load=Load(64, 64, 8.0), name="model")
    engine, deployed, heard = fleet["model"], fleet._named("model"), Collector()
    for number in range(8):
        engine.submit(Request(PROMPT, 80, id=str(number), ignore_eos=True), heard)
    heard.wait_for_tokens("0", 2)
    fleet.intend("model", load=Load(1, 1, 0.1))
    deployed.ranks.above_limits = True  # as where requests take long
    engine.kill("r0")
    wait_until(lambda: not deployed.ranks.replaced())
    fleet._look(deployed, time.monotonic(), deployed.ranks.look())
    told = deployed.look(time.monotonic(), deployed.ranks.look())
    assert told is not None
    assert told.why == "a rank was lost, and replaced"
    assert set(deployed.ranks.by_device.values()) == serving(fleet) == {"r1"}
    heard.wait([str(number) for number in range(8)])
    assert {end.finish for end in heard.ends.values()} == {"length"}


def test_a_change_that_was_interrupted_is_put_right(
    fleet: Deployments, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(path, load=LOAD, name="model")
    engine, deployed = fleet["model"], fleet._named("model")
    add = engine.add

    def add_and_interrupt(*places: Any) -> str:
        add(*places)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "add", add_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        fleet.intend("model", replicas=2)
    told = deployed.look(time.monotonic(), deployed.ranks.look())
    assert told is not None
    assert (told.why, [step.kind for step in told.steps]) == ("a change was interrupted", ["remove", "limit"])
    assert set(deployed.ranks.by_device.values()) == serving(fleet) == {"r0"}
    assert sorted(device.free_bytes == device.memory_bytes for device in fleet.devices()) == [False, True]


def test_one_look_at_a_rank_suffices_for_a_tick(fleet: Deployments, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.deploy(path, load=LOAD, name="model", replicas=2)
    engine, looks = fleet["model"], list[str]()
    look = engine.look
    monkeypatch.setattr(engine, "look", lambda rank: (looks.append(rank), look(rank))[1])
    monkeypatch.setattr(fleet, "_watches", True)
    fleet._tick()
    assert sorted(looks) == ["r0", "r1"]
