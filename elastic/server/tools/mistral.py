"""Calls as Mistral writes them: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or later `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import re

from elastic.server.tools.base import CallDelta, Parsed, beginning_at_end
from elastic.server.tools.json_call import CallList, ValueScanner

_MARK = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_LONGEST_NAME = 512


class MistralParser:
    """Reads one answer."""

    def __init__(self) -> None:
        self._held = ""
        """Text that is not told yet."""
        self._after_mark = False
        self._list: CallList | None = None
        self._arguments: ValueScanner | None = None
        self._calls = 0

    def push(self, text: str) -> Parsed:
        """Take more text."""
        text, self._held = self._held + text, ""
        content, calls = "", list[CallDelta]()
        while text:
            if self._list is not None:
                text = self._in_list(self._list, text, calls)
            elif self._arguments is not None:
                text = self._in_arguments(self._arguments, text, calls)
            elif self._after_mark:
                said, text = self._begin(text, calls)
                content += said
            else:
                before, mark, text = text.partition(_MARK)
                self._after_mark = bool(mark)
                held = 0 if mark else beginning_at_end(before, _MARK)
                self._held = before[len(before) - held :]
                content += before[: len(before) - held]
        return Parsed(content, tuple(calls))

    def flush(self) -> Parsed:
        """Return the rest: of a call that broke off, its text, where nothing of it was told."""
        held = (_MARK if self._after_mark else "") + self._held
        if self._list is not None:
            held += self._list.flush()
        self._held, self._after_mark = "", False
        return Parsed(held)

    def _begin(self, text: str, calls: list[CallDelta]) -> tuple[str, str]:
        """Begin a call behind the mark: a list, or a name. Return what is content, and the text to go on with."""
        start = text.lstrip()
        if start.startswith("["):
            self._list, self._after_mark = CallList(first=self._calls), False
            return "", start
        if name := _NAME.match(text):
            self._arguments, self._after_mark = ValueScanner(), False
            calls.append(CallDelta(self._calls, name[1], ""))
            return "", text[name.end() :]
        if len(start) > _LONGEST_NAME or "{" in start:
            self._after_mark = False
            return _MARK, text
        self._held = text
        return "", ""

    def _in_list(self, calls_read: CallList, text: str, calls: list[CallDelta]) -> str:
        told, rest = calls_read.push(text)
        calls += told
        if calls_read.done:
            self._list, self._calls = None, calls_read.calls
        return rest

    def _in_arguments(self, arguments: ValueScanner, text: str, calls: list[CallDelta]) -> str:
        end = arguments.feed(text, 0)
        calls.append(CallDelta(self._calls, None, text[:end]))
        if arguments.done:
            self._arguments, self._calls = None, self._calls + 1
        return text[end:]
