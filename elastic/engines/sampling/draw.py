"""Draws from the distributions that temperature, `min_p`, `top_k` and `top_p` leave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from elastic.engines.base import Sampling
from elastic.engines.sampling.random_numbers import exponentials
from elastic.engines.sampling.state import SamplingState

_CACHED = 1 << 17
"""Scores that a CPU computes at once: more leave its caches between two passes over them."""
_COLDEST, _HOTTEST = 1e-6, 1e30  # scores in float32 become neither endless nor NaN by them


def draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Draw a token for each row of logits [rows, vocabulary]: that of the highest probability over a random number.

    The numbers are exponentially distributed, one for each token (the exponential form of Gumbel's trick). So what
    another device or batch rounds differently changes a token only where two are as close as that, unlike in a
    cumulative sum, all of whose bounds move. Tokens exactly as likely as the last of `top_k` or `top_p` are in too. A
    row without a distribution (NaN, or nothing allowed) gets the token behind the vocabulary's last.
    """
    at_once = len(states) if logits.is_cuda else max(1, _CACHED // logits.shape[-1])
    tokens = []
    for start in range(0, len(states), at_once):
        stop = start + at_once
        tokens += _draw(logits[start:stop], states[start:stop])
    return tokens


def _draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    rules = [state.rule for state in states]
    if any(rule.temperature != 1 for rule in rules):
        logits = logits / _column([min(max(rule.temperature, _COLDEST), _HOTTEST) for rule in rules], logits)
    probabilities = torch.softmax(logits, -1)
    if any(rule.min_p or rule.top_k or rule.top_p < 1 for rule in rules):
        probabilities = probabilities * (probabilities >= _least_probabilities(probabilities, rules))
    keys, positions = [state.key for state in states], [state.position for state in states]
    numbers = exponentials(keys, positions, logits.shape[-1], logits.device)
    highest, chosen = torch.div(probabilities, numbers, out=numbers).max(-1)
    tokens: list[int] = torch.where(highest > 0, chosen, logits.shape[-1]).tolist()
    return tokens


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Make [rows, 1] of a number for each row."""
    return torch.from_numpy(np.array(values, np.float32)[:, None]).to(like.device)


def _least_probabilities(probabilities: torch.Tensor, rules: Sequence[Sampling]) -> torch.Tensor:
    """Return the least probability [rows, 1] that a token of each row may have.

    probabilities: float32 [rows, vocabulary], after temperature.
    """
    vocabulary = probabilities.shape[-1]
    least = _column([rule.min_p for rule in rules], probabilities) * probabilities.amax(-1, keepdim=True)
    ranked = [row for row, rule in enumerate(rules) if rule.top_k and rule.top_k < vocabulary]
    others = [row for row, rule in enumerate(rules) if rule.top_p < 1 and row not in ranked]
    for limit, rows in ((_of_top_k, ranked), (_of_top_p, others)):
        if len(rows) == len(rules):
            least = limit(probabilities, rules, least)
        elif rows:
            least[rows] = limit(probabilities[rows], [rules[row] for row in rows], least[rows])
    return least


def _of_top_k(probabilities: torch.Tensor, rules: Sequence[Sampling], least: torch.Tensor) -> torch.Tensor:
    """Raise the least probabilities [rows, 1] by `top_k`, and by `top_p` of what that leaves."""
    ranks = torch.tensor([[rule.top_k or 1] for rule in rules], device=least.device)
    highest = probabilities.topk(max(rule.top_k or 1 for rule in rules), -1).values
    least = torch.maximum(least, highest.gather(-1, ranks - 1))
    if all(rule.top_p == 1 for rule in rules):
        return least
    kept = (torch.arange(highest.shape[-1], device=least.device) < ranks) & (highest >= least)
    weights = highest.double() * kept
    return _share(highest, weights, weights.sum(-1, keepdim=True), rules, least)


def _of_top_p(probabilities: torch.Tensor, rules: Sequence[Sampling], least: torch.Tensor) -> torch.Tensor:
    """Raise the least probabilities [rows, 1] by `top_p` alone.

    Only what is likely enough is sorted: all tokens below a share of (1 - top_p) / vocabulary have less than
    1 - top_p together, so none of them stays.
    """
    left = (probabilities * (probabilities >= least)).sum(-1, keepdim=True, dtype=torch.float64)
    rest = torch.tensor([[1 - rule.top_p] for rule in rules], dtype=torch.float64, device=least.device)
    level = torch.maximum(least, (rest * left / probabilities.shape[-1] / 2).float())
    candidates = int((probabilities >= level).sum(-1).max())
    highest = probabilities.topk(max(candidates, 1), -1).values
    return _share(highest, highest.double() * (highest >= least), left, rules, least)


def _share(
    highest: torch.Tensor, weights: torch.Tensor, left: torch.Tensor, rules: Sequence[Sampling], least: torch.Tensor
) -> torch.Tensor:
    """Raise the least probabilities [rows, 1] so that the fewest tokens with `top_p` of what is left stay.

    highest: [rows, some], descending; weights: float64, the same, 0 for what is limited already; left: [rows, 1].
    """
    shares = torch.tensor([[rule.top_p] for rule in rules], dtype=torch.float64, device=least.device)
    before = weights.cumsum(-1) - weights
    stay = ((before < shares * left) | (shares == 1)).sum(-1, keepdim=True).clamp_(min=1)
    return torch.maximum(least, highest.gather(-1, stay - 1))
