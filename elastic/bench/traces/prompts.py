"""Prompts for a trace: token ids, seeded, as many as the trace says, another text for each request.

Traces have no prompts, only lengths. An engine that keeps caches of prefixes would find a replay of alike prompts easy,
so no two requests begin at the same place of the text; `shared_prefix` is the case where they share on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from elastic.bench.traces.trace import Trace
from elastic.errors import ConfigError

Prompt = tuple[int, ...]
MOST_TOKENS = 1_000_000_000
"""Of all prompts: they are made before the first is sent."""


def text_prompts(trace: Trace, tokens: Sequence[int], *, seed: int = 0, shared_prefix: int = 0) -> list[Prompt]:
    """Cut prompts from a tokenized text, each from a position of its own; after the end it begins again.

    With `shared_prefix`, the first so many tokens of every prompt (all but one of a shorter one) are the text's first.
    Raises `ConfigError` for a text without tokens, or with fewer than the trace has requests.
    """
    longest = _longest(trace)
    if len(tokens) < max(1, len(trace.requests)):
        raise ConfigError(
            f"the text has {len(tokens):,} tokens, and {len(trace.requests):,} prompts must begin at different ones; "
            "give a longer text"
        )
    twice = [*tokens, *tokens]
    starts = random.Random(seed).sample(range(len(tokens)), len(trace.requests))
    prompts = [
        _passage(twice, len(tokens), start, request.prompt_tokens)
        for start, request in zip(starts, trace.requests, strict=True)
    ]
    return _with_prefix(prompts, _passage(twice, len(tokens), 0, min(shared_prefix, longest)), shared_prefix)


def random_prompts(trace: Trace, vocabulary: int, *, seed: int = 0, shared_prefix: int = 0) -> list[Prompt]:
    """Draw prompts of token ids evenly from [0, `vocabulary`). Raises `ConfigError` for a vocabulary below 2."""
    if vocabulary < 2:
        raise ConfigError(f"a vocabulary of {vocabulary} tokens makes no prompts that differ; at least 2 are needed")
    longest, rng = _longest(trace), random.Random(seed)
    prompts = [tuple(rng.choices(range(vocabulary), k=r.prompt_tokens)) for r in trace.requests]
    return _with_prefix(prompts, rng.choices(range(vocabulary), k=max(0, min(shared_prefix, longest))), shared_prefix)


def _longest(trace: Trace) -> int:
    """Return the tokens of the longest prompt. Raises `ConfigError` for more of all together than can be made."""
    lengths = [request.prompt_tokens for request in trace.requests]
    if (tokens := sum(lengths)) > MOST_TOKENS:
        raise ConfigError(
            f"the prompts of {trace.source} have {tokens:,} tokens together, and are made of {MOST_TOKENS:,} at most; "
            "cut it by a window, or its prompts by --most-tokens"
        )
    return max(lengths, default=0)


def _passage(twice: Sequence[int], length: int, start: int, wanted: int) -> Prompt:
    passage = tuple(twice[start : start + min(wanted, length)])
    while len(passage) < wanted:
        passage += passage[: wanted - len(passage)]
    return passage


def _with_prefix(prompts: list[Prompt], prefix: Sequence[int], shared: int) -> list[Prompt]:
    if shared < 0:
        raise ConfigError(f"shared prefix {shared} must be at least 0")
    if shared == 0:
        return prompts
    return [tuple(prefix[: min(shared, len(p) - 1)]) + p[min(shared, len(p) - 1) :] for p in prompts]
