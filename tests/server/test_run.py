"""Ending a server: what runs is finished, what is new is told to go elsewhere, and the exit code is 0."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from engines.fake import FakeEngine
from fastapi import FastAPI
from fastapi.testclient import TestClient
from server.live import FAKE, PATIENCE_S, answer, app_for, live, until

import elastic
from elastic.assets import MODEL_DIR
from elastic.cli import serve
from elastic.cli.main import main, parser
from elastic.errors import ConfigError
from elastic.server.server import listen, run

EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED = {"prompt": "x", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def test_draining_finishes_what_runs_and_refuses_what_is_new() -> None:
    engine = FakeEngine(step_s=0.002)
    with live(engine) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        assert client.get("/health").json() == {"status": "serving"}
        with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as running:
            until(lambda: len(engine._running) == 1)
            server.server.handle_exit(signal.SIGTERM)
            refused = client.post("/v1/completions", json=ASKED)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["code"] == "unavailable"
            health = client.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            assert client.get("/v1/models").status_code == 200
            events = [line for line in running.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        server.ended()
    assert engine.cancelled == []
    assert not engine.serving


def test_draining_ends_after_its_time_with_an_error_in_the_stream() -> None:
    engine = FakeEngine(step_s=0.002)
    with (
        live(engine, drain_s=0.1) as server,
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**ASKED, "max_tokens": 8000, "stream": True}, timeout=30
        ) as running,
    ):
        until(lambda: len(engine._running) == 1)
        server.server.handle_exit(signal.SIGTERM)
        events = [line for line in running.iter_lines() if line]
        server.ended()
    assert json.loads(events[-2][6:])["error"]["code"] == "unavailable"
    assert not engine._thread.is_alive()


def test_a_second_signal_ends_it_at_once() -> None:
    engine = FakeEngine(step_s=0.002)
    with live(engine) as server, ThreadPoolExecutor(1) as pool:
        asked = {**ASKED, "max_tokens": 8000}
        running = pool.submit(httpx.post, f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S)
        until(lambda: len(engine._running) == 1)
        server.server.handle_exit(signal.SIGINT)
        server.server.handle_exit(signal.SIGINT)
        server.ended()
        assert isinstance(running.exception(), httpx.HTTPError) or running.result().status_code == 503
    assert server.server.force_exit
    assert not engine._thread.is_alive()


def test_an_engine_that_served_before_goes_on_after() -> None:
    engine = FakeEngine()
    engine.start()
    with live(engine) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert engine.serving
    engine.stop()


def test_an_address_that_is_not_ours() -> None:
    for host in ("no.such.host.invalid", "203.0.113.7", "\ud800"):
        with pytest.raises(ConfigError, match="--host"):
            listen(host, 0)


def test_a_port_that_is_taken_is_one_line() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: Address already in use"):
            run(app_for(FakeEngine()), port=port)


CHILD = """
import sys
from elastic.cli import main, serve
from engines.fake import FakeEngine
from fastapi import FastAPI
from fastapi.testclient import TestClient

def make_engine(model, options):
    engine = FakeEngine(step_s=0.002, queue=options.max_queue)
    engine.runtime = model.elastic
    return engine

serve.make_engine = make_engine
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`elastic serve` with the small model, in a process of its own, in front of a fake engine."""
    (tmp_path / "token").write_text("sesame\n")
    tests = str(Path(__file__).parents[1])
    options = ["--port", "0", "--place", "cpu=64MiB", "--enable-actions", "--token-file", str(tmp_path / "token")]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "serve", str(MODEL_DIR), "--served-model-name", "tiny", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, str(Path(tests).parent)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield child
    child.kill()
    child.communicate()


def test_sigterm_to_the_command_drains_and_exits_with_0(command: subprocess.Popen[str]) -> None:
    assert command.stdout is not None
    line = command.stdout.readline()
    assert line.startswith("serving tiny on http://127.0.0.1:"), command.communicate()
    url = line.split()[-1]
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        status = client.get("/elastic/status").json()
        assert status["layers"] == ["float32"] * 12
        headers = {"Authorization": "Bearer sesame"}
        step = {"actions": [{"kind": "release", "layers": [3]}], "dry_run": True}
        assert client.post("/elastic/actions", json=step, headers=headers).status_code == 200
        with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as running:
            lines = running.iter_lines()
            events = [next(lines)]
            command.send_signal(signal.SIGTERM)
            events += [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1])
    assert text.startswith(answer(FAKE, "x", 10)[0])
    _, log = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 0, log
    assert "Traceback" not in log


WRONG = [
    (["/nowhere"], "MODEL /nowhere: no model there"),
    (["/nowhere", "--port", "99999"], "--port 99999 is not a port"),
    (["/nowhere", "--enable-actions"], "--enable-actions needs a token"),
    (["/nowhere", "--token-file", "/nowhere"], "--token-file /nowhere cannot be read"),
    (["/nowhere", "--drain-seconds", "nan"], "--drain-seconds nan must be at least 0"),
    (["/nowhere", "--max-queue", "-1"], "--max-queue -1 must be at least 0"),
    (["/nowhere", "--place", "gpu"], "'gpu' is not a place"),
    ([str(MODEL_DIR), "--place", "cpu=64MiB", "--max-model-len", "1025"], "more than the 1024 tokens"),
    ([str(MODEL_DIR), "--place", "cpu=64MiB", "--host", "203.0.113.7"], "--host 203.0.113.7 --port 8000"),
]


def test_what_the_caller_of_serve_must_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTIC_TOKEN", raising=False)
    monkeypatch.setattr(serve, "make_engine", lambda model, options: FakeEngine())
    for arguments, line in WRONG:
        assert main(["serve", *arguments]) == 2
        error = capsys.readouterr().err
        assert line in error
        assert error.count("\n") == 1


def test_options_become_those_of_wrap() -> None:
    def chosen(*arguments: str) -> dict[str, Any]:
        return serve.wrap_options(parser().parse_args(["serve", "x", *arguments]))

    assert chosen() == {"places": None, "variants": (), "policy": "manual"}
    given = chosen("--place", "cpu#0", "--place", "cpu#1=1GiB", "--variants", "int8", "int4", "--order", "last_first")
    assert given == {
        "places": ["cpu#0", "cpu#1=1GiB"],
        "variants": ("int8", "int4"),
        "policy": "balanced",
        "order": "last_first",
    }
    assert chosen("--variants", "int4", "--policy", "manual")["policy"] == "manual"


def test_the_example_is_an_app_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(model: Any, max_queue: int) -> Any:
        made: Any = FakeEngine(queue=max_queue)
        made.runtime = model.elastic
        return made

    def look(app: FastAPI, port: int) -> int:
        with TestClient(app) as client:
            assert client.get("/hello").json() == "12 elastic layers"
            asked = {"model": "my-model", "prompt": "x", "max_tokens": 5, "temperature": 0}
            got = client.post("/v1/completions", json=asked).json()
        assert got["choices"][0]["text"] == answer(FAKE, "x", 5)[0]
        return port

    wrap = elastic.wrap
    monkeypatch.setitem(sys.modules, "elastic.engines.continuous", SimpleNamespace(ContinuousEngine=engine))
    monkeypatch.setattr("elastic.server.server.run", look)
    monkeypatch.setattr(elastic, "wrap", lambda model, **_: wrap(model, places=["cpu=64MiB"]))
    example = runpy.run_path(str(EXAMPLES / "fastapi_server.py"))
    assert example["main"](port="7") == 7


def test_without_fastapi_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import elastic.server
    from elastic.errors import BackendUnavailable

    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "elastic.server.app")
    with pytest.raises(BackendUnavailable, match=r"elastic-llm\[serve\]"):
        _ = elastic.server.create_app
