"""A server in front of a fleet: the model's answers, whatever its ranks do meanwhile."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import elastic
from elastic.cli.main import main
from support.child_process import Forked
from support.isolation.named_memory import NamedMemory
from support.processes import descendants, wait_for_end
from support.serving.live_server import (
    FEW,
    PATIENCE_S,
    TOKENIZER,
    Live,
    live,
    model,
    model_files,
    model_tokens,
    text_of,
)

TOKEN = "open sesame"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
PROMPT = "def read_file(path):"
LONG = 160
CHOICES = ["left", "right"]


@pytest.fixture(autouse=True)
def directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def served() -> Iterator[Live]:
    """Two ranks in this process behind a server."""
    fleet = elastic.Fleet.of(model(), copy.deepcopy(model()), places=["cpu=64MiB"], policy=None)
    try:
        fleet.start()
        with live(fleet, token=TOKEN, actions=True) as running:
            yield running
    finally:
        fleet.stop(drain=False)


def expected(most: int) -> str:
    return text_of(model_tokens(tuple(TOKENIZER.encode(PROMPT)), most))


def asked(most: int, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": most, "temperature": 0, "ignore_eos": True, **more}


class Reading:
    """A streamed answer, read on a thread."""

    def __init__(self, url: str, most: int) -> None:
        self.id, self.text, self.chunks = "", "", 0
        self.first = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(url, most))
        self.thread.start()
        assert self.first.wait(PATIENCE_S)

    def _read(self, url: str, most: int) -> None:
        body = asked(most, stream=True)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S * 4) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    self.id = chunk["id"]
                    self.text += "".join(choice["text"] for choice in chunk["choices"])
                    self.chunks += 1
                    self.first.set()

    def whole(self) -> str:
        self.thread.join(PATIENCE_S * 4)
        assert not self.thread.is_alive()
        return self.text


@pytest.mark.slow
def test_answers_are_the_models_while_requests_move_and_layers_leave(served: Live) -> None:
    readings = [Reading(served.url, LONG) for _ in range(2)]
    moved = 0
    for reading in readings * 2:
        request = reading.id.removeprefix("cmpl-")
        here = served.engine.instance_of(request)
        if here is None:
            continue
        there = next(i.name for i in served.engine.status().instances if i.name != here)
        answer = httpx.post(
            f"{served.url}/elastic/fleet/move",
            json={"request": reading.id, "instance": there},
            headers=HEADERS,
            timeout=60,
        )
        moved += answer.status_code == 200
    body = {"actions": [{"kind": "release", "layers": [1, 3]}]}
    done = httpx.post(f"{served.url}/elastic/actions", json=body, headers=HEADERS, timeout=60).json()["results"]
    assert len({result["rank"] for result in done}) == 2
    assert [reading.whole() for reading in readings] == [expected(LONG)] * 2
    assert moved > 0
    status = httpx.get(f"{served.url}/elastic/status").json()
    assert [rank["layers"][1] for rank in status["ranks"]] == ["absent"] * 2
    assert status["fleet"]["totals"]["moved"] == moved
    served.engine.check()


@pytest.mark.slow
def test_a_rank_that_dies_costs_no_answer(served: Live) -> None:
    reading = Reading(served.url, LONG)
    here = served.engine.instance_of(reading.id.removeprefix("cmpl-"))
    assert here is not None
    served.engine.kill(here)
    assert reading.whole() == expected(LONG)
    health = httpx.get(f"{served.url}/health")
    assert health.status_code == 200
    assert {rank["name"]: rank["state"] for rank in health.json()["ranks"]}[here] == "lost"


def test_bench_and_top_take_a_fleet(
    served: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["--poisson", "20", "--duration", "0.5", "--lengths", "12:4", "--out", str(tmp_path / "result.json")]
    assert main(["bench", "run", "--url", served.url, *arguments]) == 0
    capsys.readouterr()
    assert main(["top", "--once", served.url]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 ranks serve" in shown
    assert f"r1: {FEW} layers" in shown
    assert main(["fleet", "status", served.url]) == 0
    assert "2 of 2 ranks serve" in capsys.readouterr().out


TESTS = Path(__file__).parents[2]
SERVE = """
    import sys
    sys.path.insert(0, {tests!r})
    from elastic.cli.main import main
    from support.isolation.forked_server import fork_the_server
    fork_the_server()
    sys.exit(main({arguments}))
"""


class Command:
    """`elastic serve` of the small model in a process of its own."""

    def __init__(self, child: Forked) -> None:
        self.child = child
        self.before = list[str]()
        """The lines that it said before it served."""
        self.url = self._serving()

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/elastic/status").json())

    def complete(self, **asked: Any) -> dict[str, Any]:
        return self._post("/v1/completions", asked)

    def act(self, verb: str, **body: Any) -> dict[str, Any]:
        return self._post(f"/elastic/fleet/{verb}", body)

    def end(self) -> set[int]:
        """Have it end as it should; return the processes that it had."""
        family = descendants(self.child.pid)
        self.child.send_signal(signal.SIGTERM)
        assert self.child.wait(PATIENCE_S) == 0
        return family

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}{path}", json=body, headers=HEADERS, timeout=2 * PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def _serving(self) -> str:
        for line in map(bytes.decode, self.child.stdout):
            if line.startswith("serving"):
                return line.split()[-1]
            self.before.append(line.rstrip())
        raise AssertionError(f"the server ended with {self.child.wait(PATIENCE_S)}, and said {self.before}")


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `elastic serve` with some options, and kills it at last."""
    token, started = tmp_path / "token", list[Forked]()
    token.write_text(TOKEN)

    def start(*options: str) -> Command:
        more = ["serve", model_files(), "--port", "0", "--enable-actions", "--token-file", str(token), *options]
        started.append(Forked(SERVE.format(tests=str(TESTS), arguments=more)))
        return Command(started[-1])

    yield start
    for child in started:
        child.send_signal(signal.SIGKILL)
        print(child.stderr.read().decode())
        child.close()


@pytest.mark.slow
def test_the_command_serves_by_processes_and_leaves_none(command: Callable[..., Command]) -> None:
    server = command("--ranks", "2", "--place", "cpu=64MiB", "--variants", "int4")
    ranks = server.status()["ranks"]
    assert len({rank["pid"] for rank in ranks} | {server.child.pid}) == 3
    reading = Reading(server.url, LONG)
    victim = next(rank["pid"] for rank in ranks)
    os.kill(victim, signal.SIGKILL)
    assert reading.whole() == expected(LONG)
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": CHOICES}}}
    answer = server.complete(**asked(60, response_format=wanted, ignore_eos=False))
    assert json.loads(answer["choices"][0]["text"]) in CHOICES
    pids = {rank["pid"] for rank in ranks + server.status()["ranks"]}
    for pid in pids | server.end():
        wait_for_end(pid)


@pytest.mark.slow
def test_the_command_deploys_by_an_intent_that_changes_over_http_and_leaves_nothing(
    command: Callable[..., Command],
) -> None:
    """Answers are the model's before and after a second instance came, and of the form that the last intent wants."""
    named = NamedMemory()
    devices = ["--devices", "cpu#a=96MiB,cpu#b=96MiB", "--weights", "full,int8", "--losses", "int8=0.001"]
    server = command(*devices, "--intent", "memory", "--quality-loss", "0", "--prompt", "64", "--new-tokens", "32")
    name = Path(model_files()).name
    assert f"{name} is TP1 PP1 full on cpu#a" in server.before
    assert server.complete(**asked(30))["choices"][0]["text"] == expected(30)
    told = server.status()
    (deployment,) = told["deployments"]
    assert (deployment["name"], deployment["configuration"], deployment["replicas"]) == (name, "TP1 PP1 full", 1)
    assert [device["models"] for device in told["devices"]] == [[name], []]

    more = server.act("intend", name=name, replicas=2)["intended"]
    assert (more["status"], [step["kind"] for step in more["steps"]]) == ("applied", ["add", "limit"])
    told = server.status()
    assert [device["models"] for device in told["devices"]] == [[name], [name]]
    assert len({rank["pid"] for rank in told["ranks"]} | {server.child.pid}) == 3
    for _ in range(2):
        assert server.complete(**asked(30))["choices"][0]["text"] == expected(30)

    other = server.act("intend", name=name, intent={"minimize": "memory"})["intended"]
    assert (other["status"], other["after"]) == ("applied", "TP1 PP1 int8")
    told = server.status()
    assert [rank["layers"] for rank in told["ranks"]] == [["int8"] * FEW] * 2
    assert (told["deployments"][0]["changes"], told["deployments"][0]["replicas"]) == (2, 2)
    assert server.complete(**asked(30))["usage"]["completion_tokens"] == 30

    for pid in server.end():
        wait_for_end(pid)
    assert named.left() == set()
