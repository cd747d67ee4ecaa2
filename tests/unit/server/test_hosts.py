"""Which names a server answers to: a page whose name points to this machine is not let in."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from elastic.errors import ConfigError
from elastic.server import uvicorn_server
from elastic.server.hosts import check_hosts, check_origins, names_for
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import app_for, live

FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example"]
OURS = ["localhost", "LOCALHOST:8000", "localhost.", "my.localhost:1", "127.0.0.1:9", "[::1]:80", "10.0.0.7:80"]


def test_a_server_of_this_machine_does_not_answer_to_foreign_names() -> None:
    names = names_for("127.0.0.1", "127.0.0.1")
    with live(FakeEngine(), allowed_hosts=names) as running, httpx.Client(base_url=running.url) as client:
        for host in OURS:
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in FOREIGN:
            answer = client.get("/v1/models", headers={"Host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), host
            assert "--allowed-hosts" in answer.json()["error"]["message"]


def test_names_that_were_given_are_answered_to() -> None:
    expected = {"LLM.example:80": 200, "a.b.inside.example": 200, "inside.example": 403, "x.llm.example": 403}
    names = ("llm.example", "*.inside.example")
    with live(FakeEngine(), allowed_hosts=names) as running, httpx.Client(base_url=running.url) as client:
        for host, status in expected.items():
            assert client.get("/health", headers={"Host": host}).status_code == status, host


@pytest.mark.parametrize(
    ("host", "given", "names"),
    [
        ("127.0.0.1", None, ("localhost", "*.localhost", "127.0.0.1")),
        ("localhost", None, ("localhost", "*.localhost", "localhost")),
        ("0.0.0.0", None, ("*",)),
        ("127.0.0.1", ["llm.example"], ["llm.example"]),
    ],
)
def test_run_answers_to_all_names_only_where_others_can_reach_it(
    monkeypatch: pytest.MonkeyPatch, host: str, given: Any, names: Any
) -> None:
    made: dict[str, Any] = {}

    class Recorded:
        force_exit = False

        def __init__(self, app: Any, **options: Any) -> None:
            made.update(options)

        def run(self, sockets: Any) -> None: ...

    monkeypatch.setattr(uvicorn_server, "Server", Recorded)
    monkeypatch.setattr(uvicorn_server, "gc", Mock())  # a collection of all that tests have imported
    assert uvicorn_server.run(app_for(FakeEngine()), host=host, port=0, allowed_hosts=given) == 0
    assert made["allowed_hosts"] == names


def test_times_that_let_nobody_in_are_refused() -> None:
    with pytest.raises(ConfigError, match="header_timeout_s=0"):
        uvicorn_server.run(app_for(FakeEngine()), port=0, header_timeout_s=0)
    with pytest.raises(ConfigError, match="body_timeout_s=-1"):
        app_for(FakeEngine(), body_timeout_s=-1)


def test_names_that_no_header_could_match_are_refused() -> None:
    for name in ("example.com:80", "http://example.com", "example.com/", "a*", "*.", ""):
        with pytest.raises(ConfigError, match=f"allowed_hosts {re.escape(repr(name))} is never met"):
            uvicorn_server.run(app_for(FakeEngine()), port=0, allowed_hosts=[name])
    with pytest.raises(ConfigError, match="is one text; give a list"):
        uvicorn_server.run(app_for(FakeEngine()), port=0, allowed_hosts="example.com")
    check_hosts(["*", "*.example.com", "Example.com", "127.0.0.1", "[::1]", "::1"], "allowed_hosts")


def test_origins_are_those_that_browsers_send() -> None:
    check_origins(["*", "null", "http://[::1]:3000", "https://a.example", "chrome-extension://abc"], "allowed_origins")
    check_origins("*", "allowed_origins")
    for origin in ("https://a.example/", "https://A.example", "a.example", "https://*.example", "https://u@a", ""):
        with pytest.raises(ConfigError, match=f"allowed_origins {re.escape(repr(origin))} is never met"):
            check_origins([origin], "allowed_origins")
