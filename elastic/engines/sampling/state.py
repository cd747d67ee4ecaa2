"""What the choice of the next token depends on besides the model: the rule of an answer, and its tokens so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from elastic.engines.base import Request, TokenMatcher
from elastic.engines.sampling.random_numbers import random_key


class TokenCounts:
    """The distinct tokens of an answer, and of its prompt if wanted, and how often the answer has each."""

    def __init__(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        distinct = np.unique(np.array([*prompt, *generated], np.int64))
        self._tokens, self._counts = distinct, np.zeros(len(distinct), np.int64)
        self._places = {token: place for place, token in enumerate(distinct.tolist())}
        for token in generated:
            self.add(token)

    def add(self, token: int) -> None:
        """Count a new token of the answer."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens, self._counts = (np.pad(a, (0, max(64, len(a)))) for a in (self._tokens, self._counts))
        self._tokens[place] = token
        self._counts[place] += 1

    def views(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the distinct tokens, and how often the answer has each: 0 for one of the prompt alone."""
        return self._tokens[: len(self._places)], self._counts[: len(self._places)]


class SamplingState:
    """How the tokens of one answer are chosen: its rule, and what of its tokens so far the rule looks at.

    Two states of the same request, seed and tokens choose alike from the same logits, whatever came between.
    """

    def __init__(
        self, request: Request, seed: int, generated: Iterable[int] = (), matcher: TokenMatcher | None = None
    ) -> None:
        rule, tokens = request.sampling, tuple(generated)
        self.request, self.rule, self.matcher = request, rule, matcher
        self.key = random_key(seed)
        self.position = len(tokens)
        """Tokens of the answer so far; that of its next random number."""
        penalized = rule.repetition_penalty != 1 or rule.presence_penalty != 0 or rule.frequency_penalty != 0
        self.counts = TokenCounts(request.prompt if rule.repetition_penalty != 1 else (), tokens) if penalized else None
        if matcher is not None:
            for token in tokens:
                matcher.accept(token)

    @property
    def too_short(self) -> bool:
        """Whether the answer may not end yet."""
        return self.position < self.request.min_tokens

    def append(self, token: int) -> None:
        """Go on by a token that was chosen."""
        self.position += 1
        if self.counts is not None:
            self.counts.add(token)
        if self.matcher is not None:
            self.matcher.accept(token)
