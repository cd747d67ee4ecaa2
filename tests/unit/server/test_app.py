"""Every endpoint but OpenAI's: status, metrics, actions, keys, limits."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

import elastic
from elastic.controller.snapshot import Quantiles, RequestStats
from elastic.errors import ConfigError
from elastic.server.app import create_app
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import CONTEXT, NAME, PATIENCE_S, TOKENIZER, app_for, live

TOKEN = "open sesame"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ASKED = {"prompt": "x", "max_tokens": 3, "temperature": 0}
SWAP = {"kind": "swap", "layers": [3, 4], "variant": "int4"}


class Told:
    """Counters that say what a test wants."""

    def __init__(self, traffic: RequestStats) -> None:
        self._traffic = traffic

    def read(self, at_s: float | None = None) -> RequestStats:
        return self._traffic


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(app_for(FakeEngine(), api_key="key", max_body=1000)) as found:
        found.headers["Authorization"] = "Bearer key"
        yield found


@pytest.fixture(scope="module")
def model() -> Any:
    """The small model, wrapped, with packed layers."""
    import torch
    from transformers import AutoModelForCausalLM

    from elastic.assets import MODEL_DIR

    found = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval().requires_grad_(False)
    place = elastic.Place("cpu", torch.device("cpu"), 64 << 20, page_bytes=4096)
    return found, place


@pytest.fixture
def elastic_client(model: Any) -> Iterator[TestClient]:
    """A server of the wrapped model, with actions."""
    found, place = model
    elastic.wrap(found, places=[place], variants=["int4"])
    engine: Any = FakeEngine()
    engine.runtime = found.elastic
    with TestClient(app_for(engine, token=TOKEN, actions=True)) as client:
        client.headers.update(HEADERS)
        yield client
    elastic.unwrap(found)


def test_actions_that_are_prepared_over_http(elastic_client: TestClient) -> None:
    client, url = elastic_client, "/elastic/actions"
    told = client.post(f"{url}/prepare", json={"actions": [SWAP], "id": "mine", "timeout_s": 60}).json()
    assert (told["id"], told["pages"] > 0, told["steps"][0]["action"]["kind"]) == ("mine", True, "swap")
    assert client.get("/elastic/status").json()["layers"] == ["float32"] * 12
    answer = client.post(url, json={"actions": [{"kind": "release", "layers": [3]}]})
    assert (answer.status_code, "'mine'" in answer.json()["error"]["message"]) == (503, True)
    results = client.post(f"{url}/mine/commit", json={}).json()["results"]
    assert client.post(f"{url}/mine/commit", json={}).json()["results"] == results
    assert client.get("/elastic/status").json()["layers"][3:5] == ["int4"] * 2
    answer = client.post(f"{url}/mine/rollback", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    restore = {"actions": [{"kind": "restore"}], "id": "back"}
    assert client.post(f"{url}/prepare", json=restore).status_code == 200
    assert client.post(f"{url}/back/rollback", json={}).json() == {"id": "back"}
    assert client.get("/elastic/status").json()["layers"][3:5] == ["int4"] * 2
    assert client.post(f"{url}/none/commit", json={}).status_code == 404
    rank = {"actions": [SWAP], "rank": "a"}
    assert "this server has one model" in client.post(url, json=rank).json()["error"]["message"]


def metrics(client: TestClient, accept: str = "") -> dict[tuple[str, ...], float]:
    """Name and label values (but the model's name) -> value."""
    answer = client.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name", NAME) == NAME
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_status_of_a_plain_engine() -> None:
    engine: Any = FakeEngine()
    engine.counters = Told(RequestStats(waiting=3, ttft_s=Quantiles(2, 0.5, float("nan"), 0.6, None)))
    with TestClient(app_for(engine)) as client:
        status = client.get("/elastic/status").json()
    assert (status["version"], status["model"], status["state"]) == (2, NAME, "serving")
    assert (status["layers"], status["status"], status["events"], status["controller"]) == ([], None, [], None)
    assert status["traffic"]["waiting"] == 3
    assert status["traffic"]["ttft_s"].items() >= {"count": 2, "mean": 0.5, "p50": None, "p95": 0.6}.items()


def test_actions_from_the_list_to_the_restored_model(elastic_client: TestClient) -> None:
    client, url = elastic_client, "/elastic/actions"
    kinds = client.get(url).json()["kinds"]
    assert set(kinds) == {
        *("swap", "restore", "release", "resize_kv"),
        *("migrate", "migrate_kv", "replicate", "evict"),
    }
    assert kinds["swap"]["required"] == ["layers", "variant"]
    (step,) = client.post(url, json={"actions": [SWAP], "dry_run": True}).json()["steps"]
    assert step["action"] == {**SWAP, "parts": []}
    assert step["released_pages"] > 0
    assert client.get("/elastic/status").json()["layers"] == ["float32"] * 12
    done = client.post(url, json={"actions": [SWAP, {"kind": "release", "layers": [7]}]}).json()
    assert [result["status"] for result in done["results"]] == ["applied", "applied"]
    status = client.get("/elastic/status").json()
    layers = ["float32"] * 3 + ["int4"] * 2 + ["float32"] * 2 + ["absent"] + ["float32"] * 4
    assert status["layers"] == layers
    assert [event["action"]["kind"] for event in status["events"]] == ["swap", "release"]
    assert status["events"][0]["why"] == "by HTTP"
    assert sum(status["status"]["places"][0]["owners"].values()) > 0
    (resized,) = client.post(url, json={"actions": [{"kind": "resize_kv", "limit": "8MiB"}]}).json()["results"]
    assert resized["limit_bytes"] == 8 << 20
    (most,) = client.post(url, json={"actions": [{"kind": "resize_kv", "limit": "max"}]}).json()["results"]
    kv = client.get("/elastic/status").json()["status"]["kv"][0]
    assert most["limit_bytes"] == kv["limit_bytes"] == kv["maximum_bytes"]
    assert client.get("/elastic/status").json()["events"][-1]["action"]["limit_bytes"] is None
    assert client.post(url, json={"actions": [{"kind": "restore"}]}).status_code == 200
    assert client.get("/elastic/status").json()["layers"] == ["float32"] * 12


IMPOSSIBLE: list[tuple[Any, str]] = [
    ([{"kind": "swap", "layers": [99], "variant": "int4"}], "layers 0 to 11"),
    ([{"kind": "swap", "layers": [-1], "variant": "int4"}], "layers 0 to 11"),
    ([{"kind": "swap", "layers": [1], "variant": "int99"}], "int99"),
    ([{"kind": "swap", "layers": [1], "variant": "int4", "parts": ["no.such"]}], "no.such"),
    ([SWAP, SWAP], "twice"),
    ([{"kind": "explode", "layers": [1]}], "explode"),
    ([{"kind": "release"}], "layers"),
    ([{"kind": "resize_kv", "limit": "lots"}], "lots"),
    ([{"kind": "resize_kv", "limit": 1, "place": "cuda:7"}], "cuda:7"),
    ([], "actions"),
]


def test_actions_that_cannot_be_done_change_nothing(elastic_client: TestClient) -> None:
    for actions, words in IMPOSSIBLE:
        for dry_run in (True, False) if len(actions) < 2 else (False,):
            answer = elastic_client.post("/elastic/actions", json={"actions": actions, "dry_run": dry_run})
            assert answer.status_code == 400, answer.text
            assert words in answer.json()["error"]["message"]
    assert elastic_client.get("/elastic/status").json()["layers"] == ["float32"] * 12
    assert elastic_client.get("/elastic/status").json()["status"]["kv"][0]["revision"] == 0


def test_actions_are_for_holders_of_the_token() -> None:
    refused = [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", "Bearer öpen sesame", TOKEN]
    with TestClient(app_for(FakeEngine(), token=TOKEN, actions=True)) as client:
        for given in refused:
            headers = {} if given is None else {"Authorization": given.encode("latin-1")}
            posted = client.post("/elastic/actions", json={}, headers=headers)
            for answer in (client.get("/elastic/actions", headers=headers), posted):
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/elastic/actions", headers=HEADERS).status_code == 404  # this model is not wrapped
        assert client.get("/v1/models").status_code == 200


def test_actions_are_off_unless_they_are_asked_for() -> None:
    with TestClient(app_for(FakeEngine(), token=TOKEN)) as client:
        for answer in (client.get("/elastic/actions"), client.post("/elastic/actions", json={}, headers=HEADERS)):
            assert answer.status_code == 404
            assert "actions are off" in answer.json()["error"]["message"]
    with pytest.raises(ConfigError, match="token"):
        app_for(FakeEngine(), actions=True)


def test_a_mounted_app_asks_for_its_key_too() -> None:
    outer = FastAPI()
    outer.mount("/llm", app_for(FakeEngine(), api_key="key"))
    client = TestClient(outer)
    assert client.get("/llm/v1/models").status_code == 401
    assert client.get("/llm/v1/models", headers={"Authorization": "Bearer key"}).status_code == 200


@pytest.mark.parametrize("root_path", ["/", "/v", "/llm"])
def test_the_key_is_asked_for_whatever_root_path_a_server_or_a_proxy_says(root_path: str) -> None:
    client = TestClient(app_for(FakeEngine(), api_key="key"), root_path=root_path)
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers={"Authorization": "Bearer key"}).status_code == 200


@pytest.mark.parametrize(("key", "header"), [("key\n", b"Bearer key"), ("schl\xfc", "bearer schl\xfc ".encode())])
def test_a_key_is_known_as_clients_send_it(key: str, header: bytes) -> None:
    client = TestClient(app_for(FakeEngine(), api_key=key))
    assert client.get("/v1/models", headers={"Authorization": header}).status_code == 200
    assert client.get("/v1/models", headers={"Authorization": header + b"x"}).status_code == 401


def test_the_api_key(client: TestClient) -> None:
    assert client.post("/v1/completions", json=ASKED).status_code == 200
    client.headers["Authorization"] = "Bearer kez"
    error = client.post("/v1/completions", json=ASKED).json()["error"]
    assert error["code"] == "invalid_api_key"
    assert error["message"] == "send the key of this server as Authorization: Bearer KEY"
    assert client.get("/health").status_code == 200


def test_metrics_of_traffic() -> None:
    engine: Any = FakeEngine()
    with TestClient(app_for(engine)) as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 200
        assert client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        engine.counters = Told(
            RequestStats(running=2, waiting=3, preemptions=4, completed=5, itl_s=Quantiles(1, 1, 1, 2, 3))
        )
        now = metrics(client)
    assert now["elastic_num_requests_running",] == 2
    assert now["elastic_num_requests_waiting",] == 3
    assert now["elastic_num_preemptions_total",] == 4
    assert now["elastic_requests_total", "completed"] == 5
    assert now["elastic_window_seconds", "itl", "0.95"] == 2
    assert not any(key[:2] == ("elastic_window_seconds", "ttft") for key in now)
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        for operation in ("text_completion", "chat"):
            assert now[f"gen_ai_server_{name}_seconds_count", operation, "elastic", NAME] == 1
            assert now[f"gen_ai_server_{name}_seconds_sum", operation, "elastic", NAME] >= 0


def test_metrics_of_memory_and_actions(elastic_client: TestClient) -> None:
    rt = elastic_client.app.state.serving.engine.runtime  # type: ignore[attr-defined]
    rt.swap([0, 1, 2], "int4")
    rt.release([5])
    with pytest.raises(elastic.CapacityError):
        rt.apply([elastic.ResizeKV("cpu", 1 << 62)])
    now = metrics(elastic_client)
    assert [now["elastic_layers", variant] for variant in ("float32", "int4", "absent")] == [8, 3, 1]
    status, (kv,) = rt.status(), rt.status().kv
    owners = {key[1]: value for key, value in now.items() if key[0] == "elastic_memory_bytes"}
    assert owners == {**status.places[0].owners, "free": status.places[0].free_bytes}
    assert sum(owners.values()) == now["elastic_memory_budget_bytes", "cpu"]
    assert now["elastic_kv_capacity_bytes", "cpu"] == kv.capacity_bytes
    for _ in range(2):
        now = metrics(elastic_client)
        assert now["elastic_actions_total", "swap", "applied"] == 1
        assert now["elastic_actions_total", "release", "applied"] == 1
        assert now["elastic_actions_total", "resize_kv", "failed"] == 1
        assert now["elastic_action_pause_seconds_total", "swap"] > 0


def test_metrics_in_the_format_that_is_asked_for(client: TestClient) -> None:
    for accept in ("", "application/openmetrics-text; version=1.0.0", "*/*", "a;b=,;,q=x"):
        answer = client.get("/metrics", headers={"Accept": accept})
        assert answer.status_code == 200
        assert ("# EOF" in answer.text) == ("openmetrics" in accept)


def test_an_engine_that_died_is_not_healthy() -> None:
    engine = FakeEngine()
    with TestClient(app_for(engine)) as client:
        engine.stop()
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/completions", json=ASKED)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert client.get("/elastic/status").json()["state"] == "stopped"
        assert metrics(client)["elastic_serving",] == 0


def test_an_engine_that_gives_up_on_a_request_is_a_500() -> None:
    from elastic.engines.base import Listener, Output, Request

    class Failing(FakeEngine):
        def submit(self, request: Request, listener: Listener) -> None:
            listener(Output(request.id, (), "failed", "it broke", time.perf_counter()))

    with TestClient(app_for(Failing())) as client:
        error = client.post("/v1/completions", json=ASKED)
        assert (error.status_code, error.json()["error"]["type"]) == (500, "server_error")
        assert "it broke" in error.json()["error"]["message"]
        events = client.post("/v1/completions", json={**ASKED, "stream": True}).text.split("\n\n")
        assert "it broke" in events[0]
        assert events[1] == "data: [DONE]"


def test_a_fault_of_the_server_is_json_too() -> None:
    class Faulty(FakeEngine):
        def submit(self, request: Any, listener: Any) -> None:
            raise ZeroDivisionError

    with TestClient(app_for(Faulty()), raise_server_exceptions=False) as client:
        error = client.post("/v1/completions", json=ASKED)
        assert (error.status_code, error.json()["error"]["code"]) == (500, "internal_error")


def test_a_body_that_is_too_large(client: TestClient) -> None:
    large = {"prompt": "x" * 2000}
    assert client.post("/v1/completions", json=large).status_code == 413
    chunks = iter([b'{"prompt": "', b"x" * 2000, b'"}'])
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=chunks, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_large_body_gets_its_answer_over_a_socket() -> None:
    with live(FakeEngine(), max_body=1000) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 3000}, timeout=PATIENCE_S)
        assert answer.status_code == 413
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_a_page_of_a_browser_cannot_post(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = client.post("/v1/completions", content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 415


def test_a_chat_template_and_its_refusal() -> None:
    from transformers import AutoTokenizer

    from elastic.assets import MODEL_DIR

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    )
    engine = FakeEngine()
    with TestClient(create_app(engine, tokenizer, NAME, max_model_len=CONTEXT)) as client:
        user = {"role": "user", "content": "hello"}
        asked = {"messages": [user], "max_tokens": 5, "temperature": 0}
        usage = client.post("/v1/chat/completions", json=asked).json()["usage"]
        assert usage["prompt_tokens"] == len(TOKENIZER.encode("<user>hello<answer>"))
        asked["messages"] = [{"role": "developer", "content": "x"}, user]
        refused = client.post("/v1/chat/completions", json=asked)
        assert refused.status_code == 400
        assert "no system" in refused.json()["error"]["message"]


def test_the_description_of_the_api(client: TestClient) -> None:
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]
