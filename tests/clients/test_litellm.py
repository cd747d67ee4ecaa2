"""LiteLLM, which takes the server for one of OpenAI's or for vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from support.serving.live_server import NAME
from support.serving.tool_calls import CALLED, CLOCK, WEATHER, obedient, serving

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it looks for a newer one far away
litellm = pytest.importorskip("litellm")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MESSAGES = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    with serving(obedient(CALLED)) as (_, server):
        yield {"model": f"{request.param}/{NAME}", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0}


def test_tools_are_called(options: dict[str, Any]) -> None:
    whole = litellm.completion(messages=MESSAGES, tools=[WEATHER, CLOCK], **options)
    calls = whole.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("clock", "{}"),
    ]
    chunks = list(litellm.completion(messages=MESSAGES, tools=[WEATHER, CLOCK], stream=True, **options))
    summed = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert [call.function.name for call in summed.choices[0].message.tool_calls] == ["weather", "clock"]


def test_answers_with_logprobs(options: dict[str, Any]) -> None:
    whole = litellm.completion(messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, max_tokens=4, **options)
    assert len(whole.choices) == 2
    assert all(len(choice.logprobs.content) == 4 for choice in whole.choices)
