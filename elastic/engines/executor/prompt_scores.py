"""Log-probabilities of the tokens of prompts, which are computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic.engines.base import Request, TokenLogprobs
from elastic.engines.core.step import ScheduledChunk
from elastic.engines.sampling import token_logprobs


@dataclass
class ScoredPrompt:
    """A prompt that is being computed, and the log-probabilities of whose tokens were asked for."""

    request: Request
    last: torch.Tensor | None = None
    """[vocabulary]: logits behind the last token of the chunk before."""


def take_scores(
    prompts: dict[str, ScoredPrompt], chunks: Sequence[ScheduledChunk], logits: torch.Tensor
) -> dict[str, tuple[TokenLogprobs | None, ...]]:
    """Return the log-probabilities of the prompts' tokens in a step, by sequence; leave out prompts that end with it.

    logits: [kept, vocabulary] of the step, for the sequences of `prompts` those behind each of their tokens.
    """
    by_sequence: dict[str, tuple[TokenLogprobs | None, ...]] = {}
    stop = 0
    for chunk in chunks:
        prompt = prompts.get(chunk.sequence)
        start, stop = stop, stop + (len(chunk.tokens) if prompt else int(chunk.samples))
        if prompt is None:
            continue
        behind = logits[start:stop]
        before = behind[:-1] if prompt.last is None else torch.cat([prompt.last[None], behind[:-1]])
        targets = chunk.tokens[prompt.last is None :]
        count = prompt.request.prompt_logprobs or 0
        scores = token_logprobs(before, targets, [count] * len(targets))
        by_sequence[chunk.sequence] = tuple(scores) if prompt.last is not None else (None, *scores)
        prompt.last = behind[-1].clone()
        if chunk.start + len(chunk.tokens) >= len(prompt.request.prompt):
            prompts.pop(chunk.sequence, None)
    return by_sequence
