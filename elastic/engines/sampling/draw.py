"""Draws from the distributions that temperature, `min_p`, `top_k` and `top_p` leave."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import isfinite
from typing import Any

import numpy as np
import torch

from elastic.engines.base import Sampling
from elastic.engines.sampling.random_numbers import exponentials
from elastic.engines.sampling.state import SamplingState

_CACHED = 1 << 17
"""Scores that a CPU computes at once: more leave its caches between two passes over them."""
_FEW = 16
"""One token of so many, or fewer, are looked at one by one."""
_LIKELY_PARTS = (2**8, 2**12)
"""Tokens with such a part of what `top_p` cuts away are tried first."""
_COLDEST, _HOTTEST = 1e-6, 1e30  # scores in float32 become neither endless nor NaN by them


def draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Draw a token for each row of logits [rows, vocabulary]: that of the highest probability over a random number.

    The numbers are exponentially distributed, one for each token (the exponential form of Gumbel's trick). So what
    another device or batch rounds differently changes a token only where two are as close as that, unlike in a
    cumulative sum, all of whose bounds move. Tokens exactly as likely as the last of `top_k` or `top_p` are in too. A
    row without a distribution (NaN, or nothing allowed) gets the token behind the vocabulary's last.
    """
    limited = [row for row, state in enumerate(states) if _is_limited(state.rule)]
    free = [row for row, state in enumerate(states) if not _is_limited(state.rule)]
    if limited and free:  # limits leave few tokens, each of which is then looked at by itself
        apart = [zip(rows, draw(logits[rows], [states[row] for row in rows]), strict=True) for rows in (limited, free)]
        return [token for _, token in sorted(chain(*apart))]
    at_once = len(states) if logits.is_cuda else max(1, _CACHED // logits.shape[-1])
    parts = [slice(start, start + at_once) for start in range(0, len(states), at_once)]
    return [token for part in parts for token in _draw(logits[part], states[part])]


def greedy(logits: torch.Tensor) -> list[int]:
    """Return the likeliest token of each row of logits [rows, vocabulary], the first of several.

    A row without a distribution (NaN, or nothing allowed) gets the token behind the vocabulary's last.
    """
    tokens = argmax(logits)
    scores = _array(logits)[range(len(tokens)), tokens].tolist()
    return [token if isfinite(score) else logits.shape[-1] for token, score in zip(tokens, scores, strict=True)]


def argmax(scores: torch.Tensor) -> list[int]:
    """Return the first of the highest scores of each row of [rows, vocabulary], or the first that is NaN."""
    tokens: list[int] = _array(scores).argmax(-1).tolist()
    return tokens


def _array(scores: torch.Tensor) -> Any:
    """Return scores for what NumPy does in a tenth of torch's time; those of a GPU as they are."""
    return scores.numpy() if scores.device.type == "cpu" else scores


def _is_limited(rule: Sampling) -> bool:
    return bool(rule.min_p or rule.top_k or rule.top_p < 1)


def _draw(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Draw for rows all of which, or none, are limited."""
    rules, vocabulary = [state.rule for state in states], logits.shape[-1]
    if any(rule.temperature != 1 for rule in rules):
        logits = logits / _column([min(max(rule.temperature, _COLDEST), _HOTTEST) for rule in rules], logits)
    probabilities = torch.softmax(logits, -1)
    if _is_limited(rules[0]):
        stay = probabilities >= _least_probabilities(probabilities, rules)
        rows, tokens = stay.nonzero(as_tuple=True)
        if len(tokens) * _FEW < probabilities.numel():
            return _draw_from(rows, tokens, probabilities, states)
        probabilities = probabilities * stay
    numbers = _numbers(states, torch.arange(vocabulary, device=logits.device))
    quotients = torch.div(probabilities, numbers, out=numbers)
    drawn = argmax(quotients)
    likely = (quotients[range(len(drawn)), drawn] > 0).tolist()
    return [token if is_likely else vocabulary for token, is_likely in zip(drawn, likely, strict=True)]


def _draw_from(
    rows: torch.Tensor, tokens: torch.Tensor, probabilities: torch.Tensor, states: Sequence[SamplingState]
) -> list[int]:
    """Draw from some tokens alone: each of `tokens` in its row of `rows`, both [count]."""
    vocabulary = probabilities.shape[-1]
    quotients = probabilities[rows, tokens] / _numbers(states, tokens, rows)
    best = quotients.new_zeros(len(states)).scatter_reduce_(0, rows, quotients, "amax")
    chosen = torch.where((quotients == best[rows]) & (quotients > 0), tokens, vocabulary)
    first = torch.full((len(states),), vocabulary, device=tokens.device).scatter_reduce_(0, rows, chosen, "amin")
    drawn: list[int] = first.tolist()
    return drawn


def _numbers(states: Sequence[SamplingState], tokens: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    return exponentials([state.key for state in states], [state.position for state in states], tokens, rows)


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
    1 - top_p together, so none of them stays. Mostly far fewer have as much as stays, which is looked at first.
    """
    left = (probabilities * (probabilities >= least)).sum(-1, keepdim=True, dtype=torch.float64)
    rest = torch.tensor([[1 - rule.top_p] for rule in rules], dtype=torch.float64, device=least.device)
    for parts in (*_LIKELY_PARTS, 2 * probabilities.shape[-1]):
        likely = probabilities >= torch.maximum(least, (rest * left / parts).float())
        if bool(((probabilities * likely).sum(-1, keepdim=True, dtype=torch.float64) > (1 - rest) * left).all()):
            break
    candidates = int(likely.sum(-1).max())
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
