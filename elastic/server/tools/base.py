"""What a parser of calls takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CallDelta:
    """More of one call."""

    index: int
    """Number of the call in its answer."""
    name: str | None
    """Of the function, with the first delta of a call."""
    arguments: str
    """More of the arguments' JSON, as the model wrote it."""


@dataclass(frozen=True)
class Parsed:
    """What was certain in more of a text."""

    content: str = ""
    """Text that is no call."""
    calls: tuple[CallDelta, ...] = ()


class ToolParser(Protocol):
    """Reads one answer. What turns out to be no call is content: no text is lost."""

    def push(self, text: str) -> Parsed:
        """Take more text."""

    def flush(self) -> Parsed:
        """Return the rest at the end of the answer; nothing where all was told."""
        return Parsed()


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls."""

    make: Callable[..., ToolParser]
    """Makes the parser of one answer."""
    marked: bool = True
    """False: calls may come without marks. `make` is given the names of the tools; what names another is no call."""
    special: bool = False
    """True: its marks are special tokens, so that the text must keep these."""


def beginning_at_end(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def valid_unicode(text: str) -> str:
    """Return text that is Unicode: surrogates in pairs are their characters, others `U+FFFD`."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
