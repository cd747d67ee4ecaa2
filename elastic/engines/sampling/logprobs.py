"""Log-probabilities of tokens as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.engines.base import TokenLogprobs


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of one token for each row of logits [rows, vocabulary], float32.

    `counts`: of how many of the likeliest tokens each is to tell too.
    """
    normalizer = logits.logsumexp(-1, keepdim=True)
    scores = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    own = (scores - normalizer).flatten().tolist()
    ranks = (logits >= scores).sum(-1).tolist()
    values, ids = logits.topk(max(counts, default=0), -1)
    top = zip(ids.tolist(), (values - normalizer).tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(likeliest[:count], their[:count], strict=True)))
        for token, logprob, rank, count, (likeliest, their) in zip(tokens, own, ranks, counts, top, strict=True)
    ]
