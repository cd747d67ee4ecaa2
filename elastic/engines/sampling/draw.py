"""Draws from the distributions that temperature, `min_p`, `top_k` and `top_p` leave."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from elastic.engines.base import Sampling
from elastic.engines.sampling.random_numbers import uniforms
from elastic.engines.sampling.state import SamplingState

TOP_P_WINDOW = 1024
"""Among so many of the likeliest tokens those of `top_p` are looked for first."""
_COLDEST, _HOTTEST = 1e-37, 1e30  # of float32, so that no score becomes NaN


def draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Draw a token for each row of logits [rows, vocabulary], by the inverse of its cumulative distribution.

    Sums run in the order of token ids and in float64, so that the same token comes out on every device but where the
    random number is within rounding of a bound. Tokens exactly as likely as the last of `top_k` or `top_p` are in too.
    Raises `FloatingPointError` if a row has no distribution: NaN, or nothing allowed.
    """
    rules = [state.rule for state in states]
    temperatures = _column([min(max(rule.temperature, _COLDEST), _HOTTEST) for rule in rules], logits)
    scores = (logits - logits.amax(-1, keepdim=True)).div_(temperatures)
    weights = scores.exp()
    least = _least_scores(scores, rules)
    if least is not None:
        weights.masked_fill_(scores < least, 0.0)
    sums = weights.cumsum(-1, dtype=torch.float64)
    numbers = uniforms([state.key for state in states], [state.position for state in states])
    bounds = torch.from_numpy(numbers).to(logits.device)[:, None] * sums[:, -1:]
    tokens: list[int] = torch.searchsorted(sums, bounds, right=True).flatten().tolist()
    if max(tokens, default=0) >= logits.shape[-1]:
        raise FloatingPointError("logits have NaN, or no token is allowed: there is no distribution to draw from")
    return tokens


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Make [rows, 1] of a number for each row."""
    return torch.from_numpy(np.array(values, np.float32)[:, None]).to(like.device)


def _least_scores(scores: torch.Tensor, rules: Sequence[Sampling]) -> torch.Tensor | None:
    """Return the least score [rows, 1] that a token may have; None if all may come.

    scores: [rows, vocabulary], after temperature, the highest of each row 0.
    """
    vocabulary = scores.shape[-1]
    cut = [row for row, rule in enumerate(rules) if (rule.top_k or vocabulary) < vocabulary or rule.top_p < 1]
    if not cut and not any(rule.min_p for rule in rules):
        return None
    least = _column([math.log(rule.min_p) if rule.min_p else -math.inf for rule in rules], scores)
    if len(cut) == len(rules):
        return _cut(scores, rules, least)
    if cut:
        least[cut] = _cut(scores[cut], [rules[row] for row in cut], least[cut])
    return least


def _cut(scores: torch.Tensor, rules: Sequence[Sampling], least: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Raise the least scores [rows, 1] by `top_k`, then by `top_p` of what is left.

    `top_p` looks at a window of the likeliest tokens, and at all where that does not have enough of the probability.
    """
    vocabulary = scores.shape[-1]
    ranks = [min(rule.top_k or vocabulary, vocabulary) for rule in rules]
    needed = max(rank if rank < vocabulary else TOP_P_WINDOW for rank in ranks)
    window = min(max(window, needed), vocabulary)
    top = scores.topk(window, -1).values
    last = torch.tensor([min(rank, window) - 1 for rank in ranks], device=scores.device)[:, None]
    limited = torch.tensor([rank < vocabulary for rank in ranks], device=scores.device)[:, None]
    least = torch.where(limited, torch.maximum(least, top.gather(-1, last)), least)
    if all(rule.top_p == 1 for rule in rules):
        return least
    shares = _column([rule.top_p if rule.top_p < 1 else math.inf for rule in rules], scores).double()
    weights = top.double().exp().masked_fill_(top < least, 0.0)
    total = scores.double().exp().masked_fill_(scores < least, 0.0).sum(-1, keepdim=True)
    kept = weights.cumsum(-1) - weights < shares * total
    if window < vocabulary and bool((kept[:, -1:] & (top[:, -1:] > least) & shares.isfinite()).any()):
        return _cut(scores, rules, least, vocabulary)
    return torch.maximum(least, top.gather(-1, kept.sum(-1, keepdim=True) - 1))
