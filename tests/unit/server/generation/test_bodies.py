"""Bodies made to keep the server busy: refused soon, with one error, and before the work that they would cost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from elastic.server.generation import bodies
from elastic.server.generation.request_builder import SHORT, RequestBuilder
from elastic.server.protocol.chat import MOST_MESSAGES, ChatBody
from elastic.server.protocol.completions import CompletionBody
from elastic.server.protocol.fleet import DeployBody, DropBody
from elastic.server.protocol.responses import ResponsesBody
from elastic.server.protocol.tokens import DetokenizeBody
from elastic.server.routes.actions import ActionsBody
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import CONTEXT, PATIENCE_S, TOKENIZER, app_for

JSON_TYPE = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "x"}
SWAP = {"kind": "swap", "layers": [1], "variant": "int4"}
MANY = 5_000
FEWER = MOST_MESSAGES - 1
"""Of messages and calls, so many are no error by themselves."""

WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionBody, {"prompt": [None] * MANY}),
    (CompletionBody, {"prompt": [[None] * MANY] * MANY}),
    (CompletionBody, {"prompt": [[1]] * MANY}),
    (CompletionBody, {"prompt": "x", "stop": [0] * MANY}),
    (CompletionBody, {"prompt": "x", "stop_token_ids": ["x"] * MANY}),
    (ChatBody, {"messages": [0] * MANY}),
    (ChatBody, {"messages": [0] * FEWER}),
    (ChatBody, {"messages": [USER] * MANY}),
    (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [0] * FEWER}]}),
    (ChatBody, {"messages": [{**USER, "content": [0] * MANY}]}),
    (ActionsBody, {"actions": [0] * MANY}),
    (ActionsBody, {"actions": [{**SWAP, "layers": ["x"] * MANY}]}),
    (ActionsBody, {"actions": [{**SWAP, "parts": [0] * MANY}]}),
]


@pytest.mark.parametrize(("model", "body"), WRONG)
def test_a_list_of_wrong_elements_is_not_an_error_for_each(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    assert error.value.error_count() <= 8


def bodies_of(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A kind of bodies, and all that are made of it."""
    yield model
    for each in model.__subclasses__():
        yield from bodies_of(each)


def lists_in(schema: Any) -> Iterator[Any]:
    """The lists in a schema of pydantic-core."""
    if isinstance(schema, dict) and schema.get("type") == "list":
        yield schema
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
    for each in inner:
        yield from lists_in(each)


def test_every_list_of_every_body_stops_at_its_first_error() -> None:
    client_bodies = [model for model in bodies_of(BaseModel) if model.__module__.startswith("elastic.server.")]
    found = {model: list(lists_in(model.__pydantic_core_schema__)) for model in client_bodies}
    assert {CompletionBody, ChatBody, ResponsesBody, DetokenizeBody, ActionsBody, DropBody, DeployBody} <= {
        model for model, lists in found.items() if lists
    }
    patient = [model.__name__ for model, lists in found.items() if not all(each.get("fail_fast") for each in lists)]
    assert not patient


LARGE = [
    b'{"prompt": [' + b"[1]," * 60_000 + b"[1]]}",
    b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d": 1' % i for i in range(60_000)) + b"}}",
    b'{"messages": [' + b"0," * 200_000 + b"0]}",
    b'{"prompt": [' + b'"",' * 200_000 + b'""]}',
    b'{"prompt": ' + b"[" * 100_000,
    b'"' * 400_001,
]


@pytest.mark.parametrize("content", LARGE, ids=range(len(LARGE)))
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    def never(body: bytes) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(bodies, "from_json", never)
    with TestClient(app_for(FakeEngine())) as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = client.post(path, content=content, headers=JSON_TYPE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


texts = st.text(st.sampled_from('"\\[]{}:,x\né\u2028'), max_size=12)
documents = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(documents, st.booleans())
def test_parts_are_counted_outside_of_texts_only(document: Any, ascii_only: bool) -> None:
    def count(value: Any) -> tuple[int, int]:
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        fields = len(inner) if isinstance(value, dict) else 0
        below = [count(one) for one in inner]
        containers = isinstance(value, dict | list)
        return containers + sum(c for c, _ in below), fields + sum(f for _, f in below)

    body = json.dumps(document, ensure_ascii=ascii_only).encode()
    between = b"".join(bodies._between_strings(body))
    assert (between.count(b"{") + between.count(b"["), between.count(b":")) == count(document)


def test_a_large_text_of_brackets_and_quotes_is_no_body_of_many_parts() -> None:
    text = '[{":,\\' * 20_000
    bodies.check_parts(json.dumps({"prompt": text}).encode(), 100)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("it was tokenized")

    longest = max(map(len, TOKENIZER.get_vocab()))
    text = "x" * (CONTEXT * longest + 1)
    with TestClient(app_for(FakeEngine(), max_model_len=CONTEXT)) as client:
        prompts = client.app.state.serving.prompts  # type: ignore[attr-defined]
        for thread in (prompts._short, prompts._long):
            monkeypatch.setattr(thread.tokenizer, "encode", never)
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            error = client.post(path, json=body).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"{CONTEXT * longest:,} characters" in error["message"]


class Slow:
    """A tokenizer that takes as long over long texts as a test wants."""

    chat_template = "{{ tools }}"
    eos_token_id = None

    def __init__(self, go_on: threading.Event) -> None:
        self._go_on = go_on

    def __len__(self) -> int:
        return 10

    def __deepcopy__(self, memo: Any) -> Slow:
        return Slow(self._go_on)

    def apply_chat_template(self, conversation: Any, **variables: Any) -> str:
        return json.dumps([conversation, variables])

    def encode(self, text: str, **options: Any) -> list[int]:
        if len(text) > SHORT:
            self._go_on.wait(PATIENCE_S)
        return [1]


LONG = "x" * (SHORT + 1)
CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"x": LONG})}}]}
LONG_PROMPTS: list[tuple[type[CompletionBody | ChatBody], dict[str, Any]]] = [
    (CompletionBody, {"prompt": LONG}),
    (ChatBody, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]}),
    (ChatBody, {"messages": [USER], "chat_template_kwargs": {"mood": LONG}}),
    (ChatBody, {"messages": [USER, CALLS]}),
]


@pytest.mark.parametrize(("kind", "fields"), LONG_PROMPTS)
def test_a_long_text_does_not_hold_up_a_short_one(
    kind: type[CompletionBody | ChatBody], fields: dict[str, Any]
) -> None:
    go_on, body = threading.Event(), kind.model_validate(fields)

    async def both() -> list[int]:
        prompts = RequestBuilder(Slow(go_on), max_model_len=None)
        make = prompts.chat if isinstance(body, ChatBody) else prompts.completion
        long = asyncio.create_task(make(body, 0.0))
        await asyncio.sleep(0)
        try:
            (short,) = await asyncio.wait_for(prompts.completion(CompletionBody(prompt="x"), 0.0), PATIENCE_S / 3)
        finally:
            go_on.set()
        await long
        prompts.close()
        return list(short.prompt)

    assert asyncio.run(both()) == [1]
