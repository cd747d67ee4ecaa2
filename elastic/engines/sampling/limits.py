"""What a request may ask of a model."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.engines.base import MOST_ANSWERS, Request
from elastic.errors import ConfigError, require


def require_valid(request: Request, vocabulary: int, longest: int | None) -> None:
    """Raise `ConfigError` for a request that no engine of such a model takes.

    `vocabulary` is the number of its tokens, `longest` the most of prompt and answer together.
    """
    require(isinstance(request, Request), "request", request, "an elastic.Request")
    if not request.prompt:
        raise ConfigError("prompt: it has no token; give at least one")
    require(request.max_tokens >= 1, "max_tokens", request.max_tokens, "at least 1")
    require(1 <= request.n <= MOST_ANSWERS, "n", request.n, f"at least 1, at most {MOST_ANSWERS}")
    allowed = f"from 0 to max_tokens={request.max_tokens}"
    require(0 <= request.min_tokens <= request.max_tokens, "min_tokens", request.min_tokens, allowed)
    require_tokens("prompt", request.prompt, vocabulary)
    require_vocabulary(request, vocabulary)
    if longest and len(request.prompt) + request.max_tokens > longest:
        raise ConfigError(
            f"the prompt has {len(request.prompt)} tokens; with max_tokens={request.max_tokens} that is more than "
            f"the {longest} of its context (with longrope: of the original one; use generate for more)"
        )


def require_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raise `ConfigError` for token ids that a vocabulary of this size has not."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary):
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ConfigError(f"{name}: token {wrong} is none of the model's; they are 0 to {vocabulary - 1}")


def require_vocabulary(request: Request, vocabulary: int) -> None:
    """Raise `ConfigError` for token ids and numbers of tokens that a vocabulary of this size has not.

    On a device an index out of range ends the whole batch, so it is refused before.
    """
    allowed = f"of token ids below {vocabulary}, the size of the model's vocabulary"
    for token, _ in request.sampling.logit_bias:
        require(token < vocabulary, "logit_bias", token, allowed)
    for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        require(count is None or 0 <= count <= vocabulary, name, count, f"from 0 to {vocabulary}, or None")
