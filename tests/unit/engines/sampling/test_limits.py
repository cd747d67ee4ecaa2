"""What a vocabulary has not is refused before it is an index on a device."""

from __future__ import annotations

import pytest

from elastic.engines.base import Request, Sampling
from elastic.engines.sampling.limits import require_vocabulary
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
