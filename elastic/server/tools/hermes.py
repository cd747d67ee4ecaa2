"""Calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, between other text."""

from __future__ import annotations

import re

from elastic.server.tools.base import CallDelta, Parsed, beginning_at_end
from elastic.server.tools.json_call import CallReader

_BEGIN, _END = "<tool_call>", "</tool_call>"
_MOST_SPACE = 64
"""Characters of space before a mark that are no content; it bounds what a search for marks costs."""
_MARK = re.compile(rf"\s{{0,{_MOST_SPACE}}}(</?tool_call>)")


class HermesParser:
    """Reads one answer. Space before marks is no content, and none behind the last one."""

    def __init__(self) -> None:
        self._held = ""
        """Text that is not told yet: space, and what may become a mark."""
        self._reader: CallReader | None = None
        self._mark = ""
        """How the call that is read began."""
        self._calls = 0
        self._in_call = False
        """The end mark of a call is to come."""

    def push(self, text: str) -> Parsed:
        """Take more text."""
        text, self._held = self._held + text, ""
        content, calls = "", list[CallDelta]()
        while text:
            if self._reader is not None:
                said, text = self._inside(self._reader, text, calls)
            else:
                said, text = self._outside(text)
            content += said
        return Parsed(content, tuple(calls))

    def flush(self) -> Parsed:
        """Return the rest: of a call that broke off, its text, where nothing of it was told."""
        reader, held = self._reader, self._held
        self._reader, self._held = None, ""
        if reader is not None:
            return Parsed("" if reader.told else self._mark + reader.text)
        return Parsed("" if self._calls and not held.strip() else held)

    def _outside(self, text: str) -> tuple[str, str]:
        """Return the content up to the next mark, and the text behind that."""
        mark = _MARK.search(text)
        if mark is None:
            unsure = max(beginning_at_end(text, _BEGIN), beginning_at_end(text, _END))
            sure = max(len(text[: len(text) - unsure].rstrip()), len(text) - unsure - _MOST_SPACE)
            self._held = text[sure:]
            return text[:sure], ""
        if mark[1] == _BEGIN:
            self._reader, self._mark = CallReader(self._calls), mark[0]
        elif not self._in_call:
            return text[: mark.end()], text[mark.end() :]
        self._in_call = mark[1] == _BEGIN
        return text[: mark.start()], text[mark.end() :]

    def _inside(self, reader: CallReader, text: str, calls: list[CallDelta]) -> tuple[str, str]:
        """Read more of a call; return the content that it turns out to be, and the text behind it."""
        rest = text[reader.push(text) :]
        calls += reader.news()
        if not (reader.done or reader.failed):
            return "", rest
        self._reader, self._in_call = None, reader.done or reader.told
        self._calls += self._in_call
        return "" if self._in_call else self._mark + reader.text, rest
