"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic.engines.base import MOST_ANSWERS
from elastic.server.protocol.errors import invalid
from elastic.server.protocol.fields import ListsOfTokens, Logprobs, Text, Texts, Tokens
from elastic.server.protocol.neutral_fields import COMPLETION
from elastic.server.protocol.sampling import SamplingBody


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    neutral = COMPLETION

    prompt: Text | Tokens | Texts | ListsOfTokens
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    """Answers to generate, of which the `n` likeliest are returned."""
    logprobs: Logprobs | None = None
    """Likeliest tokens to report with each new one; None: no report."""
    echo: bool | None = None
    """True: the prompt comes before the answer, with its tokens' log-probabilities where they are asked for."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if not self.prompt or isinstance(self.prompt[0], int) else self.prompt  # type: ignore

    @property
    def answers(self) -> int:
        """Answers to generate for each prompt: all of which the best are chosen."""
        return self.best_of or self.n or 1

    @property
    def top_tokens(self) -> int | None:
        """Likeliest tokens to report with each new one; 0 where the best answers are to be found."""
        return 0 if self.logprobs is None and self.answers > (self.n or 1) else self.logprobs

    def check(self, path: str = "") -> None:
        """Raise `APIError` for what is not supported."""
        super().check(path)
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise invalid("best_of", f"{self.best_of} is less than n={self.n or 1}: it must be at least as many")
        if self.stream and self.answers > (self.n or 1):
            raise invalid("best_of", "the best answers are known at their end: it does not go with stream=true")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise invalid("max_tokens", "0 goes with echo=true or prompt_logprobs only; give at least 1")
        if len(self.prompts) * self.answers > MOST_ANSWERS:
            raise invalid("n", f"{len(self.prompts)} prompts times {self.answers} are more than {MOST_ANSWERS} answers")
