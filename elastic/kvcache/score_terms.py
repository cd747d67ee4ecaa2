"""Attention by scores that are more than scaled dot products: capped softly (Gemma 2), or beside sinks (gpt-oss)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic.memory.copy_engine import to_device


@dataclass(frozen=True)
class ScoreTerms:
    """What the attention of a layer does with its scores, beside scaling and masking them."""

    softcap: float | None = None
    """Scores come to lie between minus this and this, by the hyperbolic tangent; None: they are not capped."""
    sinks: torch.Tensor | None = None
    """[heads], of any floating dtype: a score of each query head that has no value, so that weights add up to less
    than one; None: there are none."""

    def of_heads(self, heads: slice | torch.Tensor, device: torch.device | None = None) -> ScoreTerms:
        """Return those of some query heads: a slice of them, or indices, int64 [heads].

        `device` is where they go; None: they stay.
        """
        if self.sinks is None:
            return self
        sinks = self.sinks[heads]
        return ScoreTerms(self.softcap, sinks if device is None else to_device(sinks, device))


def attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    terms: ScoreTerms,
) -> torch.Tensor:
    """Attend as `eager` functions do: all scores are made, and their softmax is taken in float32 or what is wider.

    query: [batch, heads, q, dim], key and value: [batch, kv_heads, k, dim]. mask: [batch or 1, 1, q or 1, k], added to
    the scores; [q, k], boolean: whether tokens are seen; None: query i sees the first i + 1 keys. Returns [batch,
    heads, q, dim], of the query's dtype.
    """
    batch, heads, new, dim = query.shape
    kv_heads, tokens = key.shape[1:3]
    packed = query.reshape(batch, kv_heads, -1, dim)  # the heads of one KV head, one behind another
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (packed @ key.mT).to(wide).view(batch, heads, new, tokens).mul_(scaling or dim**-0.5)
    if terms.softcap is not None:
        scores.div_(terms.softcap).tanh_().mul_(terms.softcap)
    if mask is None:
        mask = torch.ones(new, tokens, dtype=torch.bool, device=query.device).tril_()
    scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    if terms.sinks is not None:
        sinks = terms.sinks.to(wide)[:, None, None].expand(batch, heads, new, 1)
        scores = torch.cat([scores, sinks], -1)
    scores = scores.softmax(-1)  # those before are free from here on
    weights = scores[..., :tokens].to(query.dtype)
    return (weights.reshape(batch, kv_heads, -1, tokens) @ value).view(batch, heads, new, -1)
