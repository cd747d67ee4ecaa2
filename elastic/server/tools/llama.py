"""Calls as Llama 3 writes them: an answer that is `{"name": …, "parameters": {…}}`, or several with `;` between."""

from __future__ import annotations

from collections.abc import Collection

from elastic.server.tools.base import Parsed
from elastic.server.tools.json_call import CallList

_TAG = "<|python_tag|>"


class LlamaParser:
    """Reads one answer: it is calls from its first character on, or it is content."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: of the tools there are; without a tag, what names another is content. None: any are."""
        self._names = names
        self._held = ""
        self._calls: CallList | None = None
        self._plain = False

    def push(self, text: str) -> Parsed:
        """Take more text."""
        if self._calls is None and not self._plain:
            text, self._held = self._held + text, ""
            start = text.lstrip()
            first = start.removeprefix(_TAG).lstrip()
            if not first or _TAG.startswith(start):
                self._held = text
                return Parsed()
            if first.startswith("{"):
                names = None if start.startswith(_TAG) else self._names
                self._calls, text = CallList("", ";", "", names=names), first
            else:
                self._plain = True
        if self._calls is None:
            return Parsed(text)
        calls, content = self._calls.push(text)
        return Parsed(content, calls)

    def flush(self) -> Parsed:
        """Return the rest: of a call that broke off, its text, where nothing of it was told."""
        held, self._held = self._held, ""
        return Parsed(self._calls.flush() if self._calls is not None else held)
