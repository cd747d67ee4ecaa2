"""One batch: logits in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.engines.base import SampledToken
from elastic.engines.sampling.adjust import adjust
from elastic.engines.sampling.draw import draw
from elastic.engines.sampling.logprobs import token_logprobs
from elastic.engines.sampling.state import SamplingState


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """Choose the next token of each answer; `SamplingState.append` takes it.

    logits: float32 [answers, vocabulary]; they are changed in place. In this order: bias, penalties, `min_tokens`,
    grammar; temperature, `min_p`, `top_k`, `top_p`. An answer's token does not depend on the others of the batch.
    Raises `FloatingPointError` when a distribution to draw from is none.
    """
    reported = [row for row, state in enumerate(states) if state.request.logprobs is not None]
    raw = logits[reported] if reported else logits
    adjust(logits, states)
    tokens = _choose(logits, states)
    if not reported:
        return [SampledToken(token) for token in tokens]
    counts = [states[row].request.logprobs or 0 for row in reported]
    logprobs = dict(zip(reported, token_logprobs(raw, [tokens[row] for row in reported], counts), strict=True))
    return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def _choose(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Take the likeliest token of greedy answers, and draw the others."""
    drawn = [row for row, state in enumerate(states) if state.rule.temperature > 0]
    if len(drawn) == len(states):
        return draw(logits, states)
    tokens: list[int] = logits.argmax(-1).tolist()
    if drawn:
        for row, token in zip(drawn, draw(logits[drawn], [states[row] for row in drawn]), strict=True):
            tokens[row] = token
    return tokens
