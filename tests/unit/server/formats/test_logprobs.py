"""Log-probabilities as JSON: whatever the model gave."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.engines.base import TokenLogprobs
from elastic.server.formats.logprobs import LEAST, LogprobsFormat
from elastic.server.formats.responses import ResponsesFormat
from elastic.server.generation.response_stream import ReadToken, TextDelta
from elastic.server.generation.token_text import TokenTexts
from elastic.server.routes.event_stream import encoded
from elastic.server.tools.formats import TOOL_FORMATS
from support.serving.live_server import TOKENIZER


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_what_is_no_number_in_json_is_the_least(logprob: float) -> None:
    form = LogprobsFormat(TokenTexts(TOKENIZER), as_ids=True)
    entry = TokenLogprobs(5, logprob, 1, ((6, logprob),))
    (told,) = form.chat([ReadToken(5, 0, entry)])
    assert [told["logprob"], told["top_logprobs"][0]["logprob"]] == [LEAST] * 2
    assert not {b"NaN", b"Infinity"} & set(encoded(form.prompt([entry], 1)).replace(b",", b":").split(b":"))


def test_no_more_of_the_likeliest_are_told_than_were_asked_for() -> None:
    """The engine is asked once, for as many as the most of what asks for some."""
    form = LogprobsFormat(TokenTexts(TOKENIZER), as_ids=True)
    entry = TokenLogprobs(5, -9.0, 7, ((6, -1.0), (7, -2.0), (8, -3.0)))
    assert [sorted(told or ()) for told in form.prompt([entry], 1)] == [["5", "6"]]
    tops = form.completion([ReadToken(5, 0, entry)], top=2)["top_logprobs"]
    assert [sorted(told) for told in tops] == [["token_id:5", "token_id:6", "token_id:7"]]


def test_tokens_of_an_answer_without_text_are_reported() -> None:
    body: Any = SimpleNamespace(reports_logprobs=True, parallel_tool_calls=None)
    form = ResponsesFormat(body, "m", "1", TokenTexts(TOKENIZER))
    end = ReadToken(5, 0, TokenLogprobs(5, -1.0, 1, ()))
    events = form.events(TextDelta(0, "", "stop", tokens=(end,)))
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert (done["text"], len(done["logprobs"])) == ("", 1)


def test_tokens_that_may_have_been_a_calls_are_reported_with_the_text_that_they_are_of() -> None:
    body: Any = SimpleNamespace(reports_logprobs=True, parallel_tool_calls=None)
    form = ResponsesFormat(body, "m", "1", TokenTexts(TOKENIZER), TOOL_FORMATS["hermes"].make)
    tokens = [ReadToken(token, 0, TokenLogprobs(token, -1.0, 1, ())) for token in (5, 6, 7)]
    events = [
        event
        for text, token in zip(("<tool", "_box", "> it is"), tokens, strict=True)
        for event in form.events(TextDelta(0, text, tokens=(token,)))
    ]
    said = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in said) == "<tool_box> it is"
    assert sum(len(event["logprobs"]) for event in said) == 3
    (added,) = (event["part"] for event in events if event["type"] == "response.content_part.added")
    assert (added["text"], added["logprobs"]) == ("", [])
