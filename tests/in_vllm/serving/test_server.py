"""vLLM's own server with the options that `elastic vllm-args` prints: tokens, actions, figures, and `elastic top`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic.cli.main import main
from support.vllm_engine.counting_connector import CountingConnector
from support.vllm_engine.engine import FULL, LONGEST, MODEL, TEXTS

TOKEN, LENGTH, START_S = "secret", 60, 240
SERVED = {
    "model": MODEL, "served-model-name": "stdlib", "dtype": "float32", "max-model-len": LONGEST, "max-num-seqs": 16,
    "block-size": 32, "host": "127.0.0.1",
}  # fmt: skip
THEIRS = {
    "kv_connector": "CountingConnector",
    "kv_connector_module_path": CountingConnector.__module__,
    "kv_role": "kv_both",
}


class Server:
    """A server in a process of its own."""

    def __init__(self, log: Path, arguments: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        served = [f"--{name}={value}" for name, value in SERVED.items()]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *served, "--enforce-eager"]
        port = self.url.rpartition(":")[2]
        here = {"VLLM_PLUGINS": "elastic", "ELASTIC_ACTIONS_TOKEN": TOKEN, "PYTHONPATH": os.pathsep.join(sys.path)}
        with log.open("w") as told:
            self.process = subprocess.Popen(
                [*command, "--port", port, *arguments], env={**os.environ, **here}, stdout=told, stderr=told
            )
        self.log = log
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)

    def complete(self, number: int) -> list[int]:
        """Return the tokens behind a text."""
        asked = {"model": "stdlib", "prompt": TEXTS[number], "max_tokens": LENGTH, "temperature": 0}
        answer = self.http.post("/v1/completions", json={**asked, "ignore_eos": True, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    def act(self, *actions: dict[str, Any], token: str = TOKEN) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return self.http.post("/elastic/actions", json={"actions": actions}, headers=headers)

    def status(self) -> dict[str, Any]:
        answer = self.http.get("/elastic/status")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.02)

    def wait_for(self, form: tuple[str, ...]) -> None:
        self.wait_until(lambda: self.status()["layers"] == list(form))

    def capacity_bytes(self) -> int:
        return int(self.status()["status"]["kv"][0]["capacity_bytes"])

    def figures(self) -> dict[str, float]:
        """Return those of `/metrics` that are ours."""
        lines = [line.split() for line in self.http.get("/metrics").text.splitlines() if line.startswith("elastic:")]
        return {name.partition("{")[0]: float(value) for name, value in lines}

    def close(self) -> int:
        self.http.close()
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


def printed_arguments(*given: str) -> list[str]:
    """Return what a shell makes of `$(elastic vllm-args ...)`."""
    command = [sys.executable, "-c", "from elastic.cli.main import main; main()", "vllm-args", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout.split()


@pytest.fixture(scope="module", params=["ours", pytest.param("theirs, too", marks=pytest.mark.long)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    connector = [] if request.param == "ours" else ["--connector", json.dumps(THEIRS)]
    arguments = printed_arguments("--budget", "20MiB", "--variants", "int4", *connector)
    server = Server(tmp_path_factory.mktemp("server") / "log", arguments)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def all_tokens(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(len(TEXTS)) as clients:
        return list(clients.map(server.complete, range(len(TEXTS))))


def test_tokens_are_plain_vllms_while_layers_leave_and_return(server: Server, reference: list[list[int]]) -> None:
    expected = [tokens[:LENGTH] for tokens in reference]
    assert all_tokens(server) == expected
    with ThreadPoolExecutor(1) as client:
        running = client.submit(all_tokens, server)
        for _ in range(4):
            assert server.act({"kind": "release", "layers": [3, 7]}).status_code == 200
            assert server.act({"kind": "restore"}).status_code == 200
        assert running.result() == expected
    server.wait_for(FULL)
    assert server.act({"kind": "release", "layers": [3, 7]}).json()["results"][0]["layers"] == [3, 7]
    assert [layer for layer, form in enumerate(server.status()["layers"]) if form == "absent"] == [3, 7]
    assert all_tokens(server) == expected
    server.act({"kind": "restore"})
    server.wait_for(FULL)


def test_packed_layers_give_blocks_and_other_tokens(server: Server, reference: list[list[int]]) -> None:
    before = server.figures()
    assert server.act({"kind": "swap", "layers": list(range(6)), "variant": "int4"}).status_code == 200
    assert server.status()["layers"] == ["int4"] * 6 + ["float32"] * 6
    packed = all_tokens(server)
    assert all_tokens(server) == packed != [tokens[:LENGTH] for tokens in reference]
    figures = server.figures()
    assert figures["elastic:mapped_sectors"] > before["elastic:mapped_sectors"]
    assert figures["elastic:usable_blocks"] > before["elastic:usable_blocks"]
    assert figures["elastic:capacity_changes_total"] > before["elastic:capacity_changes_total"]
    server.act({"kind": "restore"})
    server.wait_for(FULL)
    assert all_tokens(server) == [tokens[:LENGTH] for tokens in reference]


def test_the_status_and_top_show_it(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.act({"kind": "release", "layers": [3, 7]})
    document = server.status()
    assert (document["model"], document["state"], len(document["layers"])) == ("stdlib", "serving", len(FULL))
    assert document["traffic"]["completed"] == document["traffic"]["arrived"] > 0
    assert document["traffic"]["preemptions"] == 0
    assert main(["top", server.url, "--once"]) == 0
    picture = capsys.readouterr().out
    assert "stdlib at" in picture
    assert "release layers" in picture
    assert "absent: 2" in picture
    assert "KV idle" in picture
    assert "KV of others" not in picture, "all of it is this engine's"
    server.act({"kind": "restore"})
    server.wait_for(FULL)


def test_actions_need_the_token_and_what_cannot_be_done_is_said(server: Server) -> None:
    release = {"kind": "release", "layers": [1]}
    assert server.act(release, token="wrong").status_code == 401
    assert server.act({"kind": "release", "layers": [99]}).status_code == 400
    assert server.act({"kind": "swap", "layers": [1], "variant": "int8"}).status_code == 400
    assert server.http.get("/elastic/actions").json() == {"kinds": ["swap", "restore", "release", "resize_kv"]}
    assert server.status()["layers"] == list(FULL)


def test_the_kv_cache_takes_a_limit(server: Server, reference: list[list[int]]) -> None:
    whole = server.capacity_bytes()
    assert server.act({"kind": "resize_kv", "limit": "4MiB"}).status_code == 200
    server.wait_until(lambda: server.capacity_bytes() <= 4 << 20)
    assert all_tokens(server) == [tokens[:LENGTH] for tokens in reference]
    assert server.act({"kind": "resize_kv", "limit": "max"}).status_code == 200
    server.wait_until(lambda: server.capacity_bytes() == whole)


def test_it_ends_when_it_is_told_to(server: Server) -> None:
    """The last test of a server."""
    assert server.close() == 0
