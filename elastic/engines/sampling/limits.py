"""What a request may ask of a vocabulary."""

from __future__ import annotations

from elastic.config import require
from elastic.engines.base import Request


def require_vocabulary(request: Request, vocabulary: int) -> None:
    """Raise `ConfigError` for token ids and numbers of tokens that a vocabulary of this size has not.

    On a device an index out of range ends the whole batch, so it is refused before.
    """
    allowed = f"of token ids below {vocabulary}, the size of the model's vocabulary"
    for token, _ in request.sampling.logit_bias:
        require(token < vocabulary, "logit_bias", token, allowed)
    for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        require(count is None or 0 <= count <= vocabulary, name, count, f"from 0 to {vocabulary}, or None")
