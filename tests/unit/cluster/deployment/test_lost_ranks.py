"""Ranks of deployments that are lost: at rest, in the middle of a change, for good."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.deployment.deployments import Deployments
from elastic.cluster.fleet.instance import Instance
from elastic.engines.base import Request
from elastic.errors import StateError
from elastic.planning.estimate.performance import Load
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
    assert deployed.look(time.monotonic()) is None
    wait_until(lambda: not deployed._transition.awaited)
    assert fleet.intend("model", replicas=2).status == "applied"
    assert set(deployed.ranks.values()) == serving(fleet) == {"r1", "r2"}


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
    wait_until(lambda: not deployed._transition.awaited)
    assert fleet.intend("model", replicas=2).status in ("applied", "unchanged")
    assert len(serving(fleet)) == fleet.status()[0].replicas == 2
    assert set(deployed.ranks.values()) == serving(fleet)
    assert fleet.intend("model", replicas=1).status == "applied"
    assert set(deployed.ranks.values()) == serving(fleet)
    heard = serve(engine, [Request(PROMPT, 8, id="last", ignore_eos=True)])
    assert heard.tokens["last"] == continuation(architectures.build("llama-gqa"), PROMPT, 8)


def test_ranks_that_none_replaces_are_forgotten_and_others_come(fleet: Deployments, path: str) -> None:
    fleet.deploy(path, load=LOAD, name="model", replicas=2, fleet={"replace": False})
    deployed = fleet._named("model")
    fleet["model"].kill("r1")
    told = deployed.look(time.monotonic())
    assert told is not None
    assert (told.status, [step.kind for step in told.steps]) == ("applied", ["add", "limit"])
    assert set(deployed.ranks.values()) == serving(fleet) == {"r0", "r2"}
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
