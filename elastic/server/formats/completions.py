"""The JSON of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.server.formats.base import JSON
from elastic.server.formats.logprobs import LogprobsFormat
from elastic.server.generation.metrics import Operation
from elastic.server.generation.request_builder import Echo
from elastic.server.generation.response_stream import ChoiceStream, ReadToken, TextDelta
from elastic.server.generation.token_text import TokenTexts
from elastic.server.protocol.completions import CompletionBody


class CompletionFormat:
    """The answers to one body, with their prompts before them where those are echoed."""

    operation: Operation = "text_completion"
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, texts: TokenTexts, echoes: Sequence[Echo] = ()) -> None:
        self._body = body
        self._logprobs = LogprobsFormat(texts, as_ids=bool(body.return_tokens_as_token_ids))
        self._echoes = tuple(echoes)
        self._opened: set[int] = set()

    def choices(self, delta: TextDelta, answer: ChoiceStream) -> list[JSON]:
        """Return more of an answer, as choices of chunks; the first has the prompt before it."""
        return [self.choice(delta, answer)]

    def choice(self, whole: TextDelta, answer: ChoiceStream) -> JSON:
        """Return a whole answer, or more of it."""
        opens = whole.index not in self._opened
        self._opened.add(whole.index)
        echo = self._echo(answer) if opens else Echo("")
        choice = {
            "index": whole.index,
            "text": echo.text + whole.text,
            "logprobs": self._reported(whole, answer, echo),
            "finish_reason": whole.finish,
            "stop_reason": whole.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for token in whole.tokens]
            choice["prompt_token_ids"] = list(answer.request.prompt) if opens else None
        if self._body.prompt_logprobs is not None:
            entries = answer.first.prompt_logprobs or ()
            choice["prompt_logprobs"] = self._logprobs.prompt(entries, self._body.prompt_logprobs)
        return choice

    def extra(self, answers: Sequence[ChoiceStream]) -> JSON:
        """Return nothing: what is reported is part of the choices."""
        return {}

    def _echo(self, answer: ChoiceStream) -> Echo:
        return self._echoes[answer.index // answer.request.n] if self._echoes else Echo("")

    def _reported(self, delta: TextDelta, answer: ChoiceStream, echo: Echo) -> JSON | None:
        """Return the report of new tokens, and of the prompt's where it comes with them."""
        if self._body.logprobs is None:
            return None
        before = len(self._echo(answer).text)
        logprobs = answer.first.prompt_logprobs or [None] * len(echo.offsets)
        prompt = [ReadToken(*entry) for entry in zip(answer.request.prompt, echo.offsets, logprobs, strict=False)]
        new = [token._replace(offset=before + token.offset) for token in delta.tokens]
        return self._logprobs.completion([*prompt, *new], top=self._body.logprobs)
