"""The Responses API, through the official client."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from elastic.engines.base import Listener, Output, Request
from elastic.server.app import create_app
from elastic.server.protocol.chat import MOST_MESSAGES
from elastic.server.protocol.structured import LONGEST_GRAMMAR
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import CONTEXT, NAME
from support.serving.tool_calls import CALLED, CHATTING, CLOCK, WEATHER, CheckedGrammars, obedient, serving

TOOLS: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
ASKED: dict[str, Any] = {"model": NAME, "input": "Say hello.", "temperature": 0}


def test_a_response_of_text() -> None:
    engine = obedient("Hello!")
    with serving(engine) as (client, _):
        got = client.responses.create(**ASKED, instructions="Be brief.", max_output_tokens=20, metadata={"a": "b"})
    assert (got.output_text, got.status, got.store, got.metadata) == ("Hello!", "completed", False, {"a": "b"})
    assert CHATTING.decode(engine.requests[0].prompt).startswith("<system>Be brief.</system><user>Say hello.</user>")
    assert got.usage is not None
    assert got.usage.input_tokens == len(engine.requests[0].prompt)
    assert got.usage.total_tokens == got.usage.input_tokens + got.usage.output_tokens


def test_the_events_of_a_stream_make_the_response() -> None:
    with serving(obedient(CALLED)) as (client, _):
        whole = client.responses.create(**ASKED, tools=TOOLS)
        events = list(client.responses.create(**ASKED, tools=TOOLS, stream=True))
        with client.responses.stream(**ASKED, tools=TOOLS) as stream:  # the client's own sum of the events
            final = stream.until_done().get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    last = events[-1].response
    for response in (whole, last, final):
        message, weather, clock = response.output
        assert message.type == "message"
        assert weather.type == clock.type == "function_call"
        assert response.output_text == "Let me see."
        assert [(call.name, call.arguments) for call in (weather, clock)] == [
            ("weather", '{"city": "Oslo"}'),
            ("clock", "{}"),
        ]
        assert {item.status for item in response.output} == {"completed"}
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == "Let me see."
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"city": "Oslo"}{}'
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in last.output]


def test_a_conversation_is_sent_whole() -> None:
    engine = obedient("Cold.")
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hm.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": "3 degrees"},
    ]
    with serving(engine) as (client, _):
        assert client.responses.create(**{**ASKED, "input": items}, tools=TOOLS).output_text == "Cold."
    prompt = CHATTING.decode(engine.requests[0].prompt)
    assert (
        '<assistant>Hm.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call></assistant>' in prompt
    )
    assert "<tool>3 degrees(c1)</tool>" in prompt


class Place(BaseModel):
    name: str
    population: int


def test_structured_output_and_a_named_function() -> None:
    with serving(obedient()) as (client, _):
        parsed = client.responses.parse(**ASKED, text_format=Place)
        assert parsed.output_parsed == Place(name="text", population=7)
        choice: Any = {"type": "function", "name": "weather"}
        named = client.responses.create(**ASKED, tools=TOOLS, tool_choice=choice)
        (call,) = named.output
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("weather", '{"city": "text", "days": 7}')


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    with serving(FakeEngine()) as (client, _):
        got = client.responses.create(**ASKED, max_output_tokens=3, extra_body={"ignore_eos": True})
        events = list(client.responses.create(**ASKED, max_output_tokens=3, stream=True))
    assert got.status == "incomplete"
    assert got.incomplete_details is not None
    assert got.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"


def test_logprobs_of_a_response() -> None:
    with serving(obedient("Hello!")) as (client, _):
        include: Any = ["message.output_text.logprobs"]
        got = client.responses.create(**ASKED, include=include, top_logprobs=2)
        events = list(client.responses.create(**ASKED, include=include, top_logprobs=2, stream=True))
    (message,) = got.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    told = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.logprob for entry in told] == [entry.logprob for entry in part.logprobs]


LONG = {"description": "x" * LONGEST_GRAMMAR}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"truncation": "auto"}, "truncation"),
    ({"no_such": 1}, "no_such"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": "x", "no_such": 1}]}, "input.0.no_such"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input.0.tool_calls"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "name": "f", "cache": 1}]}, "tools.0.cache"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}, "a": 1}}, "text.a"),
    ({"input": [{"role": "user", "content": "x"}] * MOST_MESSAGES, "instructions": "Be brief."}, "input"),
    ({"max_output_tokens": CONTEXT}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": LONG}}}, "text.format"),
    *(({"metadata": {"a": value}}, "metadata") for value in (math.nan, math.inf)),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    app = create_app(obedient("x"), CHATTING, NAME, grammars=CheckedGrammars(), max_model_len=CONTEXT)
    with TestClient(app) as client:
        content = json.dumps({**ASKED, **fields})
        answer = client.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(param)


def test_a_failure_is_the_last_event_of_a_stream() -> None:
    class Failing(FakeEngine):
        def submit(self, request: Request, listener: Listener) -> None:
            listener(Output(request.id, (), "failed", "it broke"))

    with serving(Failing()) as (client, _):
        events = list(client.responses.create(**ASKED, stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        assert "it broke" in events[-1].response.error.message
        with pytest.raises(openai.InternalServerError):
            client.responses.create(**ASKED)
