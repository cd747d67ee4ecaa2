"""Calls as Llama 4 and others write them: an answer that is a list of Python calls, `[weather(city="Oslo"), now()]`."""

from __future__ import annotations

import ast
import json

from elastic.server.tools.base import CallDelta, Parsed, valid_unicode

_TAGS = ("<|python_start|>", "<|python_end|>")
_LONGEST = 65_536
"""Characters that are read as calls; more are content."""
_MOST_ATTEMPTS = 16
"""Times that a text which may be complete is read before the end of the answer."""


class PythonicParser:
    """Reads one answer. Its calls are told together, when the list is complete."""

    def __init__(self) -> None:
        self._held = ""
        self._attempts = 0
        self._decided = False
        """What comes is content: the list is complete, or there is none."""

    def push(self, text: str) -> Parsed:
        """Take more text."""
        if self._decided:
            return Parsed(text)
        self._held += text
        start = self._held.lstrip().removeprefix(_TAGS[0]).lstrip()
        is_list = start.startswith("[") or not start or _TAGS[0].startswith(start)
        if not is_list or len(self._held) > _LONGEST:
            return self._as_content()
        end = start.rstrip().removesuffix(_TAGS[1]).rstrip()
        if not end.endswith(")]") or self._attempts >= _MOST_ATTEMPTS:
            return Parsed()
        self._attempts += 1
        return self._as_calls(end) or Parsed()

    def flush(self) -> Parsed:
        """Return the rest."""
        held = "" if self._decided else self._held.strip().removeprefix(_TAGS[0]).removesuffix(_TAGS[1]).strip()
        return (self._as_calls(held) if held.startswith("[") else None) or self._as_content()

    def _as_calls(self, text: str) -> Parsed | None:
        """Return the calls of a complete list, None for text that is none."""
        calls = _calls(text)
        if not calls:
            return None
        self._decided, self._held = True, ""
        return Parsed(calls=calls)

    def _as_content(self) -> Parsed:
        held, self._held, self._decided = self._held, "", True
        return Parsed(held)


def _calls(text: str) -> tuple[CallDelta, ...] | None:
    """Return the calls of a list, None for text that is none."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return tuple(_call(i, call) for i, call in enumerate(tree.elts))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _call(index: int, node: ast.expr) -> CallDelta:
    """Return a call. Raises `ValueError` for what is none, or has arguments that are no literals by name."""
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no call with arguments by name")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return CallDelta(
        index, ast.unparse(node.func), valid_unicode(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    )
