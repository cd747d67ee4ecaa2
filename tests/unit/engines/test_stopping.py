"""An answer ends where the model says, whichever of its end tokens that is."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from support.serving.live_server import EMBEDDED, NAME, TOKENIZER, app_for, model, text_of

ASKED = {"model": NAME, "prompt": "import os\n\ndef main():\n", "max_tokens": 20, "temperature": 0}


def test_an_answer_ends_at_any_end_token_of_the_generation_config(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = EMBEDDED.tokens(tuple(TOKENIZER.encode(ASKED["prompt"])), 20)
    assert TOKENIZER.eos_token_id not in tokens
    with EMBEDDED.made() as engine, TestClient(app_for(engine)) as client:
        monkeypatch.setattr(model().generation_config, "eos_token_id", [TOKENIZER.eos_token_id, tokens[10]])
        answer = client.post("/v1/completions", json=ASKED).json()
        on = client.post("/v1/completions", json={**ASKED, "ignore_eos": True}).json()
    end = tokens.index(tokens[10])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == text_of(tokens[:end])
    assert answer["usage"]["completion_tokens"] == end + 1
    assert on["choices"][0]["finish_reason"] == "length"
    assert on["usage"]["completion_tokens"] == 20


@pytest.mark.slow
def test_answers_without_a_seed_differ() -> None:
    asked = {**ASKED, "prompt": [ASKED["prompt"]] * 6, "temperature": 1.5}
    with EMBEDDED.made() as engine, TestClient(app_for(engine)) as client:
        texts = [choice["text"] for choice in client.post("/v1/completions", json=asked).json()["choices"]]
        again = [client.post("/v1/completions", json={**ASKED, "temperature": 1.5, "seed": 3}).json() for _ in "ab"]
    assert len(set(texts)) > 1, "six answers that a seed of the library's own would make the same"
    assert again[0]["choices"] == again[1]["choices"]
