"""The next token of each request, by its own rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.engines.base import Sampling


def random_source(rule: Sampling, device: torch.device) -> torch.Generator | None:
    """Make the generator of a request: its seed's numbers, or others each time; None for a greedy one."""
    if rule.temperature <= 0:
        return None
    source = torch.Generator(device)
    if rule.seed is None:
        source.seed()  # without it every generator begins with the same numbers
    else:
        source.manual_seed(rule.seed)
    return source


def choose(
    logits: torch.Tensor, rules: Sequence[Sampling], generators: Sequence[torch.Generator | None]
) -> torch.Tensor:
    """Choose token ids [requests], int64, from logits [requests, vocabulary], float32.

    A generator is for a request that samples.
    """
    tokens = logits.argmax(-1)
    for i, (rule, generator) in enumerate(zip(rules, generators, strict=True)):
        if rule.temperature > 0:
            tokens[i] = _sample(logits[i], rule, generator)
    return tokens


def _sample(logits: torch.Tensor, rule: Sampling, generator: torch.Generator | None) -> torch.Tensor:
    """Temperature, then the likeliest `top_k`, then the fewest that have `top_p` of the probability together."""
    logits = logits / rule.temperature
    if rule.top_k is not None and rule.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(rule.top_k).values[-1], -torch.inf)
    probabilities = torch.softmax(logits, -1)
    if rule.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        kept = ordered.cumsum(0) - ordered < rule.top_p
        probabilities = torch.zeros_like(probabilities).scatter(0, order[kept], ordered[kept])
    return torch.multinomial(probabilities, 1, generator=generator)[0]
