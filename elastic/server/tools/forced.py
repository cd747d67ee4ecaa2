"""Answers that a grammar made calls: a list of them, or the arguments of one function."""

from __future__ import annotations

from elastic.server.tools.base import CallDelta, Parsed
from elastic.server.tools.json_call import CallList


class ListParser:
    """Reads `[{"name": …, "parameters": {…}}, …]`."""

    def __init__(self) -> None:
        self._calls = CallList()

    def push(self, text: str) -> Parsed:
        """Take more text."""
        calls, content = self._calls.push(text)
        return Parsed(content, calls)

    def flush(self) -> Parsed:
        """Return the text of a call that broke off, where nothing of it was told."""
        return Parsed(self._calls.flush())


class ArgumentsParser:
    """Reads the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Parsed:
        """Take more text."""
        if not text:
            return Parsed()
        name, self._name = self._name, None
        return Parsed(calls=(CallDelta(0, name, text),))

    def flush(self) -> Parsed:
        """Return nothing: all was told."""
        return Parsed()
