"""The tokens that end an answer of a model by the model's own wish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elastic.engines.base import Request


def end_tokens(model: Any) -> tuple[int, ...]:
    """The `eos_token_id` of a model: of its generation config, else of its config, else of its text config.

    Each may be None, a token id, or several (a chat model ends turns and texts by different tokens).
    """
    text = model.config.get_text_config(decoder=True)
    sources = (getattr(model, "generation_config", None), model.config, text)
    found = (_token_ids(getattr(source, "eos_token_id", None)) for source in sources)
    return next(filter(None, found), ())


def with_ends(request: Request, ends: Sequence[int]) -> Request:
    """The request, with these among its stop tokens unless it ignores them."""
    if request.ignore_eos or set(ends) <= set(request.stop_tokens):
        return request
    return replace(request, stop_tokens=tuple(dict.fromkeys((*request.stop_tokens, *ends))))


def _token_ids(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """None and negative ids stand for no token, as in transformers."""
    several = (given,) if isinstance(given, int) else given or ()
    return tuple(token for token in several if token >= 0)
