"""Tools and structured output in chats, through the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from elastic.engines.base import Grammar
from elastic.server.app import create_app
from elastic.server.formats.chat import ChatFormat
from elastic.server.formats.responses import ResponsesFormat
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import CONTEXT, NAME, app_for
from support.serving.tool_calls import CALLED, CHATTING, CLOCK, WEATHER, CheckedGrammars, obedient, serving

CHATS = "/v1/chat/completions"
USER = {"role": "user", "content": "How is the weather?"}
ASKED: dict[str, Any] = {"model": NAME, "messages": [USER], "temperature": 0, "tools": [WEATHER, CLOCK]}


def streamed(chunks: Any) -> tuple[str, list[list[str]], str | None]:
    """Content, calls with names and arguments, and finish reason of a stream."""
    content, calls, ids, finish = "", [], set(), None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                assert call.index == len(calls)
                ids.add(call.id)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        finish = choice.finish_reason or finish
    assert len(ids) == len(calls)
    return content, calls, finish


def whole(answer: Any) -> tuple[str, list[list[str]], str | None]:
    (choice,) = answer.choices
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def test_calls_of_the_models_own_accord() -> None:
    expected = ("Let me see.", [["weather", '{"city": "Oslo"}'], ["clock", "{}"]], "tool_calls")
    with serving(obedient(CALLED)) as (client, _):
        for fields in ({}, {"tool_choice": "auto"}):
            assert whole(client.chat.completions.create(**ASKED, **fields)) == expected
            assert streamed(client.chat.completions.create(**ASKED, **fields, stream=True)) == expected
        one = whole(client.chat.completions.create(**ASKED, parallel_tool_calls=False))
        assert one == (expected[0], expected[1][:1], "tool_calls")
        none = whole(client.chat.completions.create(**ASKED, tool_choice="none"))
        assert none == (CALLED, [], "stop")


def test_an_answer_without_calls_is_content() -> None:
    with serving(obedient("It is < 5 degrees.")) as (client, _):
        expected = ("It is < 5 degrees.", [], "stop")
        assert whole(client.chat.completions.create(**ASKED)) == expected
        assert streamed(client.chat.completions.create(**ASKED, stream=True)) == expected


def test_a_call_that_is_required_is_of_the_tools_schema() -> None:
    engine = obedient()
    with serving(engine) as (client, _):
        expected = ("", [["weather", '{"city": "text", "days": 7}']], "tool_calls")
        assert whole(client.chat.completions.create(**ASKED, tool_choice="required")) == expected
        assert streamed(client.chat.completions.create(**ASKED, tool_choice="required", stream=True)) == expected
    grammar = engine.requests[0].grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]] == [["weather"], ["clock"]]
    assert schema["$defs"] == {"days": {"type": "integer"}}


def test_a_named_function_gets_its_arguments() -> None:
    engine = obedient()
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with serving(engine, tool_call_parser=None) as (client, _):
        expected = ("", [["weather", '{"city": "text", "days": 7}']], "stop")
        assert whole(client.chat.completions.create(**ASKED, tool_choice=choice)) == expected
        assert streamed(client.chat.completions.create(**ASKED, tool_choice=choice, stream=True)) == expected
    assert engine.requests[0].grammar == Grammar("json_schema", json.dumps(WEATHER["function"]["parameters"]))  # type: ignore[index]


def test_tools_and_their_answers_are_told_by_the_chat_template() -> None:
    engine = obedient("Cold.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    messages: Any = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"},
    ]
    with serving(engine) as (client, _):
        answer = client.chat.completions.create(**{**ASKED, "messages": messages})
    assert whole(answer)[0] == "Cold."
    prompt = CHATTING.decode(engine.requests[0].prompt)
    assert '"name": "weather"' in prompt.partition("</tools>")[0]
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in prompt
    assert "<tool>3 degrees(call_1)</tool><assistant>" in prompt


class Place(BaseModel):
    name: str
    population: int


def test_structured_output_of_the_official_client() -> None:
    engine = obedient()
    with serving(engine) as (client, _):
        messages: Any = [USER]
        parsed = client.chat.completions.parse(model=NAME, messages=messages, response_format=Place)
        assert parsed.choices[0].message.parsed == Place(name="text", population=7)
        client.chat.completions.create(model=NAME, messages=messages, response_format={"type": "json_object"})
    assert engine.requests[1].grammar == Grammar("json_schema", '{"type":"object"}')


def test_an_answer_of_a_schema_with_a_name_is_no_call_of_the_tool_that_it_would_be() -> None:
    with serving(obedient(), tool_call_parser="llama3_json") as (client, _):
        schema: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema()}}
        expected = ('{"name": "text", "population": 7}', [], "stop")
        assert whole(client.chat.completions.create(**ASKED, response_format=schema)) == expected
        assert streamed(client.chat.completions.create(**ASKED, response_format=schema, stream=True)) == expected


RULES: list[tuple[dict[str, Any], Grammar]] = [
    ({"guided_json": {"type": "integer"}}, Grammar("json_schema", '{"type": "integer"}')),
    ({"guided_json": '{"type": "integer"}'}, Grammar("json_schema", '{"type": "integer"}')),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["yes", "n.o"]}, Grammar("regex", r"yes|n\.o")),
    ({"guided_grammar": 'start: "x"'}, Grammar("lark", 'start: "x"')),
    ({"structured_outputs": {"json": {"type": "integer"}}}, Grammar("json_schema", '{"type": "integer"}')),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["(a)"]}}, Grammar("regex", r"\(a\)")),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, Grammar("lark", 'start: "x"')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", '{"type":"object"}')),
    ({"response_format": {"type": "text"}}, None),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("fields", "grammar"), RULES)
def test_rules_under_the_names_of_both_servers(fields: dict[str, Any], grammar: Grammar | None) -> None:
    engine, grammars = obedient("x"), CheckedGrammars()
    with TestClient(app_for(engine, grammars=grammars)) as client:
        for path, asked in (("/v1/completions", {"prompt": "x"}), (CHATS, {"messages": [USER]})):
            assert client.post(path, json={**asked, "max_tokens": 2, **fields}).status_code == 200
    assert [request.grammar for request in engine.requests] == [grammar] * 2
    assert grammars.compiled == [grammar] * 2 * (grammar is not None)


NAMED = {"type": "function", "function": {"name": "missing"}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"$defs": {"days": {"type": "string"}}}}}


NESTED = {"type": "object", "properties": {"parts": {"type": "array", "items": {"$ref": "#"}}}}
RECURSIVE = {"type": "function", "function": {"name": "tree", "parameters": NESTED}}


def undefined(definitions: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "undefined", "parameters": {"$defs": definitions}}}


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({"tools": [{**WEATHER, "cache": 1}]}, "tools.0.cache"),
    ({"tools": [WEATHER] * 129}, "tools"),
    ({"tools": [WEATHER, OTHER], "tool_choice": "required"}, "tools.1.function.parameters"),
    ({"tools": [undefined([1])], "tool_choice": "required"}, "tools.0.function.parameters.$defs"),
    ({"tools": [WEATHER, undefined("x")], "tool_choice": "required"}, "tools.1.function.parameters.$defs"),
    ({"tools": [WEATHER, RECURSIVE], "tool_choice": "required"}, "tools.1.function.parameters"),
    ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, "messages.0.tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages.0.tool_call_id"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"guided_regex": "("}, None),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_is_wrong_with_tools_is_named(fields: dict[str, Any], param: str | None) -> None:
    app = create_app(obedient("x"), CHATTING, NAME, grammars=CheckedGrammars(), max_model_len=CONTEXT)
    with TestClient(app) as client:
        answer = client.post(CHATS, json={"messages": [USER], **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_what_the_server_was_not_set_up_for_is_refused_in_words() -> None:
    with TestClient(create_app(FakeEngine(), CHATTING, NAME, max_model_len=CONTEXT)) as client:
        automatic = client.post(CHATS, json={"messages": [USER], "tools": [CLOCK]}).json()["error"]
        assert "--tool-call-parser" in automatic["message"]
        off = client.post(CHATS, json={"messages": [USER], "guided_regex": "a"}).json()["error"]
        assert "structured output" in off["message"]
    with TestClient(app_for(FakeEngine(), tool_call_parser="hermes")) as client:
        for fields in ({"tools": [CLOCK]}, {"chat_template_kwargs": {"a": 1}}):
            answer = client.post(CHATS, json={"messages": [USER], **fields}).json()["error"]
            assert "chat template" in answer["message"]


def test_the_prompt_as_it_is_asked_for() -> None:
    engine = obedient("x")
    with TestClient(create_app(engine, CHATTING, NAME, max_model_len=CONTEXT)) as client:
        messages = [USER, {"role": "assistant", "content": "It is"}]
        for fields in (
            {"chat_template_kwargs": {"mood": "merry"}},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
        ):
            assert client.post(CHATS, json={"messages": messages, **fields}).status_code == 200
    ends = [CHATTING.decode(request.prompt).rpartition("It is")[2] for request in engine.requests]
    assert ends == ["</assistant><assistant>merry", "</assistant>", ""]


def test_calls_with_half_of_a_surrogate_pair_are_told() -> None:
    with serving(obedient('[weather(city="\\ud83d")]'), tool_call_parser="pythonic") as (client, _):
        expected = ("", [["weather", '{"city": "\ufffd"}']], "tool_calls")
        assert whole(client.chat.completions.create(**ASKED)) == expected
        assert streamed(client.chat.completions.create(**ASKED, stream=True)) == expected


@pytest.mark.parametrize("path", [CHATS, "/v1/responses"])
def test_a_stream_that_fails_unexpectedly_ends_in_an_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a fault of the server")

    for form in (ChatFormat.choices, ResponsesFormat.events):
        monkeypatch.setattr(f"{form.__module__}.{form.__qualname__}", broken)
    with TestClient(app_for(FakeEngine())) as client:
        answer = client.post(path, json={"messages" if path == CHATS else "input": [USER], "stream": True})
    assert answer.status_code == 200
    last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
    assert "its log has more" in last
    assert answer.text.endswith("data: [DONE]\n\n" if path == CHATS else f"{last}\n\n")
