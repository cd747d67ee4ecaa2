"""vLLM's `/tokenize`, `/detokenize` and `/version`; ids of requests, origins of web pages, the model's own sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from transformers import GenerationConfig

import elastic
from elastic.cli.serve import sampling_defaults
from elastic.engines.base import Listener, Request
from elastic.errors import ConfigError
from elastic.server.generation.chat_template import without_template
from elastic.server.generation.sampling_defaults import of_generation_config
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import CONTEXT, NAME, TOKENIZER, app_for

ASKED = {"prompt": "x", "max_tokens": 3}


def test_tokens_of_a_prompt_and_back() -> None:
    with TestClient(app_for(FakeEngine())) as client:
        got = client.post("/tokenize", json={"model": NAME, "prompt": "def f(x):", "return_token_strs": True}).json()
        assert got["tokens"] == TOKENIZER.encode("def f(x):")
        assert (got["count"], got["max_model_len"]) == (len(got["tokens"]), CONTEXT)
        assert got["token_strs"] == TOKENIZER.convert_ids_to_tokens(got["tokens"])
        assert client.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "def f(x):"}
        messages = [{"role": "user", "content": "x"}]
        chat = client.post("/tokenize", json={"messages": messages}).json()
        assert chat["tokens"] == TOKENIZER.encode(without_template(messages))
        assert client.get("/version").json() == {"version": elastic.__version__}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": "x", "no_such": 1}, "no_such"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/detokenize", {"tokens": [len(TOKENIZER)]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens.0"),
        ("/detokenize", {"tokens": [], "no_such": 1}, "no_such"),
    ],
)
def test_what_cannot_be_tokenized_is_named(path: str, body: dict[str, Any], param: str) -> None:
    with TestClient(app_for(FakeEngine())) as client:
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_tokenizing_asks_for_the_key_too() -> None:
    with TestClient(app_for(FakeEngine(), api_key="key")) as client:
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert client.post("/detokenize", json={"tokens": []}).status_code == 401
        assert client.get("/version").status_code == 200


def test_every_answer_has_the_id_of_its_request() -> None:
    with TestClient(app_for(FakeEngine(), api_key="key")) as client:
        for given in ("mine-1", "a b"):
            for answer in (
                client.get("/health", headers={"X-Request-Id": given}),
                client.post("/v1/completions", json=ASKED, headers={"X-Request-Id": given}),
            ):
                assert answer.headers["x-request-id"] == given
        for unusable in (b"", b"x" * 257, "ö".encode("latin-1")):
            made = client.get("/health", headers={"X-Request-Id": unusable}).headers["x-request-id"]
            assert made.isalnum()
            assert made != client.get("/health").headers["x-request-id"]


def test_what_fails_in_the_server_has_the_id_too_and_is_read_by_pages() -> None:
    class Broken(FakeEngine):
        def submit(self, request: Request, listener: Listener) -> None:
            raise RuntimeError("it broke")

    app = app_for(Broken(), allowed_origins=["https://page.example"])
    with TestClient(app, raise_server_exceptions=False) as client:
        headers = {"X-Request-Id": "mine-1", "Origin": "https://page.example"}
        answer = client.post("/v1/completions", json=ASKED, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
    with TestClient(app_for(Broken())) as client, pytest.raises(RuntimeError, match="it broke"):  # the log has it
        client.post("/v1/completions", json=ASKED)


def test_pages_of_allowed_origins_may_use_the_server() -> None:
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with TestClient(app_for(FakeEngine(), api_key="key", allowed_origins=["https://page.example"])) as client:
        asked = client.options("/v1/completions", headers=preflight)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://page.example")
        headers = {"Origin": "https://page.example", "Authorization": "Bearer key"}
        answer = client.post("/v1/completions", json=ASKED, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert client.options("/v1/completions", headers={**preflight, "Origin": "https://other"}).status_code == 400
    with TestClient(app_for(FakeEngine())) as client:
        assert client.options("/v1/completions", headers=preflight).status_code == 405
        assert (
            "access-control-allow-origin" not in client.post("/v1/completions", json=ASKED, headers=preflight).headers
        )


def test_the_models_own_sampling_is_for_what_a_request_leaves_open() -> None:
    config = GenerationConfig(temperature=0.6, top_k=20, top_p=0.95, do_sample=True, max_length=5)
    defaults = of_generation_config(config)
    assert defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    engine = FakeEngine()
    with TestClient(app_for(engine, sampling_defaults=defaults)) as client:
        for fields in ({}, {"temperature": 1, "top_k": 0}, {"temperature": 0}):
            assert client.post("/v1/completions", json={**ASKED, **fields}).status_code == 200
    told = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p) for r in engine.requests]
    assert told == [(0.6, 20, 0.95), (1.0, None, 0.95), (0.0, None, 1.0)]


def test_generation_config_names_where_the_defaults_are_from(tmp_path: Path) -> None:
    class Model:
        generation_config = GenerationConfig(temperature=0.6, do_sample=True)

    GenerationConfig(top_p=0.5, do_sample=True).save_pretrained(tmp_path)
    assert sampling_defaults(Model, "auto") == {"temperature": 0.6}
    assert sampling_defaults(Model, "vllm") == {}
    assert sampling_defaults(Model, str(tmp_path)) == {"top_p": 0.5}
    with pytest.raises(ConfigError, match="--generation-config"):
        sampling_defaults(Model, str(tmp_path / "missing"))


@pytest.mark.parametrize("defaults", [{"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"max_tokens": 5}])
def test_defaults_that_cannot_be_are_refused(defaults: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        app_for(FakeEngine(), sampling_defaults=defaults)
