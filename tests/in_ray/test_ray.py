"""Ranks as actors of Ray: two serve, one is killed, another added."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup
from transformers import AutoModelForCausalLM

from elastic.assets import MODEL_DIR
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.launch.base import RankSpec
from elastic.cluster.launch.ray import RayLauncher
from elastic.engines.base import Request
from elastic.errors import ConfigError, ElasticError, StateError
from support.cluster.ray_side import asked, groups
from support.processes import wait_for_end, wait_until
from support.serving.fleet_side import FleetSide
from support.serving.generations import Collector, continuation

PROMPT = (5, 6, 7)
PLACES = ("cpu=32MiB",)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


@pytest.fixture
def launcher() -> Iterator[Callable[..., RayLauncher]]:
    made: list[RayLauncher] = []

    def make(**options: Any) -> RayLauncher:
        made.append(RayLauncher(cpus=0.5, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    wait_until(lambda: not groups(), "a placement group is left")


def test_two_actors_serve_one_is_killed_by_ray_one_by_the_system_and_one_is_added(
    launcher: Callable[..., RayLauncher], model: Any
) -> None:
    one, expected = launcher(ranks=2), continuation(model, PROMPT, 12)
    ranks = [FleetSide(one.start(RankSpec(f"r{i}", MODEL_DIR, PLACES))) for i in range(2)]
    assert len(groups()) == 1
    for rank in ranks:
        assert rank.answer("one", prompt=PROMPT, tokens=12) == expected
        rank.submit("long", tokens=900)
        rank.wait(lambda rank=rank: len(rank.tokens["long"]) > 3)  # type: ignore[misc]

    ray.kill(one._processes[0]._actor)
    assert "its actor has ended" in ranks[0].end()
    os.kill(ranks[1].client.hello.pid, signal.SIGKILL)
    assert "its actor has ended" in ranks[1].end()
    assert not any(rank.heard_all for rank in ranks)

    again = [FleetSide(one.start(RankSpec(f"again-{i}", MODEL_DIR, PLACES))) for i in range(2)]
    assert len(groups()) == 1  # the bundles of the dead
    added = FleetSide(one.start(RankSpec("added", MODEL_DIR, PLACES)))
    assert len(groups()) == 2
    assert len(one._processes) == 3, "those of the dead are kept"
    for rank in (*again, added):
        assert rank.answer("one", prompt=PROMPT, tokens=12) == expected
    pids = [rank.client.hello.pid for rank in (*again, added)]
    again[0].client.close()
    one.close()
    for rank, pid in zip((*again, added), pids, strict=True):
        rank.end()
        wait_for_end(pid)


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (RankSpec("r", "/no/such/model"), ConfigError, "no model there"),
        (RankSpec("r", MODEL_DIR, ("abacus=1MiB",)), ConfigError, "abacus"),
        (RankSpec("r", object()), ConfigError, "give its directory"),
    ],
)
def test_what_cannot_start_is_an_error_in_words(
    launcher: Callable[..., RayLauncher], spec: RankSpec, error: type[ElasticError], words: str
) -> None:
    with pytest.raises(error, match=words):
        launcher().start(spec)


def test_no_room_is_an_error_in_words_and_options_are_checked(launcher: Callable[..., RayLauncher]) -> None:
    with pytest.raises(StateError, match=r"^Ray has no room for 100 times"):
        launcher(ranks=100, room_s=0.5).start(RankSpec("r", MODEL_DIR))
    with pytest.raises(ConfigError, match="ranks=0"):
        launcher(ranks=0)
    with pytest.raises(ConfigError, match="strategy='CLOSE'"):
        launcher(strategy="CLOSE")


def test_an_actor_may_take_longer_to_connect_than_room_may_take_to_be_found(
    launcher: Callable[..., RayLauncher], model: Any
) -> None:
    one = launcher(ranks=1, room_s=60.0)
    bundle = one._take_bundle()
    one._give_back(*bundle)
    one._room_s = 0.0
    rank = FleetSide(one.start(RankSpec("slow", MODEL_DIR, PLACES)))
    assert rank.answer("one", prompt=PROMPT, tokens=12) == continuation(model, PROMPT, 12)
    rank.client.close()
    rank.end()


@pytest.mark.parametrize("what", ["eventfd", "thread", "interrupt"])
def test_an_actor_that_could_not_be_started_leaves_its_bundle_to_the_next(
    launcher: Callable[..., RayLauncher], model: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    one = launcher(ranks=1)

    def fail(*args: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    class NoThread(threading.Thread):
        def start(self) -> None:
            if self.name == "elastic-ray-actor":
                raise RuntimeError("can't start new thread")
            super().start()

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if what == "eventfd":
            patch.setattr(os, "eventfd", fail)
        elif what == "thread":
            patch.setattr(threading, "Thread", NoThread)
        else:
            patch.setattr(one, "_await", interrupt)
        told = pytest.raises(KeyboardInterrupt) if what == "interrupt" else pytest.raises(StateError, match="cannot be")
        with told:
            one.start(RankSpec("r0", MODEL_DIR, PLACES))
    assert len(one._free) == 1
    assert not one._processes
    rank = FleetSide(one.start(RankSpec("r1", MODEL_DIR, PLACES)))
    assert len(groups()) == 1
    assert rank.answer("one", prompt=PROMPT, tokens=12) == continuation(model, PROMPT, 12)
    rank.client.close()


def test_a_group_that_is_waited_for_at_an_interrupt_is_removed(
    launcher: Callable[..., RayLauncher], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = launcher(ranks=1)

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlacementGroup, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.start(RankSpec("r0", MODEL_DIR, PLACES))
    wait_until(lambda: not groups(), "nobody will give it back")


def test_a_fleet_on_ray_goes_on_when_an_actor_dies_and_replaces_it(
    launcher: Callable[..., RayLauncher], model: Any
) -> None:
    expected, heard = continuation(model, PROMPT, 300), Collector()
    with Fleet(str(MODEL_DIR), ranks=2, places=PLACES, launch=launcher(ranks=2)) as fleet:
        for i in range(4):
            fleet.submit(Request(PROMPT, 300, id=f"request-{i}", ignore_eos=True), heard)
        heard.wait_for_tokens("request-0", 5)
        first = fleet.status().ranks[0]
        os.kill(first.pid, signal.SIGKILL)
        heard.wait([f"request-{i}" for i in range(4)])
        assert [heard.tokens[f"request-{i}"] for i in range(4)] == [expected] * 4

        def serving() -> set[int]:
            return {rank.pid for rank in fleet.status().ranks if rank.serves}

        wait_until(lambda: len(serving() - {first.pid}) == 2, "the lost rank was not replaced", 120)
        fleet.add(places=PLACES)
        assert len(serving()) == 3
        assert len(fleet.scale_out(2)) == 2
        assert len(serving()) == 5
        fleet.submit(Request(PROMPT, 12, id="after", ignore_eos=True), heard)
        heard.wait(["after"])
        assert heard.tokens["after"] == expected[:12]


def test_the_command_starts_ray_serves_and_leaves_none_of_it(tmp_path: Path) -> None:
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")}
    said = (tmp_path / "said").open("w+")
    options = ["--ranks", "2", "--launch", "ray", "--place", PLACES[0], "--port", "0"]
    with (
        said,
        ended(
            subprocess.Popen(
                [sys.executable, "-m", "elastic.cli.main", "serve", str(MODEL_DIR), *options],
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**without, "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 4}), "OMP_NUM_THREADS": "1"},
            )
        ) as child,
    ):

        def url() -> str | None:
            text = Path(said.name).read_text()
            assert child.poll() is None, text
            return next((line.split()[-1] for line in text.splitlines() if line.startswith("serving")), None)

        wait_until(url, "it does not serve", 240)
        body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
        assert asked("/v1/completions", body, url())["usage"]["completion_tokens"] == 8
        ranks = asked("/elastic/status", at=url())["ranks"]
        assert [(rank["state"], rank["launcher"]) for rank in ranks] == [("serving", "ray")] * 2
        family = psutil.Process(child.pid).children(recursive=True)
        assert {rank["pid"] for rank in ranks} <= {process.pid for process in family}
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 0, Path(said.name).read_text()
        for process in family:
            wait_for_end(process.pid)


@contextmanager
def ended(child: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is ended with the block, however that ends."""
    try:
        yield child
    finally:
        child.kill()
        child.wait()
