"""A server in front of a fleet: the model's answers, whatever its ranks do meanwhile."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import elastic
from elastic.assets import MODEL_DIR
from elastic.cli.main import main
from support.serving.live_server import PATIENCE_S, TOKENIZER, Live, live, model, model_tokens, text_of

TOKEN = "open sesame"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
PROMPT = "def read_file(path):"
LONG = 400
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(autouse=True)
def directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def served() -> Iterator[Live]:
    """Two ranks in this process behind a server."""
    fleet = elastic.Fleet.of(
        model(), copy.deepcopy(model()), places=["cpu=64MiB"], wrap={"variants": ("int4",)}, policy=None
    )
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
    for reading in readings * 3:
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
    body = {"actions": [{"kind": "release", "layers": [2, 5]}]}
    done = httpx.post(f"{served.url}/elastic/actions", json=body, headers=HEADERS, timeout=60).json()["results"]
    assert len({result["rank"] for result in done}) == 2
    assert [reading.whole() for reading in readings] == [expected(LONG)] * 2
    assert moved > 0
    status = httpx.get(f"{served.url}/elastic/status").json()
    assert [rank["layers"][2] for rank in status["ranks"]] == ["absent"] * 2
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
    assert "r1: 12 layers" in shown
    assert main(["fleet", "status", served.url]) == 0
    assert "2 of 2 ranks serve" in capsys.readouterr().out


def lines_of(child: subprocess.Popen[str], start: str) -> str:
    """Return the first line of a child that begins so."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(start):
            return line
    raise AssertionError(f"the server ended with {child.wait(PATIENCE_S)}")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_the_command_serves_by_processes_and_leaves_none(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    arguments = ["--ranks", "2", "--place", "cpu=64MiB", "--port", "0", "--enable-actions", "--token-file", str(token)]
    child = subprocess.Popen(
        [sys.executable, "-m", "elastic.cli.main", "serve", str(MODEL_DIR), *arguments, "--variants", "int4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        url = lines_of(child, "serving").split()[-1]
        ranks = httpx.get(f"{url}/elastic/status").json()["ranks"]
        assert len({rank["pid"] for rank in ranks} | {child.pid}) == 3
        reading = Reading(url, LONG)
        victim = next(rank["pid"] for rank in ranks)
        os.kill(victim, signal.SIGKILL)
        assert reading.whole() == expected(LONG)
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        answer = httpx.post(
            f"{url}/v1/completions", json=asked(60, response_format=wanted, ignore_eos=False), timeout=60
        )
        assert set(json.loads(answer.json()["choices"][0]["text"])) == {"n"}
        ranks += httpx.get(f"{url}/elastic/status").json()["ranks"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 0
    finally:
        child.kill()
        child.communicate()
    end = time.monotonic() + PATIENCE_S
    pids = {rank["pid"] for rank in ranks}
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < end, "a rank outlived its server"
        time.sleep(0.02)
