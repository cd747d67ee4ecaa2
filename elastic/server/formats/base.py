"""What the formats have in common: the counts of tokens, and how long a document may take to make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from elastic.server.generation.metrics import Operation
from elastic.server.generation.response_stream import ChoiceStream, TextDelta

JSON = dict[str, Any]


class AnswerFormat(Protocol):
    """The JSON of the answers to one request over HTTP."""

    operation: Operation
    prefix: str
    """Of ids."""
    whole: str
    """The `object` of a whole response."""
    chunk: str
    """The `object` of the chunks of a stream."""

    def choices(self, delta: TextDelta, answer: ChoiceStream) -> list[JSON]:
        """Return more of an answer, as choices of chunks."""

    def choice(self, whole: TextDelta, answer: ChoiceStream) -> JSON:
        """Return a whole answer."""

    def extra(self, answers: Sequence[ChoiceStream]) -> JSON:
        """Return further fields of a whole response."""


def usage(answers: Sequence[ChoiceStream]) -> JSON:
    """Count the tokens that were read and generated; after a stop string, those up to where it ended.

    A prompt counts once, however many answers it has.
    """
    firsts = [answer for answer in answers if answer.first is answer] or [answer.first for answer in answers]
    prompt, generated = sum(len(a.request.prompt) for a in firsts), sum(a.tokens for a in answers)
    cached = sum(a.cached_tokens or 0 for a in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
