"""What a vocabulary has not is refused before it is an index on a device."""

from __future__ import annotations

import pytest

from elastic.engines.base import Request, Sampling
from elastic.engines.sampling.limits import require_valid, require_vocabulary
from elastic.errors import ConfigError


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request((1,), 1, Sampling(logit_bias=((3, 1.0), (10, 1.0)))), "logit_bias=10"),
        (Request((1,), 1, logprobs=11), "logprobs=11"),
        (Request((1,), 1, logprobs=-1), "logprobs=-1"),
        (Request((1,), 1, prompt_logprobs=11), "prompt_logprobs=11"),
    ],
)
def test_what_the_vocabulary_has_not_is_refused(request_: Request, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        require_vocabulary(request_, 10)


def test_what_it_has_is_allowed() -> None:
    bias = ((0, 1.0), (9, 1.0))
    require_vocabulary(Request((1,), 1, Sampling(logit_bias=bias), logprobs=10, prompt_logprobs=0), 10)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request((), 1), "prompt"),
        (Request((1,), 0), "max_tokens=0"),
        (Request((1,), 1, n=0), "n=0"),
        (Request((1,), 1, n=513), "n=513 cannot be; it must be at least 1, at most 512"),
        (Request((1,), 1, min_tokens=2), "min_tokens=2"),
        (Request((1, 100, -1), 1), "token 100"),
        (Request((-1,), 1), "token -1"),
        (Request((1,) * 30, 3), "more than the 32"),
        (Request((1,), 1, Sampling(logit_bias=((100, 1.0),))), "logit_bias"),
    ],
)
def test_what_no_engine_takes_is_refused_in_words(request_: Request, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_valid(request_, 100, 32)
    require_valid(Request((0, 99), 30), 100, 32)
