"""Log-probabilities of tokens in the shapes of OpenAI's completions and chats, and of vLLM's prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.engines.base import TokenLogprobs
from elastic.server.generation.response_stream import ReadToken
from elastic.server.generation.token_text import TokenTexts

JSON = dict[str, Any]
LEAST = -9999.0
"""For what JSON cannot say: of a token that was impossible it is minus infinity, of logits with NaN it is NaN.
`max(LEAST, x)` is `LEAST` of both."""


@dataclass(frozen=True)
class LogprobsFormat:
    """The shapes of reports, with the names that tokens have in them."""

    texts: TokenTexts
    as_ids: bool = False
    """True: tokens are named `token_id:ID`."""

    def chat(self, tokens: Iterable[ReadToken]) -> list[JSON]:
        """Return the `content` of a chat's log-probabilities."""
        return [
            {
                **self._entry(token.logprobs.token, token.logprobs.logprob),
                "top_logprobs": [self._entry(*top) for top in token.logprobs.top],
            }
            for token in tokens
            if token.logprobs is not None
        ]

    def completion(self, tokens: Iterable[ReadToken], *, top: int) -> JSON:
        """Return the log-probabilities of a completion; with `top`, so many likeliest tokens and the token itself."""
        tokens = list(tokens)
        entries = [token.logprobs for token in tokens]
        ranked = [None if each is None else (*each.top[:top], (each.token, each.logprob)) for each in entries]
        tops = [None if each is None else {self._name(token): max(LEAST, p) for token, p in each} for each in ranked]
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [None if each is None else max(LEAST, each.logprob) for each in entries],
            "top_logprobs": tops if top else None,
            "text_offset": [token.offset for token in tokens],
        }

    def prompt(self, entries: Sequence[TokenLogprobs | None], count: int) -> list[JSON | None]:
        """Return vLLM's `prompt_logprobs`: for each position the token's and the `count` likeliest, by their ids."""
        reports: list[JSON | None] = []
        for entry in entries:
            ranked = {} if entry is None else {entry.token: (entry.logprob, entry.rank)}
            ranked |= {t: (p, rank) for rank, (t, p) in enumerate(() if entry is None else entry.top[:count], 1)}
            by_id = {
                str(token): {"logprob": max(LEAST, logprob), "rank": rank, "decoded_token": self.texts.of(token)[0]}
                for token, (logprob, rank) in ranked.items()
            }
            reports.append(by_id or None)
        return reports

    def _entry(self, token: int, logprob: float) -> JSON:
        return {"token": self._name(token), "logprob": max(LEAST, logprob), "bytes": list(self.texts.of(token)[1])}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.texts.of(token)[0]
