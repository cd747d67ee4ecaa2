"""Ending a server: what runs is finished, what is new is told to go elsewhere, and the exit code is 0."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines.fake import FakeEngine
from server.live import PATIENCE_S, app_for, live, until

from elastic.assets import MODEL_DIR
from elastic.cli import serve
from elastic.cli.main import main, parser
from elastic.errors import ConfigError
from elastic.server.server import listen, run

EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED = {"prompt": "x", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def test_draining_finishes_what_runs_and_refuses_what_is_new() -> None:
    engine = FakeEngine(step_s=0.005)
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
    engine = FakeEngine(step_s=0.005)
    with (
        live(engine, drain_s=0.1) as server,
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**ASKED, "max_tokens": 900, "stream": True}, timeout=30
        ) as running,
    ):
        until(lambda: len(engine._running) == 1)
        server.server.handle_exit(signal.SIGTERM)
        events = [line for line in running.iter_lines() if line]
        server.ended()
    assert json.loads(events[-2][6:])["error"]["code"] == "unavailable"
    assert not engine._thread.is_alive()


def test_a_second_signal_ends_it_at_once() -> None:
    engine = FakeEngine(step_s=0.005)
    with live(engine) as server, ThreadPoolExecutor(1) as pool:
        asked = {**ASKED, "max_tokens": 900}
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


class Child:
    """A server in a process of its own; it says where it listens in its first line."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def url(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("serving "), self._process.communicate()
        return line.split()[-1]

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def ended(self) -> None:
        """Return when it has, as it should."""
        _, log = self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == 0, log
        assert "Traceback" not in log

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def children(tmp_path: Path) -> Iterator[tuple[Child, Child]]:
    """`elastic serve` and the example, on the small model inside."""
    (tmp_path / "token").write_text("sesame\n")
    options = ["--port", "0", "--place", "cpu=64MiB", "--enable-actions", "--token-file", str(tmp_path / "token")]
    name = ["--served-model-name", "tiny"]
    both = (
        Child("-P", "-m", "elastic.cli.main", "serve", str(MODEL_DIR), *name, *options),
        Child("-P", str(EXAMPLES / "fastapi_server.py"), str(MODEL_DIR), "0"),
    )
    yield both
    for child in both:
        child.kill()


def test_the_command_and_the_example_serve_until_sigterm(children: tuple[Child, Child]) -> None:
    command, example = children
    with httpx.Client(base_url=command.url(), timeout=PATIENCE_S) as client:
        status = client.get("/elastic/status").json()
        assert (status["model"], status["layers"]) == ("tiny", ["float32"] * 12)
        headers = {"Authorization": "Bearer sesame"}
        step = {"actions": [{"kind": "release", "layers": [3]}]}
        assert client.post("/elastic/actions", json=step, headers=headers).status_code == 200
        with client.stream("POST", "/v1/completions", json={**ASKED, "max_tokens": 60, "stream": True}) as running:
            lines = running.iter_lines()
            events = [next(lines)]
            command.end()
            events += [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
    with httpx.Client(base_url=example.url(), timeout=PATIENCE_S) as client:
        assert client.get("/layers").json() == 12
        asked = {"model": "my-model", "prompt": "import os", "max_tokens": 5, "temperature": 0}
        assert client.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 5
        example.end()
    command.ended()
    example.ended()


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


def test_without_fastapi_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import elastic.server
    from elastic.errors import BackendUnavailable

    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "elastic.server.app")
    with pytest.raises(BackendUnavailable, match=r"elastic-llm\[serve\]"):
        _ = elastic.server.create_app
