"""The routes in vLLM's server, with an engine that answers as one would."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from pydantic import ValidationError

from elastic.cli.views.status_document import read_status
from elastic.controller.loop import ControllerHealth
from elastic.controller.snapshot import RequestStats
from elastic.engines.vllm.client.messages import decode, encode
from elastic.server.protocol.actions import ActionsBody
from elastic.server.vllm_plugin import TOKEN, ElasticEndpoints, require_token
from elastic.types import Change, HostStatus, KVStatus, PlaceStatus, ResizeKV, Status, Swap

FORM = ("float32", "int4")
SWAP = {"kind": "swap", "layers": [1], "variant": "int4"}


def status() -> Status:
    place = PlaceStatus("cpu", 4096, 8192, {"kv": 4096}, 4096, 0, 0, 1)
    kv = KVStatus("cpu", 4096, 4096, 4096, 0, 0, 0, 1)
    return Status(2, (place,), (kv,), {}, HostStatus(0, 0, 0, 0), 0)


class StubEngine:
    """Answers `collective_rpc` as two ranks would."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "elastic_change":
            self.done.append(decode(args[1])[0][0])
            return [1]
        if method == "elastic_result":
            return [encode({"value": (Change("applied", (1,), (), 0, 0, 0),)})]
        answers = {
            "status": status(),
            "form": FORM,
            "events": (),
            "health": ControllerHealth(),
            "snapshot": SimpleNamespace(traffic=RequestStats()),
        }
        return [encode({"value": None if args[0] == "snapshot" else answers[args[0]]})]


class StubEngines:
    """Two of data parallelism: what is called on both is answered by the first."""

    def __init__(self) -> None:
        self.engine_core, self.core_engines = self, (b"0", b"1")
        self.engines = {name: StubEngine() for name in self.core_engines}

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answers = [await engine.collective_rpc(method, args) for engine in self.engines.values()]
        return answers[0]

    async def _call_utility_async(self, name: str, *args: Any, engine: bytes) -> Any:
        method, _, arguments, _ = args
        return await self.engines[engine].collective_rpc(method, arguments)


def test_all_engines_do_what_is_asked_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    engines, plugin, app = StubEngines(), ElasticEndpoints(), FastAPI()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engines, app.state, Namespace(model="m", served_model_name=None)))
    with TestClient(app) as client:
        shown = client.get("/elastic/status").json()
        headers = {"Authorization": "Bearer secret"}
        done = client.post("/elastic/actions", json={"actions": [SWAP]}, headers=headers).json()
    assert (len(shown["engines"]), len(done["engines"])) == (2, 2)
    assert read_status(shown).status == read_status(shown["engines"][1]).status == status()
    assert [engine.done for engine in engines.engines.values()] == [[(Swap((1,), "int4"),)]] * 2


@pytest.fixture
def client() -> Any:
    engine, plugin, app = StubEngine(), ElasticEndpoints(), FastAPI()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engine, app.state, Namespace(model="m", served_model_name=["served"])))
    with TestClient(app) as client:
        client.engine = engine  # type: ignore[attr-defined]
        yield client


def test_the_status_is_one_that_elastic_top_reads(client: Any) -> None:
    document = read_status(client.get("/elastic/status").json())
    assert (document.model, document.layers) == ("served", FORM)
    assert document.status == status()


def test_actions_are_off_without_a_token(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert client.post("/elastic/actions", json={"actions": [SWAP]}).status_code == 404
    monkeypatch.setenv(TOKEN, "secret")
    assert client.post("/elastic/actions", json={"actions": [SWAP]}).status_code == 401
    with pytest.raises(HTTPException):
        require_token("Bearer other")
    assert client.post("/elastic/actions", json={"actions": []}).status_code == 401, "before the body is looked at"
    assert client.engine.done == []


def test_actions_are_done_on_all_ranks(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret\n")
    headers = {"Authorization": "bearer secret"}
    answer = client.post("/elastic/actions", json={"actions": [SWAP]}, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["results"][0]["status"] == "applied"
    assert client.engine.done == [(Swap((1,), "int4"),)]
    wrong = {"actions": [{**SWAP, "layers": [2]}]}
    assert client.post("/elastic/actions", json=wrong, headers=headers).status_code == 400
    away = {"actions": [{"kind": "migrate", "layers": [1], "place": "cpu"}]}
    assert "one place for each rank" in client.post("/elastic/actions", json=away, headers=headers).text
    resized = {"actions": [{"kind": "resize_kv", "limit": 4096}]}
    assert client.post("/elastic/actions", json=resized, headers=headers).status_code == 200
    assert client.engine.done[1:] == [(ResizeKV("cpu", 4096),)]
    for fields in ({"rank": "r1"}, {"actions": [{**resized["actions"][0], "place": "cuda"}]}):
        assert client.post("/elastic/actions", json={**resized, **fields}, headers=headers).status_code == 400
    assert len(client.engine.done) == 2, "what means one rank, or a place that is not there, is done at none"


@pytest.mark.parametrize(
    "action", [{**SWAP, "variant": "\ud800"}, {**SWAP, "parts": ["\ud800"]}, {"kind": "resize_kv", "limit": "\ud800"}]
)
def test_names_that_are_no_text_are_refused_before_they_are_recorded(action: dict[str, Any]) -> None:
    """No status could be told any more with one in the record of actions."""
    with pytest.raises(ValidationError, match="half of a surrogate pair"):
        ActionsBody.model_validate({"actions": [action]})
