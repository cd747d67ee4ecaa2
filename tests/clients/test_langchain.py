"""LangChain's chat model of OpenAI, against a server with scripted answers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from support.serving.live_server import NAME
from support.serving.tool_calls import CALLED, CHATTING, CLOCK, WEATHER, obedient, serving

langchain_openai = pytest.importorskip("langchain_openai")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Place(BaseModel):
    """A place."""

    name: str
    population: int


def chat(url: str, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(model=NAME, base_url=f"{url}/v1", api_key="none", temperature=0, **options)


def test_an_answer_whole_and_in_a_stream() -> None:
    with serving(obedient("Hello there.")) as (_, server):
        model = chat(server.url)
        whole = model.invoke("Say hello.")
        assert (whole.content, whole.response_metadata["finish_reason"]) == ("Hello there.", "stop")
        assert whole.usage_metadata["input_tokens"] > 0
        assert "".join(chunk.content for chunk in model.stream("Say hello.")) == "Hello there."


def test_bound_tools_are_called() -> None:
    expected = [("weather", {"city": "Oslo"}), ("clock", {})]
    with serving(obedient(CALLED)) as (_, server):
        model = chat(server.url).bind_tools([WEATHER, CLOCK])
        answer = model.invoke("How is the weather?")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == expected
        summed = None
        for chunk in model.stream("How is the weather?"):
            summed = chunk if summed is None else summed + chunk
        assert summed is not None
        assert [(call["name"], call["args"]) for call in summed.tool_calls] == expected


def test_the_answer_of_a_tool_goes_back() -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    engine = obedient("Cold.")
    call = {"name": "weather", "args": {"city": "Oslo"}, "id": "call_1"}
    messages = [HumanMessage("Weather?"), AIMessage("", tool_calls=[call]), ToolMessage("3", tool_call_id="call_1")]
    with serving(engine) as (_, server):
        assert chat(server.url).bind_tools([WEATHER]).invoke(messages).content == "Cold."
    assert "<tool>3(call_1)</tool>" in CHATTING.decode(engine.requests[0].prompt)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method: str) -> None:
    with serving(obedient()) as (_, server):
        model = chat(server.url).with_structured_output(Place, method=method)
        assert model.invoke("Where?") == Place(name="text", population=7)


def test_a_choice_of_tools() -> None:
    with serving(obedient()) as (_, server):
        for choice, name in (("required", "weather"), ("clock", "clock")):
            model = chat(server.url).bind_tools([WEATHER, CLOCK], tool_choice=choice)
            assert [call["name"] for call in model.invoke("x").tool_calls] == [name]


def test_responses() -> None:
    with serving(obedient(CALLED)) as (_, server):
        model = chat(server.url, use_responses_api=True).bind_tools([WEATHER, CLOCK])
        answer = model.invoke("How is the weather?")
        assert [call["name"] for call in answer.tool_calls] == ["weather", "clock"]
        assert answer.text.strip() == "Let me see."
