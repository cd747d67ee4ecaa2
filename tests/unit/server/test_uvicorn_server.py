"""Ending a server: what runs is finished, what is new is told to go elsewhere, and the exit code is 0."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from transformers import AutoConfig

from elastic.assets import MODEL_DIR
from elastic.cli import serve
from elastic.cli.main import main, parser
from elastic.errors import ConfigError
from elastic.planning.estimate.intent import Intent
from elastic.server import create_app, uvicorn_server
from elastic.server.uvicorn_server import bind, listen, run
from support.child_process import Forked
from support.cluster.fake_deployments import FakeDeployments
from support.processes import wait_until
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import CONTEXT, NAME, PATIENCE_S, TOKENIZER, app_for, live

EXAMPLES = Path(__file__).parents[3] / "examples"
ASKED = {"prompt": "x", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
def test_draining_finishes_what_runs_and_refuses_what_is_new() -> None:
    engine = FakeEngine(step_s=0.005)
    with live(engine) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        assert client.get("/health").json() == {"status": "serving"}
        with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as running:
            wait_until(lambda: len(engine._running) == 1)
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
            "POST", f"{server.url}/v1/completions", json={**ASKED, "max_tokens": 900, "stream": True}, timeout=120
        ) as running,
    ):
        wait_until(lambda: len(engine._running) == 1)
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
        wait_until(lambda: len(engine._running) == 1)
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


def test_draining_ends_what_runs_on_engines_that_served_before_and_go_on() -> None:
    """Also on those that are deployed beside the server's own, or were when the request came."""
    deployments, names = FakeDeployments(), (NAME, "second", "third")
    for name in names:
        deployments.deploy(f"/models/{name}", Intent(), name=name)
    engines, beside = dict(deployments.engines), {"tokenizer": TOKENIZER, "max_model_len": CONTEXT}
    options: dict[str, Any] = {"deployments": deployments, "model_options": lambda path: beside}
    with live(engines[NAME], drain_s=0.1, **options) as server, ThreadPoolExecutor(3) as pool:

        def end_of(name: str) -> str:
            asked = {**ASKED, "model": name, "max_tokens": 900, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S) as running:
                return [line for line in running.iter_lines() if line][-2]

        for engine in engines.values():
            engine._step_s = 0.05
        ends = [pool.submit(end_of, name) for name in names]
        wait_until(lambda: all(len(engine._running) == 1 for engine in engines.values()))
        del deployments.told["third"]
        server.server._models.refresh()
        server.server.handle_exit(signal.SIGTERM)
        assert [json.loads(end.result()[6:])["error"]["code"] for end in ends] == ["unavailable"] * 3
        server.ended()
    for engine in engines.values():
        assert engine.serving
        engine.stop()


def test_an_answer_that_would_begin_when_the_time_to_drain_is_over_is_refused() -> None:
    app = app_for(FakeEngine())
    with TestClient(app) as client:
        app.state.models.cancel_answers()
        assert client.post("/v1/completions", json=ASKED).json()["error"]["code"] == "unavailable"


def test_an_address_that_is_not_ours() -> None:
    for host in ("no.such.host.invalid", "203.0.113.7", "\ud800"):
        with pytest.raises(ConfigError, match="--host"):
            bind(host, 0)


def test_a_port_that_is_taken_is_one_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        listen(taken)
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: Address already in use"):
            run(app_for(FakeEngine()), port=port)


def test_a_port_that_is_taken_is_said_before_a_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        listen(taken)
        port = taken.getsockname()[1]
        assert main(["serve", "/nowhere", "--port", str(port)]) == 2
        assert f"--port {port}: Address already in use" in capsys.readouterr().err


def test_nobody_can_connect_to_a_port_before_the_model_is_there() -> None:
    with bind("127.0.0.1", 0) as bound, socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(bound.getsockname())


def test_of_two_servers_that_bound_a_port_at_once_the_second_says_so() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            listen(first)
            with pytest.raises(ConfigError, match=f"--port {port}: Address already in use"):
                run(app_for(FakeEngine()), bound=second)


def test_collections_of_garbage_leave_out_what_was_there_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of many objects sets one off, and the event loop stands still for as long as it takes."""
    looked_at: list[int] = []

    class Looking:
        force_exit = False

        def __init__(self, app: Any, **options: Any) -> None: ...

        def run(self, sockets: Any) -> None:
            looked_at.append(len(gc.get_objects()))

    monkeypatch.setattr(uvicorn_server, "Server", Looking)
    app, before = app_for(FakeEngine()), len(gc.get_objects())
    assert run(app, port=0) == 0
    assert looked_at[0] < before / 10
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as before: else each test after this one collects all that was imported


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_body": 0}, "max_body=0 refuses every request"),
        ({"api_key": ""}, "api_key='' lets everyone in"),
        ({"api_key": " "}, "api_key='' lets everyone in"),
        ({"api_key": "two\nlines"}, "api_key has a line break"),
        ({"token": "\ud800", "actions": True}, "token has a line break or another character"),
        ({"max_model_len": 0}, "max_model_len=0 leaves no room"),
        ({"allowed_origins": "https://page.example"}, "allowed_origins 'https://page.example' is one text"),
        ({"allowed_origins": ["page.example"]}, "allowed_origins 'page.example' is never met"),
    ],
)
def test_an_app_that_could_not_serve_is_not_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        app_for(FakeEngine(), **options)


def test_an_app_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="name=' ' is empty"):
        create_app(FakeEngine(), None, " ")


@pytest.mark.parametrize("variable", ["ELASTIC_TOKEN", "ELASTIC_API_KEY"])
def test_a_secret_that_is_empty_does_not_open_the_server(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "")
    assert main(["serve", "/nowhere", "--port", "0"]) == 2
    assert f"{variable} is empty" in capsys.readouterr().err
    monkeypatch.setenv(variable, "two\nlines")
    assert main(["serve", "/nowhere", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert f"{variable} has a line break" in said
    assert "lines" not in said


class Child:
    """A server in a process of its own; it says where it listens in its first line."""

    def __init__(self, process: Forked | subprocess.Popen[bytes]) -> None:
        self._process = process

    def url(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        assert line.startswith("serving "), self._log()
        return line.split()[-1]

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def ended(self, code: int = 0) -> None:
        """Return when it has, as it should."""
        assert self._process.wait(PATIENCE_S) == code, self._log()
        assert "Traceback" not in self._log()

    def _log(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.read().decode()


@contextlib.contextmanager
def killed(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """It does not outlive what is done with it."""
    try:
        yield
    finally:
        process.kill()


@pytest.mark.slow
def test_the_command_serves_until_sigterm(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame\n")
    options = ["--port", "0", "--place", "cpu=64MiB", "--enable-actions", "--token-file", str(tmp_path / "token")]
    arguments = ["serve", str(MODEL_DIR), "--served-model-name", "tiny", *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "elastic.cli.main", *arguments], **pipes) as process, killed(process):
        command = Child(process)
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
        command.ended()


@pytest.mark.slow
def test_the_example_serves_until_sigterm() -> None:
    arguments = [str(EXAMPLES / "fastapi_server.py"), str(MODEL_DIR), "0"]
    script = f"import runpy, sys; sys.argv = {arguments}; runpy.run_path(sys.argv[0], run_name='__main__')"
    with contextlib.closing(Forked(script)) as process:
        example = Child(process)
        with httpx.Client(base_url=example.url(), timeout=PATIENCE_S) as client:
            assert client.get("/layers").json() == 12
            asked = {"model": "my-model", "prompt": "import os", "max_tokens": 5, "temperature": 0}
            assert client.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 5
            example.end()
        example.ended()


@pytest.fixture
def busy() -> Iterator[Child]:
    """A server of an engine that never comes to the end of a request."""
    code = (
        "from support.serving.fake_engine import FakeEngine; from support.serving.live_server import app_for;"
        "from elastic.server import run;"
        "raise SystemExit(run(app_for(FakeEngine(step_s=1)), port=0))"
    )
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})"
    with contextlib.closing(Forked(f"{path}; {code}")) as process:
        yield Child(process)


@pytest.mark.slow
def test_a_second_signal_ends_the_process_quietly(busy: Child) -> None:
    url = busy.url()
    where = "127.0.0.1", int(url.rsplit(":", 1)[1])
    asked = json.dumps({**ASKED, "stream": True}).encode()
    with contextlib.ExitStack() as stack:
        for body, missing in ((asked, 0), (asked, 10)):  # one that runs, and half a one
            client = stack.enter_context(socket.create_connection(where, PATIENCE_S))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) + missing}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_until(lambda: httpx.get(f"{url}/elastic/status").json()["traffic"]["running"] == 1)
        busy.end()
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        busy.end()
        busy.ended(code=1)


WRONG = [
    (["/nowhere", "--port", "0"], "MODEL /nowhere: no model there"),
    (["/nowhere", "--port", "99999"], "--port 99999 is not a port"),
    (["/nowhere", "--enable-actions"], "--enable-actions needs a token"),
    (["/nowhere", "--token-file", "/nowhere"], "--token-file /nowhere cannot be read"),
    (["/nowhere", "--drain-seconds", "nan"], "--drain-seconds nan must be at least 0"),
    (["/nowhere", "--header-timeout", "0"], "--header-timeout 0.0 must be above 0"),
    (["/nowhere", "--body-timeout", "nan"], "--body-timeout nan must be above 0"),
    (["/nowhere", "--max-queue", "-1"], "--max-queue -1 must be at least 1"),
    (["/nowhere", "--max-queue", "0"], "--max-queue 0 must be at least 1"),
    (["/nowhere", "--drain-seconds", "inf"], "--drain-seconds inf must be at least 0 and finite"),
    (["/nowhere", "--max-model-len", "0"], "--max-model-len 0 must be at least 2"),
    (["/nowhere", "--max-body", "0"], "--max-body 0 must be at least 1"),
    (["/nowhere", "--max-body", ""], "--max-body='' is not a size"),
    (["/nowhere", "--served-model-name", ""], "--served-model-name '' is empty"),
    (["/nowhere", "--served-model-name", "\udcff"], "--served-model-name '\\udcff' is not UTF-8"),
    (["/nowhere", "--place", ""], "'' is not a place"),
    (
        ["/nowhere", "--place", "cpu=900TiB"],
        "places=['cpu'] have budgets of 989,560,464,998,400 bytes together; cpu has",
    ),
    (["/nowhere", "--place", "cpu#a=1GiB", "--place", "cpu#b=900TiB"], "places=['cpu#a', 'cpu#b'] have budgets of"),
    (["/nowhere", "--prepack", "--place", "cpu#a", "--place", "cpu#b"], "prepack=True does not go with places="),
    (["/nowhere", "--prepack", "--shards", "2"], "prepack=True does not go with shards=2"),
    (["/nowhere", "--slo-ttft", "0"], "ttft_s=0.0 cannot be"),
    (["/nowhere", "--host", "203.0.113.7"], "--host 203.0.113.7 --port 8000"),
    (
        ["/nowhere", "--allowed-hosts", "example.com:8000"],
        "--allowed-hosts 'example.com:8000' is never met",
    ),
    (["/nowhere", "--allowed-hosts", "*.b.c", "http://a"], "--allowed-hosts 'http://a' is never met"),
    (
        ["/nowhere", "--allowed-origins", "*", "http://a/"],
        "--allowed-origins 'http://a/' is never met",
    ),
    (["/nowhere", "--order", "last_first"], "--order is of layers that are swapped; give --variants too"),
    (["/nowhere", "--place", "gpu"], "'gpu' is not a place"),
    (["/nowhere", "--tool-call-parser", "xml"], "--tool-call-parser xml: choose one of hermes"),
    ([str(MODEL_DIR), "--place", "cpu=64MiB", "--port", "0", "--max-model-len", "1025"], "more than the 1024 tokens"),
    ([str(MODEL_DIR), "--place", "cpu=64MiB", "--port", "0", "--policy", ""], "policy='' is not known"),
]


def test_what_the_caller_of_serve_must_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTIC_TOKEN", raising=False)
    monkeypatch.setattr("elastic.engines.continuous.engine.ContinuousEngine", lambda *_, **__: FakeEngine())
    for arguments, line in WRONG:
        assert main(["serve", *arguments]) == 2
        error = capsys.readouterr().err
        assert line in error
        assert error.count("\n") == 1


def test_sampling_of_no_directory_is_not_looked_for_at_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.GenerationConfig.from_pretrained", lambda *_: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="--generation-config foo: there is no such directory"):
        serve.sampling_defaults(None, "foo")


def test_a_model_beside_the_servers_own_takes_no_more_than_its_context() -> None:
    options = parser().parse_args(["serve", str(MODEL_DIR), "--max-model-len", "1025"])
    model = SimpleNamespace(config=AutoConfig.from_pretrained(MODEL_DIR))
    assert serve.longest(model, options, beside=True) == 1024
    with pytest.raises(ConfigError, match="more than the 1024 tokens"):
        serve.longest(model, options)


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
