"""Whatever is sent: an answer or an error in JSON, never a 500; and the server goes on as before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from support.processes import wait_until
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import CONTEXT, FAKE, NAME, TOKENIZER, answer, app_for, empty
from support.serving.tool_calls import CHATTING, CheckedGrammars

POSTS = [
    *("/v1/completions", "/v1/chat/completions", "/elastic/actions"),
    *("/v1/responses", "/tokenize", "/detokenize"),
]
VIEWS = ["/v1/models", "/v1/models/x/y", "/health", "/metrics", "/elastic/status", "/", "/v1", "/v1/completions/"]
HEADERS = ["accept", "authorization", "content-type", "content-length", "cookie", "expect", "x-y", "host"]
TOKEN = {"Authorization": "Bearer t"}
JSON_TYPE = {"Content-Type": "application/json"}
TIGHT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, -(10**30), 1e308, float("nan"), float("-inf"), 5e-324]),
)
strings = st.text(st.characters(codec=None, exclude_categories=[]), max_size=8)  # with lone surrogates
values = st.recursive(
    st.none() | st.booleans() | numbers | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop"),
    *("stop_token_ids", "ignore_eos", "stream", "stream_options", "seed", "n", "logprobs", "echo", "suffix"),
    *("logit_bias", "presence_penalty", "tools", "tool_choice", "response_format", "user", "actions", "dry_run"),
    *("best_of", "top_logprobs", "prompt_logprobs", "min_p", "min_tokens", "repetition_penalty", "frequency_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens", "add_special_tokens", "return_token_ids"),
    *("return_tokens_as_token_ids", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("parallel_tool_calls", "input", "instructions", "max_output_tokens", "text", "include", "store", "tokens"),
    *("previous_response_id", "return_token_strs"),
]
VALID: list[dict[str, Any]] = [
    {"model": NAME, "prompt": "import os", "max_tokens": 4, "temperature": 0},
    {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 4, "stop": ["a", "b"]},
    {"actions": [{"kind": "swap", "layers": [1], "variant": "int4"}], "dry_run": True},
    {"prompt": "x", "n": 2, "logprobs": 2, "echo": True, "max_tokens": 3, "logit_bias": {"5": 1}, "best_of": 2},
    {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "max_tokens": 3, "n": 2},
    {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "required",
        "max_tokens": 4,
    },
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "guided_json": {"type": "integer"}},
    {"input": "x", "max_output_tokens": 4, "text": {"format": {"type": "json_object"}}},
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "f"}],
        "max_output_tokens": 4,
        "stream": True,
    },
    {"tokens": [5, 6]},
]


@st.composite
def nearly_valid(draw: st.DrawFn) -> dict[str, Any]:
    """A body that was valid, with a few fields changed, added or taken away."""
    body = json.loads(json.dumps(draw(st.sampled_from(VALID))))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(FIELDS) | strings)
        if draw(st.booleans()):
            body[name] = draw(values)
        elif isinstance(body.get("messages"), list) and body["messages"] and isinstance(body["messages"][0], dict):
            body["messages"][0][draw(st.sampled_from(["role", "content", "name", "tool_calls"]) | strings)] = draw(
                values
            )
        else:
            body.pop(name, None)
    return body


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(batch=64)


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[TestClient]:
    tools = {"tokenizer": CHATTING, "grammars": CheckedGrammars(), "tool_call_parser": "hermes"}
    app = app_for(engine, token="t", actions=True, max_model_len=500, max_body="64KiB", **tools)
    with TestClient(app, raise_server_exceptions=True) as found:
        yield found


def check(answer: Any) -> None:
    """An answer that is JSON, or a stream of it."""
    assert answer.status_code < 500
    kind = answer.headers["content-type"]
    if kind.startswith("text/event-stream"):
        *events, done, end = answer.text.split("\n\n")
        assert end == ""
        if done.startswith("event: "):
            assert done.startswith(("event: response.completed", "event: response.incomplete"))
            return
        assert done == "data: [DONE]"
        assert all("error" not in json.loads(event.removeprefix("data: ")) for event in events)
    elif answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["message"]
    elif kind.startswith("application/json"):
        answer.json()


@TIGHT
@given(st.sampled_from(POSTS), nearly_valid() | values)
@example(POSTS[0], {"prompt": "x", "\ud800": 1})
@example(POSTS[0], {"prompt": "\ud800"})
@example(POSTS[0], {"prompt": [2**70]})
@example(POSTS[0], {"prompt": "x", "temperature": 10**400})
@example(POSTS[0], {"prompt": "x", "temperature": 5e-324, "top_p": 5e-324})
@example(POSTS[1], {"messages": [{"role": "user", "content": "x", "\udfff": []}]})
@example(POSTS[2], {"actions": [{"kind": "\ud800"}]})
@example(POSTS[2], {"actions": [{"kind": ["swap"]}]})
def test_no_json_is_a_500(client: TestClient, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    check(client.post(path, content=content, headers={**JSON_TYPE, **TOKEN}))


@TIGHT
@given(st.sampled_from(POSTS), st.binary(max_size=40))
@example(POSTS[0], b"[" * 30_000)
@example(POSTS[0], b'{"prompt": ' + b"9" * 20_000 + b"}")
@example(POSTS[0], b'{"prompt": "\xff\xfe"}')
@example(POSTS[0], b"\xff\xfe{\x00}\x00")
@example(POSTS[0], b'{"prompt": "x", "prompt": 5}')
@example(POSTS[1], b"")
@example(POSTS[1], b"null")
def test_no_bytes_are_a_500(client: TestClient, path: str, content: bytes) -> None:
    answer = client.post(path, content=content, headers={**JSON_TYPE, **TOKEN})
    check(answer)
    assert answer.status_code == 400


header = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30)


@TIGHT
@given(
    st.sampled_from(POSTS + VIEWS) | st.text(max_size=12).map(lambda text: "/v1/models/" + text),
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]),
    st.dictionaries(
        st.sampled_from(HEADERS),
        header | st.sampled_from(["application/json", "Bearer t", "Bearer ", "9" * 40, "-1"]),
    ),
    st.sampled_from([b"", b"{}", b'{"prompt": "x"}']),
)
def test_no_path_method_or_header_is_a_500(
    client: TestClient, path: str, method: str, headers: dict[str, str], content: bytes
) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    try:
        request = client.build_request(method, path, headers=encoded, content=content)
    except Exception:  # the client itself refuses this path
        return
    answer = client.send(request)
    assert answer.status_code < 500
    if answer.status_code >= 400 and method != "HEAD":
        assert answer.json()["error"]["message"]


@TIGHT
@given(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(lambda text: len(TOKENIZER.encode(text)) > 0),
    st.integers(1, 60),
    st.booleans(),
    st.lists(st.text("abcdefgh ", min_size=1, max_size=3), max_size=3),
)
@pytest.mark.slow
def test_valid_requests_get_the_known_text(
    client: TestClient, prompt: str, most: int, stream: bool, stops: list[str]
) -> None:
    text, finish, _ = answer(FAKE, prompt, most)
    cuts = [text.find(stop) for stop in stops if stop in text]
    expected = (text[: min(cuts)], "stop") if cuts else (text, finish)
    body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": stream, "stop": stops}
    got = client.post("/v1/completions", json=body)
    if stream:
        events = [json.loads(event[6:])["choices"][0] for event in got.text.split("\n\n")[:-2]]
        assert ("".join(event["text"] for event in events), events[-1]["finish_reason"]) == expected
    else:
        choice = got.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == expected


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ["x", ""]}, "prompt", "invalid_value"),
    ({"prompt": [1, "x"]}, "prompt", "invalid_value"),
    ({"prompt": [[1], []]}, "prompt", "invalid_value"),
    ({"prompt": [len(TOKENIZER)]}, "prompt", "invalid_value"),
    ({"prompt": ["x"] * 129}, "prompt", "invalid_value"),
    ({"prompt": 5}, "prompt", "invalid_value"),
    ({}, "prompt", "missing"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
    ({"prompt": "x " * 600}, "prompt", "context_length_exceeded"),
    ({"prompt": "x", "temperature": -1}, "temperature", "invalid_value"),
    ({"prompt": "x", "temperature": float("nan")}, "temperature", "invalid_value"),
    ({"prompt": "x", "top_p": 0}, "top_p", "invalid_value"),
    ({"prompt": "x", "stop": [""]}, "stop", "invalid_value"),
    ({"prompt": "x", "stop": "y" * 300}, "stop", "invalid_value"),
    ({"prompt": "x", "seed": 2**63}, "seed", "invalid_value"),
    ({"prompt": "x", "n": 0}, "n", "invalid_value"),
    ({"prompt": "x", "n": 2, "best_of": 1}, "best_of", "invalid_value"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", "invalid_value"),
    ({"prompt": ["x"] * 128, "n": 5}, "n", "invalid_value"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "invalid_value"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"prompt": "x", "min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"prompt": "x", "min_p": 2}, "min_p", "invalid_value"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {str(len(TOKENIZER)): 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "unsupported_value"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format", "invalid_value"),
    ({"prompt": "x", "response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
    ({"prompt": "x", "guided_json": {"a": float("nan")}}, "guided_json", "invalid_value"),
    ({"prompt": "x", "structured_outputs": {"xml": 1}}, "structured_outputs.xml", "unknown_parameter"),
    ({"prompt": "x", "no_such": None}, "no_such", "unknown_parameter"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
]


def test_what_is_wrong_is_named(client: TestClient) -> None:
    for body, param, code in WRONG:
        answer = client.post("/v1/completions", content=json.dumps(body), headers=JSON_TYPE)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"], error["type"]) == (
            400,
            param,
            code,
            "invalid_request_error",
        ), body
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    for message in (image, {"role": "tool", "content": None}, {"role": "user", "content": None}):
        answer = client.post("/v1/chat/completions", json={"messages": [message]})
        assert (answer.status_code, answer.json()["error"]["param"][:11]) == (400, "messages.0.")


def test_what_changes_nothing_is_taken(client: TestClient) -> None:
    neutral = {"n": 1, "user": "me", "presence_penalty": 0, "logprobs": None, "echo": False, "seed": 3, "stop": None}
    assert client.post("/v1/completions", json={"prompt": "x", "temperature": 0, **neutral}).status_code == 200


def test_after_all_that_nothing_is_left(client: TestClient, engine: FakeEngine) -> None:
    wait_until(lambda: empty(engine))
    assert client.app.state.serving.answering == 0  # type: ignore[attr-defined]
    assert client.get("/health").status_code == 200
