"""What clients of other servers send: defaults of their libraries, options of vLLM, requests of their benchmarks."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from elastic.server.protocol.neutral_fields import CHAT, COMPLETION, MESSAGE, PART, Neutral
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import NAME, PATIENCE_S, TOKENIZER, app_for, live

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
SMALL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 2, "temperature": 0},
    CHATS: {"messages": [USER], "max_tokens": 2, "temperature": 0},
}
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHATS])


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(app_for(FakeEngine())) as found:
        yield found


def events(text: str) -> list[dict[str, Any]]:
    """The objects of a stream that ended as it should."""
    *found, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


DEFAULTS = {
    "repetition_penalty": 1.0,
    "min_p": 0,
    "length_penalty": 1.0,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
    "bad_words": [],
    "priority": 0,
    "truncate_prompt_tokens": None,
    "guided_json": None,
    "logprobs": None,
    "frequency_penalty": 0.0,
    "request_id": "mine",
}


@BOTH
def test_the_defaults_of_other_servers_are_taken(client: TestClient, path: str) -> None:
    answer = client.post(path, json={**SMALL[path], **DEFAULTS})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "neutral"), [(COMPLETIONS, COMPLETION), (CHATS, CHAT)])
def test_each_neutral_value_is_taken_and_another_is_refused_by_name(
    client: TestClient, path: str, neutral: Neutral
) -> None:
    for name, values in neutral.items():
        for value in values or ("anything", 7, None):
            answer = client.post(path, json={**SMALL[path], name: value})
            assert answer.status_code == 200, (name, value, answer.text)
        if values is not None:
            error = client.post(path, json={**SMALL[path], name: 1.5}).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_value")


def test_one_is_one_but_true_is_not(client: TestClient) -> None:
    for value, status in ((1, 200), (1.0, 200), (True, 400), ("1", 400), (1.1, 400)):
        assert client.post(COMPLETIONS, json={**SMALL[COMPLETIONS], "length_penalty": value}).status_code == status


def test_neutral_fields_of_messages_are_taken(client: TestClient) -> None:
    message = {**USER, **{name: (values or (None,))[0] for name, values in MESSAGE.items()}}
    part = {"type": "text", "text": "x", **{name: (values or (None,))[0] for name, values in PART.items()}}
    for messages in ([message], [{**USER, "content": [part]}]):
        assert client.post(CHATS, json={**SMALL[CHATS], "messages": messages}).status_code == 200
    wrong = {**USER, "content": [{**part, "no_such": 1}]}
    error = client.post(CHATS, json={**SMALL[CHATS], "messages": [USER, wrong]}).json()["error"]
    assert error["param"] == "messages.1.content.0.no_such"


def test_an_assistant_may_have_said_nothing(client: TestClient) -> None:
    def read(assistant: dict[str, Any]) -> int:
        asked = {**SMALL[CHATS], "messages": [USER, {"role": "assistant", **assistant}, USER]}
        answer = client.post(CHATS, json=asked)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    assert read({"content": None}) == read({}) == read({"content": ""}) == read({"content": None, "tool_calls": []})
    error = client.post(CHATS, json={**SMALL[CHATS], "messages": [{"role": "user", "content": None}]}).json()["error"]
    assert error["param"] == "messages.0.content"


PATHS: list[tuple[str, dict[str, Any], str]] = [
    (CHATS, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (CHATS, {"messages": [USER, {"role": "user", "content": ["x"]}]}, "messages.1.content.0"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    (CHATS, {"messages": [{"content": "x"}]}, "messages.0.role"),
    (CHATS, {"messages": {"role": "user"}}, "messages"),
    (CHATS, {"messages": [USER], "stop_token_ids": [1, "x"]}, "stop_token_ids.1"),
    (COMPLETIONS, {"prompt": [[1], [None]]}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "stop": {"a": 1}}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), PATHS)
def test_an_error_names_the_path_that_was_sent(client: TestClient, path: str, body: Any, param: str) -> None:
    error = client.post(path, json=body).json()["error"]
    assert error["param"] == param
    assert not any(word in error["message"] for word in ("function-", "[", "constrained", "()"))


@BOTH
def test_usage_so_far_in_every_chunk(client: TestClient, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**SMALL[path], "max_tokens": 12, "ignore_eos": True, "stream": True, "stream_options": options}
    chunks = events(client.post(path, json=asked).text)
    generated = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert generated == sorted(generated)
    assert generated[0] >= 1
    assert generated[-1] == 12
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []


def test_usage_so_far_is_that_of_the_chunks_own_answer(client: TestClient) -> None:
    prompts = [[5, 6, 7], [8]]
    asked = {
        **SMALL[COMPLETIONS],
        "prompt": prompts,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    for chunk in events(client.post(COMPLETIONS, json=asked).text):
        assert chunk["usage"]["prompt_tokens"] == len(prompts[chunk["choices"][0]["index"]])


def test_the_role_comes_with_the_first_token_and_not_before() -> None:
    content = json.dumps({**SMALL[CHATS], "max_tokens": 30, "ignore_eos": True, "stream": True}).encode()
    with live(FakeEngine()) as server, socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as client:
        head = f"POST {CHATS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        received = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")[2]
    length, _, rest = received.partition(b"\r\n")
    first = rest[: int(length, 16)].decode().split("\n\n")  # the first chunk of HTTP: one write
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in first if event]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1]["content"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/elastic/status", "/v1/models", f"/v1/models/{NAME}"])
def test_head_is_get_without_the_body(client: TestClient, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_over_a_socket_leaves_the_connection_usable() -> None:
    import httpx

    with live(FakeEngine()) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for _ in range(2):
            assert client.head("/health").status_code == 200
            assert client.get("/health").json() == {"status": "serving"}
        assert client.head(COMPLETIONS).status_code == 405


def prompt(words: int) -> str:
    return str(TOKENIZER.decode(range(300, 300 + words)))


VLLM_BENCH = {"model": NAME, "repetition_penalty": 1.0, "stream": True, "stream_options": {"include_usage": True}}
GUIDELLM = {"model": NAME, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BENCHMARKS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve": (
        COMPLETIONS,
        {**VLLM_BENCH, "prompt": prompt(20), "max_tokens": 8, "logprobs": None, "ignore_eos": True, "temperature": 0.0},
    ),
    "vllm bench serve, chat": (
        CHATS,
        {
            **{key: value for key, value in VLLM_BENCH.items() if key != "repetition_penalty"},
            "messages": [{"role": "user", "content": [{"type": "text", "text": prompt(20)}]}],
            "max_completion_tokens": 8,
            "ignore_eos": True,
        },
    ),
    "guidellm": (
        COMPLETIONS,
        {**GUIDELLM, "prompt": prompt(20), "max_tokens": 8, "stop": None, "ignore_eos": True},
    ),
    "guidellm, chat": (
        CHATS,
        {
            **GUIDELLM,
            "messages": [{"role": "user", "content": [{"type": "text", "text": prompt(20)}]}],
            "max_completion_tokens": 8,
            "stop": None,
            "ignore_eos": True,
        },
    ),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_requests_of_other_benchmarks_are_answered_to_their_end(client: TestClient, name: str) -> None:
    path, body = BENCHMARKS[name]
    chunks = events(client.post(path, json=body).text)
    assert chunks[-1]["usage"]["completion_tokens"] == 8
