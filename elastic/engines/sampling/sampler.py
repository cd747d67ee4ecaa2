"""One batch: logits in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.engines.base import SampledToken
from elastic.engines.sampling.adjust import adjust
from elastic.engines.sampling.draw import draw, greedy
from elastic.engines.sampling.logprobs import token_logprobs
from elastic.engines.sampling.state import SamplingState

NO_DISTRIBUTION = "no token can be drawn: the model's logits have NaN, or bias, grammar and limits leave none"


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """Choose the next token of each answer; `SamplingState.append` takes it.

    logits: float32 [answers, vocabulary]; they are changed in place. In this order: bias, penalties, `min_tokens`,
    grammar; temperature, `min_p`, `top_k`, `top_p`. An answer's token does not depend on the others of the batch. An
    answer without a token gets an `error`: its grammar cannot be followed, or its probabilities are no numbers.
    """
    reported = [row for row, state in enumerate(states) if state.request.logprobs is not None]
    raw = logits[reported] if reported else None
    errors = adjust(logits, states)
    tokens = _choose(logits, states)
    for row, token in enumerate(tokens):
        if token == logits.shape[-1]:
            errors.setdefault(row, NO_DISTRIBUTION)
    if errors:
        tokens = [0 if row in errors else token for row, token in enumerate(tokens)]
    if raw is None:
        return [SampledToken(token, None, errors.get(row)) for row, token in enumerate(tokens)]
    counts = [states[row].request.logprobs or 0 for row in reported]
    logprobs = dict(zip(reported, token_logprobs(raw, [tokens[row] for row in reported], counts), strict=True))
    return [SampledToken(token, logprobs.get(row), errors.get(row)) for row, token in enumerate(tokens)]


def _choose(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Take the likeliest token of greedy answers, and draw the others."""
    drawn = [row for row, state in enumerate(states) if state.rule.temperature > 0]
    if len(drawn) == len(states):
        return draw(logits, states)
    tokens = greedy(logits)
    if drawn:
        for row, token in zip(drawn, draw(logits[drawn], [states[row] for row in drawn]), strict=True):
            tokens[row] = token
    return tokens
