"""The official client, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from elastic.server.generation.chat_template import without_template
from support.processes import wait_until
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import CONTEXT, EMBEDDED, FAKE, NAME, TOKENIZER, Kind, Live, answer, empty, live

KINDS = [pytest.param(FAKE, id="fake"), pytest.param(EMBEDDED, id="embedded")]
PROMPT = "def read(path):"
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]},
]
CHAT = without_template([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello"}])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def server(kind: Kind) -> Iterator[Live]:
    with kind.made() as engine, live(engine) as running:
        yield running


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_completion(client: openai.OpenAI, kind: Kind) -> None:
    text, finish, tokens = answer(kind, PROMPT, 40)
    got = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, temperature=0)
    assert (got.object, got.model, got.choices[0].text, got.choices[0].finish_reason) == (
        "text_completion",
        NAME,
        text,
        finish,
    )
    read = len(TOKENIZER.encode(PROMPT))
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (
        read,
        tokens,
        read + tokens,
    )


def test_a_completion_in_a_stream(client: openai.OpenAI, kind: Kind) -> None:
    text, finish, tokens = answer(kind, PROMPT, 40)
    chunks = list(
        client.completions.create(
            model=NAME,
            prompt=PROMPT,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + [finish]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == tokens


def test_a_chat(client: openai.OpenAI, kind: Kind) -> None:
    text, finish, _ = answer(kind, CHAT, 30)
    got = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=30, temperature=0)
    message = got.choices[0].message
    assert (got.object, message.role, message.content, got.choices[0].finish_reason) == (
        "chat.completion",
        "assistant",
        text,
        finish,
    )


def test_a_chat_in_a_stream(client: openai.OpenAI, kind: Kind) -> None:
    text, finish, _ = answer(kind, CHAT, 30)
    chunks = list(
        client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=30, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == finish
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_chat_may_use_all_of_the_context_and_go_on_after_the_end_of_text() -> None:
    read = len(TOKENIZER.encode(CHAT))
    options: Any = {"model": NAME, "messages": MESSAGES, "temperature": 0}
    with live(FakeEngine()) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        to_the_end = client.chat.completions.create(**options)
        beyond = client.chat.completions.create(**options, extra_body={"ignore_eos": True})
    text, finish, tokens = answer(FAKE, CHAT, CONTEXT - read)
    assert finish == "stop"
    assert (to_the_end.choices[0].message.content, to_the_end.choices[0].finish_reason) == (text, "stop")
    assert to_the_end.usage is not None
    assert to_the_end.usage.completion_tokens == tokens
    assert beyond.usage is not None
    assert (beyond.usage.completion_tokens, beyond.choices[0].finish_reason) == (CONTEXT - read, "length")


def test_several_prompts_of_both_kinds(client: openai.OpenAI, kind: Kind) -> None:
    texts = ["import os", "class A:", PROMPT]
    expected = [answer(kind, text, 12)[0] for text in texts]
    for prompt in (texts, [TOKENIZER.encode(text) for text in texts]):
        whole = client.completions.create(model=NAME, prompt=prompt, max_tokens=12, temperature=0)
        assert [choice.text for choice in whole.choices] == expected
        got = ["", "", ""]
        for chunk in client.completions.create(model=NAME, prompt=prompt, max_tokens=12, temperature=0, stream=True):
            got[chunk.choices[0].index] += chunk.choices[0].text
        assert got == expected


def test_a_stop_string_ends_the_text_before_it(server: Live, client: openai.OpenAI, kind: Kind) -> None:
    text, _, _ = answer(kind, PROMPT, 40)
    stop = text[9:15]  # spread over tokens
    expected = text[: text.index(stop)], "stop"
    before = server.engine.counters.read()
    options: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 900, "temperature": 0, "stop": ["not there", stop]}
    choice = client.completions.create(**options).choices[0]
    assert (choice.text, choice.finish_reason) == expected
    chunks = list(client.completions.create(**options, stream=True))
    assert ("".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason) == expected
    wait_until(lambda: empty(server.engine))
    after = server.engine.counters.read()
    assert (after.completed - before.completed, after.cancelled - before.cancelled) == (2, 0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other/model")
    assert error.value.code == "model_not_found"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=NAME, prompt="x", max_tokens=CONTEXT)
    assert (wrong.value.code, wrong.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model=NAME, prompt="x", suffix="y")


@pytest.mark.slow
def test_many_at_once_through_the_asynchronous_client(server: Live, kind: Kind) -> None:
    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        prompt = f"x{i}"
        if i % 2:
            got = await client.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0)
            return got.choices[0].text
        stream = await client.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(16)))

    assert asyncio.run(all_of_them()) == [answer(kind, f"x{i}", 8)[0] for i in range(16)]


def test_too_many_waiting_is_a_429_with_the_time_to_come_back() -> None:
    with (
        live(FakeEngine(queue=0)) as full,
        openai.OpenAI(base_url=f"{full.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as error,
    ):
        client.completions.create(model=NAME, prompt="x")
    assert error.value.code == "overloaded"
    assert error.value.response.headers["retry-after"] == "1"


def test_a_request_that_never_fits_says_so_in_numbers() -> None:
    with (
        live(FakeEngine(capacity=50)) as small,
        openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="requested 101 bytes"),
    ):
        client.completions.create(model=NAME, prompt="x", max_tokens=100)
