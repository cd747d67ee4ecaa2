"""What the formats have in common: the counts of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.server.generation.response_stream import ChoiceStream

JSON = dict[str, Any]


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
