"""The tokens that end an answer of a model by the model's own wish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elastic.engines.base import Request


def end_tokens(model: Any) -> tuple[int, ...]:
    """Return the `eos_token_id` of a model: of its generation config, else of its config, else of its text config.

    Each may be None, a token id, or several (a chat model ends turns and texts by different tokens). None and negative
    ids stand for no token, as in transformers.
    """
    text = model.config.get_text_config(decoder=True)
    for source in (getattr(model, "generation_config", None), model.config, text):
        given: int | Sequence[int] | None = getattr(source, "eos_token_id", None)
        ends = tuple(token for token in ((given,) if isinstance(given, int) else given or ()) if token >= 0)
        if ends:
            return ends
    return ()


def with_ends(request: Request, ends: Sequence[int]) -> Request:
    """Return the request with these among its stop tokens, unless it ignores them."""
    if request.ignore_eos or set(ends) <= set(request.stop_tokens):
        return request
    return replace(request, stop_tokens=tuple(dict.fromkeys((*request.stop_tokens, *ends))))
