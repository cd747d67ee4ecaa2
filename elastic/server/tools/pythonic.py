"""Calls as Llama 4 and others write them: an answer that is a list of Python calls, `[weather(city="Oslo"), now()]`."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection

from elastic.server.tools.base import CallDelta, Parsed, valid_unicode

_TAGS = ("<|python_start|>", "<|python_end|>")
_LONGEST = 65_536
"""Characters that are read as calls; more are content."""
_MOST_ATTEMPTS = 16
"""Times that a text which may be complete is read before the end of the answer."""


class PythonicParser:
    """Reads one answer. Its calls are told together, when the list is complete; text behind that is content."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: of the tools there are; without a tag, a list that calls another is content. None: any are."""
        self._names = names
        self._held = ""
        self._attempts = self._tried = 0
        self._is_content = self._is_behind = False
        """What comes is content, or what is behind the list."""
        self._end_tag = _TAGS[1]
        """That may still come; empty: it came."""

    def push(self, text: str) -> Parsed:
        """Take more text."""
        if self._is_content:
            return Parsed(text)
        self._held += text
        if self._is_behind:
            return Parsed(self._behind())
        start = self._held.lstrip()
        if start.startswith(_TAGS[0]):
            start, self._names = start.removeprefix(_TAGS[0]).lstrip(), None
        if start.startswith("["):
            while self._attempts < _MOST_ATTEMPTS and (end := start.find(")]", self._tried, _LONGEST)) >= 0:
                self._attempts, self._tried = self._attempts + 1, end + 1
                if calls := _calls(start[: end + 2], self._names):
                    self._held, self._is_behind = start[end + 2 :], True
                    return Parsed(self._behind(), calls)
        elif start and not _TAGS[0].startswith(start):
            return self._as_content()
        return self._as_content() if len(start) > _LONGEST else Parsed()

    def flush(self) -> Parsed:
        """Return the rest."""
        held = self._held.strip().removeprefix(_TAGS[0]).removesuffix(_TAGS[1]).strip()
        if not self._is_behind and held.startswith("[") and (calls := _calls(held, self._names)):
            return Parsed(calls=calls)
        return self._as_content()

    def _behind(self) -> str:
        """Return what is content behind the list: no end tag, and no space around that."""
        rest = self._held.lstrip()
        if self._end_tag and rest.startswith(self._end_tag):
            rest, self._end_tag = rest.removeprefix(self._end_tag).lstrip(), ""
        self._is_content = not self._end_tag.startswith(rest)
        self._held = "" if self._is_content else rest
        return rest if self._is_content else ""

    def _as_content(self) -> Parsed:
        held, self._held, self._is_content = self._held, "", True
        return Parsed(held)


def _calls(text: str, names: Collection[str] | None) -> tuple[CallDelta, ...] | None:
    """Return the calls of a list, None for text that is none, or calls what has none of these names."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        calls = tuple(_call(i, call) for i, call in enumerate(tree.elts))
        return calls if names is None or all(call.name in names for call in calls) else None
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
