"""Several deployed models behind one server: requests name theirs, and holders of the token deploy and change them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from elastic.errors import ConfigError
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from support.cluster.fake_deployments import FakeDeployments
from support.serving.live_server import CONTEXT, NAME, TOKENIZER, app_for

TOKEN = "open sesame"
ASKED = {"prompt": "hello", "max_tokens": 4}


@pytest.fixture
def deployments() -> Iterator[FakeDeployments]:
    made = FakeDeployments()
    made.deploy("/models/small", Intent(), name=NAME)
    yield made
    for engine in made.engines.values():
        engine.stop()


@pytest.fixture
def client(deployments: FakeDeployments) -> Iterator[TestClient]:
    def options(path: str) -> dict[str, Any]:
        if "untold" in path:
            raise ConfigError(f"MODEL {path}: no tokenizer there")
        return {"tokenizer": TOKENIZER, "max_model_len": CONTEXT // 2}

    app = app_for(deployments[NAME], token=TOKEN, actions=True, deployments=deployments, model_options=options)
    with TestClient(app) as found:
        found.headers["Authorization"] = f"Bearer {TOKEN}"
        yield found


def deploy(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post("/elastic/fleet/deploy", json={"path": path, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["deployed"]


def test_a_request_goes_to_the_model_that_it_names(client: TestClient, deployments: FakeDeployments) -> None:
    assert deploy(client, "/models/other")["name"] == "other"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [NAME, "other"]
    assert client.get("/v1/models/other").json()["max_model_len"] == CONTEXT // 2
    for model, arrived in ((NAME, (1, 0)), ("other", (1, 1)), (None, (2, 1))):
        answer = client.post("/v1/completions", json={"model": model, **ASKED} if model else ASKED)
        assert (answer.status_code, answer.json()["model"]) == (200, model or NAME)
        assert tuple(deployments[name].counters.read().arrived for name in (NAME, "other")) == arrived
    assert client.post("/v1/responses", json={"model": "other", "input": "hello"}).json()["model"] == "other"
    told = client.post("/tokenize", json={"model": "other", "prompt": "hello"})
    assert told.json()["max_model_len"] == CONTEXT // 2


def test_a_model_without_a_tokenizer_is_not_deployed(client: TestClient, deployments: FakeDeployments) -> None:
    answer = client.post("/elastic/fleet/deploy", json={"path": "/models/untold"})
    assert (answer.status_code, "no tokenizer there" in answer.text) == (400, True)
    assert [each.name for each in deployments.status()] == [NAME]


def test_a_model_that_a_program_deploys_without_a_tokenizer_is_in_nobodys_way(
    client: TestClient, deployments: FakeDeployments
) -> None:
    for path in ("/models/untold", "/models/other"):
        deployments.deploy(path, Intent())
    with pytest.raises(ConfigError, match="no tokenizer there"):
        client.app.state.models.refresh()  # type: ignore[attr-defined]
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [NAME, "other"]


def test_a_name_that_was_deployed_anew_is_the_new_model(client: TestClient, deployments: FakeDeployments) -> None:
    """Also where a program, or another request, has done both before the server looked."""
    deploy(client, "/models/other")
    deployments.remove("other")
    deployments.deploy("/models/newer", Intent(), name="other")
    client.app.state.models.refresh()  # type: ignore[attr-defined]
    answer = client.post("/v1/completions", json={"model": "other", **ASKED})
    assert answer.status_code == 200, answer.text
    assert deployments["other"].counters.read().arrived == 1


def test_a_request_that_is_read_when_its_model_ends_is_read_to_its_end(client: TestClient) -> None:
    deploy(client, "/models/other")
    state = client.app.state.models.named("other")  # type: ignore[attr-defined]
    assert client.post("/elastic/fleet/undeploy", json={"name": "other"}).status_code == 200
    assert asyncio.run(state.prompts._on_thread(5, lambda tokenizer: tokenizer("hello")["input_ids"]))
    gone = weakref.ref(state)
    del state
    assert gone() is None, "its threads end with it"


def test_an_unknown_model_is_refused_with_the_names_there_are(client: TestClient) -> None:
    deploy(client, "/models/other")
    answer = client.post("/v1/completions", json={"model": "third", **ASKED})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    assert error["message"] == f"the model 'third' does not exist here; there is {NAME!r}, 'other'"


def test_the_intent_and_the_load_come_as_they_were_sent(client: TestClient, deployments: FakeDeployments) -> None:
    deploy(
        client,
        "/models/other",
        intent={"latency_s": 1.5, "quality_loss": 0.01},
        load={"prompt": 64, "new": 32, "rate": 2},
        weights=["full", "int4"],
        replicas=3,
    )
    assert deployments.replicas == 3
    intent = Intent(latency_s=1.5, quality_loss=0.01)
    assert deployments.asked[-1] == ("deploy", "/models/other", intent, Load(64, 32, 2), ["full", "int4"])
    body = {"name": "other", "intent": {"minimize": "memory"}, "replicas": 2, "dry_run": True}
    planned = client.post("/elastic/fleet/intend", json=body).json()["intended"]
    assert deployments.replicas == 2
    assert (planned["status"], planned["after"], planned["steps"][0]["kind"]) == ("planned", "TP1 PP1 int8", "swap")
    assert deployments.asked[-1] == ("intend", "other", Intent("memory"), None, True)
    document = client.get("/elastic/status").json()
    assert [each["intent"]["latency_s"] for each in document["deployments"]] == [None, 1.5]
    assert document["devices"] == [
        {
            "name": "cpu#a", "memory_bytes": 100, "free_bytes": 40, "load": 0.25, "models": [NAME, "other"], "guest": ""
        }
    ]  # fmt: skip


def test_the_document_says_of_loads_and_estimates_what_it_said(client: TestClient) -> None:
    """What can be computed from it is not told besides."""
    told = client.get("/elastic/status").json()["deployments"][0]
    assert told["load"].keys() == {"prompt", "new", "rate"}
    assert [*told["estimate"]] == [
        *("configuration", "stages", "ranks", "basis", "why_not", "requests", "running", "ttft_s", "tpot_s"),
        *("latency_s", "tokens_s", "rate", "memory_bytes", "quality_loss"),
    ]


def test_a_device_is_resized_in_bytes_or_by_text(client: TestClient, deployments: FakeDeployments) -> None:
    for memory in (40 << 20, "40MiB"):
        answer = client.post("/elastic/fleet/resize", json={"device": "cpu#a", "memory": memory})
        assert answer.json()["devices"][0]["name"] == "cpu#a"
        assert deployments.asked[-1] == ("resize", "cpu#a", memory)


@pytest.mark.parametrize(
    ("verb", "body", "status", "code", "words"),
    [
        ("resize", {"device": "cpu#b", "memory": 1}, 400, "invalid_value", "no device 'cpu#b'"),
        ("resize", {"device": "cpu#a", "memory": -1}, 400, "invalid_value", "memory"),
        ("deploy", {"path": "/large"}, 409, "capacity_exceeded", "it has no place"),
        ("deploy", {"path": "/other", "intent": {"latency_s": -1}}, 400, "invalid_value", "latency_s=-1"),
        ("deploy", {"path": "/other", "intent": {"minimize": "speed"}}, 400, "invalid_value", "minimize"),
        ("deploy", {"path": "/other", "weights": ["int2"]}, 400, "invalid_value", "there is no variant 'int2'"),
        ("intend", {"name": "third", "intent": {"minimize": "cost"}}, 404, "not_found", "no deployment 'third'"),
        ("undeploy", {"name": NAME}, 409, "conflict", "the server's own model"),
    ],
)
def test_what_cannot_be_is_said(client: TestClient, verb: str, body: Any, status: int, code: str, words: str) -> None:
    answer = client.post(f"/elastic/fleet/{verb}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert words in answer.text


def test_a_model_that_is_removed_is_listed_no_more(client: TestClient) -> None:
    deploy(client, "/models/other")
    assert client.post("/elastic/fleet/undeploy", json={"name": "other"}).json() == {"undeployed": "other"}
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [NAME]
    assert client.post("/v1/completions", json={"model": "other", **ASKED}).status_code == 404


def test_metrics_have_each_model_under_its_name(client: TestClient) -> None:
    deploy(client, "/models/other")
    client.post("/v1/completions", json={"model": "other", **ASKED})
    text = client.get("/metrics").text
    counts = [line for line in text.splitlines() if line.startswith("elastic_request_generation_tokens_count")]
    assert counts == ['elastic_request_generation_tokens_count{model_name="other"} 1.0']
    assert f'elastic_serving{{model_name="{NAME}"}} 1.0' in text
    assert 'elastic_serving{model_name="other"} 1.0' in text
    assert text.count("# TYPE elastic_serving gauge") == 1
    assert text.count("\nprocess_cpu_seconds_total ") == 1


def test_only_holders_of_the_token_deploy(client: TestClient, deployments: FakeDeployments) -> None:
    del client.headers["Authorization"]
    for verb in ("deploy", "intend", "resize", "undeploy"):
        assert client.post(f"/elastic/fleet/{verb}", json={}).status_code == 401
    with TestClient(app_for(deployments[NAME], token=TOKEN, actions=True)) as single:
        single.headers["Authorization"] = f"Bearer {TOKEN}"
        answer = single.post("/elastic/fleet/deploy", json={"path": "/models/other"})
        assert answer.status_code == 404
        assert "--devices" in answer.json()["error"]["message"]
