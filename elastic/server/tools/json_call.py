"""Calls written as JSON, `{"name": …, "arguments": {…}}`, read while they come."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from elastic.server.tools.base import CallDelta, valid_unicode

_ARGUMENTS = ("arguments", "parameters")


class ValueScanner:
    """Finds the end of one JSON value."""

    def __init__(self) -> None:
        self.done = False
        self._first = ""
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Take text from `at` on; return where what belongs to the value ends there."""
        while at < len(text) and not self.done:
            character = text[at]
            self._first = self._first or character
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
                self.done = not self._in_string and not self._depth
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]" and self._depth:
                self._depth -= 1
                self.done = not self._depth
            elif not self._depth and (character in ",}]" or character.isspace()):  # behind a number or a word
                self.done = True
                return at
            at += 1
        return at


class _Expects(Enum):
    OPENING = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class CallReader:
    """Reads one call. Its name is told as soon as it is known, its arguments as they come."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        """`names`: see `CallList`."""
        self.done = self.failed = self.told = False
        self.text = ""
        """All that was read before anything of it was told."""
        self._index, self._names = index, names
        self._expects = _Expects.OPENING
        self._scanner: ValueScanner | None = None
        self._key: str | None = None
        self._value = ""
        self._name: str | None = None
        self._arguments: str | None = None
        """Those that were not told yet; None: there are none up to here."""
        self._has_arguments = False

    def push(self, text: str) -> int:
        """Take text; return how much of it belongs to the call. It has `failed` where it is none."""
        at = 0
        while at < len(text) and not (self.done or self.failed):
            if self._scanner is not None:
                end = self._scanner.feed(text, at)
                self._take_value(text[at:end])
                at = end
            elif text[at].isspace():
                at += 1
            else:
                at += self._step(text[at])
        if not self.told:
            self.text += text[:at]
        return at

    def news(self) -> tuple[CallDelta, ...]:
        """Return what can be told now."""
        if self._name is None or not (self._arguments or not self.told):
            return ()
        name = None if self.told else self._name
        delta = CallDelta(self._index, name, self._arguments or "")
        self._arguments, self.told = "", True
        return (delta,)

    def _step(self, character: str) -> int:
        """Take a character between two values; return 1, or 0 where a value begins with it."""
        match self._expects, character:
            case _Expects.OPENING, "{":
                self._expects = _Expects.KEY
            case _Expects.KEY, '"':
                self._scanner, self._key, self._value = ValueScanner(), None, ""
                return 0
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.VALUE, _:
                self._scanner, self._value = ValueScanner(), ""
                return 0
            case _Expects.COMMA, ",":
                self._expects = _Expects.KEY
            case ((_Expects.KEY | _Expects.COMMA), "}"):
                self.done, self.failed = self._name is not None, self._name is None
                if self.done and not self._has_arguments:
                    self._arguments = "{}"
            case _:
                self.failed = True
                return 0
        return 1

    def _take_value(self, piece: str) -> None:
        """Take more of a key or of a value, and its end."""
        self._value += piece
        is_arguments = self._key in _ARGUMENTS and not self._has_arguments
        if is_arguments and not self._value.startswith('"'):
            self._arguments = (self._arguments or "") + piece
        if self._scanner is None or not self._scanner.done:
            return
        self._scanner = None
        try:
            value = json.loads(self._value) if self._key is None or self._value.startswith('"') else None
        except ValueError:
            self.failed = True
            return
        if self._key is None:
            self._key, self._expects = str(value), _Expects.COLON
            return
        self._expects = _Expects.COMMA
        if self._key == "name" and self._name is None:
            name = valid_unicode(value) if isinstance(value, str) else None
            self.failed = name is None or (self._names is not None and name not in self._names)
            self._name = None if self.failed else name
        if is_arguments:
            self._has_arguments = True
            self._arguments = valid_unicode(value) if isinstance(value, str) else self._arguments


class CallList:
    """Reads calls one after the other, in brackets or not."""

    def __init__(
        self,
        opening: str = "[",
        separator: str = ",",
        closing: str = "]",
        *,
        first: int = 0,
        names: Collection[str] | None = None,
    ) -> None:
        """`first` is the number of the first call. With `names`, what has none of them is no call."""
        self.calls = first
        """The number of the next call."""
        self.done = False
        self._opening, self._separator, self._closing, self._names = opening, separator, closing, names
        self._reader: CallReader | None = None if opening else CallReader(first, names)

    def push(self, text: str) -> tuple[tuple[CallDelta, ...], str]:
        """Take text; return what can be told of calls, and the text that is not the list's, once it is `done`."""
        deltas: tuple[CallDelta, ...] = ()
        while text and not self.done:
            if self._reader is None:
                text = self._between(text)
                continue
            text = text[self._reader.push(text) :]
            deltas += self._reader.news()
            if self._reader.failed:
                self.done = True
                self.calls += self._reader.told  # its number is taken
                text = self.flush() + text
            elif self._reader.done:
                self._reader, self.calls = None, self.calls + 1
        return deltas, text

    def flush(self) -> str:
        """Return the text of a call that broke off before anything was told of it."""
        reader, self._reader = self._reader, None
        return reader.text if reader is not None and not reader.told else ""

    def _between(self, text: str) -> str:
        """Take what is between two calls; return the text behind it."""
        text = text.lstrip()
        if not text:
            return ""
        character = text[0]
        if character == (self._opening or self._separator):
            self._opening, self._reader = "", CallReader(self.calls, self._names)
        else:
            self.done = True
            if self._opening or character != self._closing:
                return text
        return text[1:]
