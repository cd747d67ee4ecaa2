"""Several answers to a prompt, and what is reported of tokens, in OpenAI's shapes and vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from support.processes import wait_until
from support.serving.fake_engine import FakeEngine, logprobs_at, token_after
from support.serving.live_server import CONTEXT, NAME, TOKENIZER, app_for, live, text_of

PROMPT = "def read(path):"
IDS = tuple(TOKENIZER.encode(PROMPT))
LETTERS = (35,)
"""A prompt after which each token is one letter."""
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(app_for(engine)) as found:
        yield found


def complete(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post(COMPLETIONS, json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chunks(client: TestClient, path: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream."""
    text = client.post(path, json={**ASKED, "stream": True, **fields}).text
    *events, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event[6:])["choices"][0] for event in events]


def tokens(answer: int = 0, count: int = 6) -> list[int]:
    return [token_after(IDS, k, answer=answer) for k in range(count)]


def test_n_answers_to_each_prompt_count_the_prompt_once(client: TestClient) -> None:
    prompts = [PROMPT, "import os"]
    got = complete(client, prompt=prompts, n=3)
    expected = [
        text_of([token_after(tuple(TOKENIZER.encode(prompt)), k, answer=i) for k in range(6)])
        for prompt in prompts
        for i in range(3)
    ]
    assert [choice["text"] for choice in got["choices"]] == expected
    assert [choice["index"] for choice in got["choices"]] == list(range(6))
    read = sum(len(TOKENIZER.encode(prompt)) for prompt in prompts)
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (read, 36)
    texts = [""] * 6
    for choice in chunks(client, prompt=prompts, n=3):
        texts[choice["index"]] += choice["text"]
    assert texts == expected


def test_an_answer_that_a_stop_string_ends_leaves_the_others_alone(client: TestClient, engine: FakeEngine) -> None:
    texts = [text_of([token_after(LETTERS, k, answer=i) for k in range(8)]) for i in range(3)]
    stop = texts[1][2:4]
    got = complete(client, prompt=LETTERS, n=3, max_tokens=8, stop=stop)
    assert [choice["text"] for choice in got["choices"]] == [text.partition(stop)[0] for text in texts]
    assert got["choices"][1]["stop_reason"] == stop
    wait_until(lambda: engine.counters.read().completed == 1)
    assert engine.counters.read().cancelled == 0


def test_the_best_of_several_are_the_likeliest(client: TestClient, engine: FakeEngine) -> None:
    got = complete(client, n=2, best_of=5, max_tokens=1)
    assert (engine.requests[0].n, engine.requests[0].logprobs) == (5, 0)
    assert [choice["index"] for choice in got["choices"]] == [0, 1]
    assert got["choices"][0]["logprobs"] is None
    assert got["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_of_a_completion(client: TestClient, stream: bool, echo: bool) -> None:
    fields: dict[str, Any] = {"logprobs": 3, "echo": echo}
    choices = chunks(client, **fields) if stream else complete(client, **fields)["choices"]
    parts = [choice["logprobs"] for choice in choices]
    text = "".join(choice["text"] for choice in choices)
    told = {key: [x for part in parts for x in part[key]] for key in parts[0]}
    ids = [*(IDS if echo else ()), *tokens()]
    first = 0 if echo else len(IDS)
    known = [logprobs_at(token, first + i, 3) for i, token in enumerate(ids)]
    assert text == (PROMPT if echo else "") + text_of(tokens())
    assert told["token_logprobs"][echo:] == [entry.logprob for entry in known][echo:]
    for entry, top in list(zip(known, told["top_logprobs"], strict=True))[echo:]:
        assert list(top.values())[:3] == [logprob for _, logprob in entry.top]
        assert entry.logprob in top.values()
    assert all(text[offset:].startswith(name) for name, offset in zip(told["tokens"], told["text_offset"], strict=True)
               if not name.startswith("bytes:") and name not in TOKENIZER.all_special_tokens)  # fmt: skip
    if echo:
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)


def test_echo_without_an_answer(client: TestClient) -> None:
    got = complete(client, max_tokens=0, echo=True, logprobs=1, prompt=list(IDS))
    (choice,) = got["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(IDS)
    assert got["usage"]["completion_tokens"] == 0
    assert complete(client, max_tokens=0, echo=True)["choices"][0]["text"] == PROMPT
    assert client.post(COMPLETIONS, json={**ASKED, "max_tokens": 0}).json()["error"]["param"] == "max_tokens"


def test_the_prompts_logprobs_by_token_ids(client: TestClient) -> None:
    (choice,) = complete(client, prompt_logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for i, (token, told) in enumerate(zip(IDS[1:], rest, strict=True), 1):
        known = logprobs_at(token, i, 2)
        assert told[str(token)]["logprob"] == known.logprob
        assert told[str(token)]["rank"] == known.rank
        assert {int(name) for name in told} == {token, *(each for each, _ in known.top)}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "prompt_logprobs": 0}
    got = client.post(CHATS, json=chat).json()
    assert len(got["prompt_logprobs"]) == got["usage"]["prompt_tokens"]


def test_logprobs_of_a_chat_through_the_official_client() -> None:
    options: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": 0}
    with live(FakeEngine()) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=2)
        stream = list(client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=2, stream=True))
    for choice in whole.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        assert (
            b"".join(bytes(entry.bytes or ()) for entry in content).decode(errors="replace") == choice.message.content
        )
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)
        told = [
            entry
            for chunk in stream
            for part in chunk.choices
            if part.index == choice.index and part.logprobs
            for entry in part.logprobs.content or ()
        ]
        assert [entry.logprob for entry in told] == [entry.logprob for entry in content]


def test_tokens_by_their_ids(client: TestClient) -> None:
    (choice,) = complete(client, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens()]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (tokens(), list(IDS))


def test_what_is_asked_of_sampling_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2,
    }  # fmt: skip
    complete(client, **fields, logit_bias={"65": 100}, min_tokens=2)
    request = engine.requests[0]
    for name, value in fields.items():
        assert getattr(request.sampling, name) == value
    assert (request.sampling.logit_bias, request.min_tokens) == (((65, 100.0),), 2)
    assert complete(client, logit_bias={"65": 100})["choices"][0]["text"] == text_of([65] * 6)
    complete(client, temperature=0, repetition_penalty=1.5, top_k=5)
    greedy = engine.requests[-1].sampling
    assert (greedy.temperature, greedy.repetition_penalty, greedy.top_k) == (0, 1.5, None)


def test_before_min_tokens_nothing_ends_an_answer(client: TestClient) -> None:
    text = text_of([token_after(LETTERS, k) for k in range(6)])
    for min_tokens, expected in ((0, text[:1]), (1, text[:1]), (2, text)):
        got = complete(client, prompt=LETTERS, stop=text[1], min_tokens=min_tokens)
        assert got["choices"][0]["text"] == expected
    got = complete(client, prompt=LETTERS, stop_token_ids=[token_after(LETTERS, 1)], min_tokens=4)
    assert got["usage"]["completion_tokens"] == 6


def test_a_stop_can_be_part_of_the_text(client: TestClient) -> None:
    text = text_of(tokens(count=40))
    stop = text[9:13]
    end = text.index(stop) + len(stop)
    got = complete(client, stop=stop, max_tokens=40, include_stop_str_in_output=True)["choices"][0]
    assert (got["text"], got["finish_reason"], got["stop_reason"]) == (text[:end], "stop", stop)
    token = tokens()[3]
    for keep in (False, True):
        got = complete(client, stop_token_ids=[token], include_stop_str_in_output=keep)["choices"][0]
        assert (got["text"], got["stop_reason"]) == (text_of(tokens(count=3 + keep)), token)


def test_special_tokens_can_be_part_of_the_text(client: TestClient) -> None:
    special = TOKENIZER.eos_token_id
    asked = {"logit_bias": {str(special): 100}, "max_tokens": 2, "ignore_eos": True}
    assert complete(client, **asked)["choices"][0]["text"] == ""
    assert complete(client, **asked, skip_special_tokens=False)["choices"][0]["text"] == TOKENIZER.eos_token * 2


def test_cached_tokens_are_told(client: TestClient) -> None:
    told = [complete(client)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert told == [0, len(IDS) - 1]


def test_a_long_report_is_made_apart_from_the_event_loop(client: TestClient) -> None:
    got = complete(client, max_tokens=CONTEXT - len(IDS), logprobs=20)
    assert len(got["choices"][0]["logprobs"]["tokens"]) == CONTEXT - len(IDS)


def test_a_chat_without_a_limit_gets_what_the_kv_cache_holds_now() -> None:
    engine = FakeEngine(capacity=60)
    asked = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    with TestClient(app_for(engine)) as client:
        for limit in (60, 40):
            engine.limit = limit
            got = client.post(CHATS, json=asked).json()
            assert (got["choices"][0]["finish_reason"], got["usage"]["total_tokens"]) == ("length", limit)
            got = client.post("/v1/responses", json={"input": "x", "ignore_eos": True}).json()
            assert (got["status"], got["usage"]["total_tokens"]) == ("incomplete", limit)
        assert client.get(f"/v1/models/{NAME}").json()["max_model_len"] == 60
        assert client.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"] == 60
        assert client.post(CHATS, json={**asked, "max_tokens": 60}).json()["error"]["code"] == "capacity_exceeded"


def test_prompts_of_one_body_are_no_queue_to_each_other() -> None:
    engine = FakeEngine(queue=2, batch=1)
    with TestClient(app_for(engine)) as client:
        assert len(complete(client, prompt=[PROMPT] * 5)["choices"]) == 5
        complete(client)
    assert [request.parent for request in engine.requests] == [engine.requests[0].id] * 5 + [None]
