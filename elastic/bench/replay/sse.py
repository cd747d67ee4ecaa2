"""Server-sent events of a streamed completion, as OpenAI's API sends them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["piece", "other", "done", "error"]


@dataclass(frozen=True)
class SSEEvent:
    """One line that begins with `data:`."""

    kind: Kind
    """`piece`: text, or tokens that are no text yet. `done`: the stream is complete."""
    finish: str | None = None
    output_tokens: int | None = None
    """The server's count of tokens, if the event has one."""
    error: str | None = None


def parse(line: str) -> SSEEvent | None:
    """Parse a line; None for comments, empty lines and other fields."""
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return SSEEvent("done")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return SSEEvent("error", error=f"the server sent what is not JSON: {data[:80]!r}")
    if not isinstance(document, dict):
        return SSEEvent("error", error=f"the server sent what is no object: {data[:80]!r}")
    if document.get("error"):
        return SSEEvent("error", error=_message(document))
    return _parse_piece(document)


def error_message(text: str) -> str:
    """Return the message in the text of an OpenAI error document, or else the text, shortened."""
    try:
        return _message(json.loads(text))
    except (ValueError, RecursionError):
        return text[:500]


def _message(document: Any) -> str:
    error = document.get("error", document) if isinstance(document, dict) else document
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:500]


def _parse_piece(document: dict[str, Any]) -> SSEEvent:
    usage = document.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    tokens = counted if isinstance(counted, int) else None
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return SSEEvent("other", output_tokens=tokens)
    finish = choice.get("finish_reason")
    is_piece = bool(choice.get("text")) or finish is None  # an empty last one only says why it ended
    return SSEEvent("piece" if is_piece else "other", finish, tokens)
