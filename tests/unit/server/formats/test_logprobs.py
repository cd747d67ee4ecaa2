"""Log-probabilities as JSON: whatever the model gave."""

from __future__ import annotations

import math

import pytest

from elastic.engines.base import TokenLogprobs
from elastic.server.formats.logprobs import LEAST, LogprobsFormat
from elastic.server.generation.response_stream import ReadToken
from elastic.server.generation.token_text import TokenTexts
from elastic.server.routes.event_stream import encoded
from support.serving.live_server import TOKENIZER


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_what_is_no_number_in_json_is_the_least(logprob: float) -> None:
    form = LogprobsFormat(TokenTexts(TOKENIZER), as_ids=True)
    entry = TokenLogprobs(5, logprob, 1, ((6, logprob),))
    (told,) = form.chat([ReadToken(5, 0, entry)])
    assert [told["logprob"], told["top_logprobs"][0]["logprob"]] == [LEAST] * 2
    assert not {b"NaN", b"Infinity"} & set(encoded(form.prompt([entry])).replace(b",", b":").split(b":"))
