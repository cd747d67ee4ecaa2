"""Answers that a grammar made calls: a list of them, or the arguments of one function."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.server.tools.base import CallDelta, Parsed, ToolParser
from elastic.server.tools.json_call import CallList


@dataclass
class ListParser(ToolParser):
    """Reads `[{"name": …, "parameters": {…}}, …]`."""

    _calls: CallList = field(default_factory=CallList)

    def push(self, text: str) -> Parsed:
        """Take more text."""
        calls, content = self._calls.push(text)
        return Parsed(content, calls)

    def flush(self) -> Parsed:
        """Return the text of a call that broke off, where nothing of it was told."""
        return Parsed(self._calls.flush())


@dataclass
class ArgumentsParser(ToolParser):
    """Reads the arguments of one call."""

    name: str | None
    """Of the function; None: it was told."""

    def push(self, text: str) -> Parsed:
        """Take more text."""
        if not text:
            return Parsed()
        name, self.name = self.name, None
        return Parsed(calls=(CallDelta(0, name, text),))
