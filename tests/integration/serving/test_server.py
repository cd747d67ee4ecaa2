"""What clients ask of the server, answered by the embedded engine and a model: reports, several answers, formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

import elastic
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.structured import LlguidanceCompiler
from support.serving.live_server import NAME, TOKENIZER, live, model
from support.serving.tool_calls import CHATTING, CLOCK, WEATHER

LAYERS = 12
"""All of the model: what it writes by a grammar has an end."""
PROMPT = "def read(path):"
MESSAGES: Any = [{"role": "user", "content": "x"}]


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    elastic.wrap(model(LAYERS), places=[elastic.Place("cpu", torch.device("cpu"), 64 << 20, page_bytes=4096)])
    grammars = LlguidanceCompiler(TOKENIZER)
    engine = ContinuousEngine(model(LAYERS), grammars=grammars)
    try:
        with (
            live(engine, tokenizer=CHATTING, grammars=grammars) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found,
        ):
            yield found
    finally:
        engine.stop(drain=False)
        elastic.unwrap(model(LAYERS))


@torch.no_grad()
def logprobs_of(ids: list[int]) -> torch.Tensor:
    """The model's log-probability of each token but the first, [tokens - 1]."""
    scores = model(LAYERS)(torch.tensor([ids])).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_echoed_logprobs_are_the_models(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2, "echo": True}
    got = client.completions.create(**asked, extra_body={"return_token_ids": True})
    choice = got.choices[0]
    assert choice.logprobs is not None
    told = choice.logprobs.token_logprobs
    assert told is not None
    assert told[0] is None
    ids = [*TOKENIZER.encode(PROMPT), *choice.token_ids]  # type: ignore[attr-defined]
    expected = logprobs_of(ids)
    assert torch.allclose(torch.tensor(told[1:]), expected, atol=1e-4)
    assert choice.text.startswith(PROMPT)


def test_several_answers_are_different_and_of_one_prompt(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 20, "temperature": 1, "seed": 5, "n": 4}
    got = client.completions.create(**asked)
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(TOKENIZER.encode(PROMPT))
    assert len({choice.text for choice in got.choices}) > 1
    again = client.completions.create(**asked, stop=["\n"])
    firsts = [choice.text.partition("\n")[0] for choice in got.choices]
    assert [choice.text for choice in again.choices] == firsts
    best = client.completions.create(**{**asked, "n": 1}, best_of=4)
    assert best.choices[0].text in {choice.text for choice in got.choices}


def test_structured_output_parses(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 200, "response_format": form, "seed": 3}
        if stream:
            chunks = list(client.chat.completions.create(**asked, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            text = client.chat.completions.create(**asked).choices[0].message.content or ""
        assert set(json.loads(text)) == {"a"}
    chosen = client.completions.create(
        model=NAME, prompt="x", max_tokens=50, extra_body={"guided_choice": ["yes (sure)", "n.o"]}
    )
    assert chosen.choices[0].text in ("yes (sure)", "n.o")


def test_required_calls_are_of_the_tools(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    tools: Any = [WEATHER, CLOCK]
    got = client.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=tools, tool_choice={"type": "function", "function": {"name": "clock"}}
    )
    calls = got.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ["clock"]  # type: ignore[union-attr]
    assert isinstance(json.loads(calls[0].function.arguments), dict)  # type: ignore[union-attr]
    required = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        tools=[CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,  # type: ignore[list-item]
    )
    (call,) = required.choices[0].message.tool_calls or []
    assert call.function.name == "clock"  # type: ignore[union-attr]


def test_a_grammar_that_makes_none_is_refused(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=NAME, prompt="x", extra_body={"guided_regex": "("})
    assert client.completions.create(model=NAME, prompt="x", max_tokens=1).choices
