"""Text from token ids while they arrive: whole characters only, and nothing after a stop string."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

REPLACEMENT = "\ufffd"
"""The decoder's text for bytes that are no character, or not one yet."""
_CONTEXT = 5
"""Tokens of the prompt that are decoded along: a first word keeps its leading space."""
_LONGEST, _KEPT = 64, 32
"""Tokens without a clean end of decoding, after which only the last ones, so many, are decoded again."""
_UNSURE = 8
"""Replacements at the end that may still become characters: with byte fallback up to three for the one that is
incomplete and four for the one before it, which a decoder takes back with it."""
_special: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens: those that have a role in it, and all others marked as such."""
    ids = _special.get(tokenizer)
    if ids is None:
        added = (token for token, text in tokenizer.added_tokens_decoder.items() if text.special)
        ids = _special[tokenizer] = frozenset((*tokenizer.all_special_ids, *added))
    return ids


class Detokenizer:
    """Text of one answer, in pieces. Together they are what decoding all tokens at once gives after the prompt.

    (Where bytes are no text at all, a decoder with byte fallback may have more replacements than the pieces.)
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, skip_special: bool = True) -> None:
        """Without `skip_special`, special tokens are part of the text."""
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer) if skip_special else frozenset()
        self._window = [token for token in prompt[-_CONTEXT:] if token not in self._special]
        self._said = len(self._decode().rstrip(REPLACEMENT))
        self._new = 0
        """Tokens at the end of the window since text last came to a clean end."""

    def push(self, tokens: Iterable[int]) -> str:
        """Take tokens, and return the text that is certain now; may be empty."""
        pieces = []
        for token in tokens:
            if token in self._special:
                continue
            self._window.append(token)
            self._new += 1
            text = self._decode()
            unsure = min(len(text) - len(text.rstrip(REPLACEMENT)), _UNSURE)
            sure = len(text) - unsure
            pieces.append(text[self._said : sure])
            self._said = max(self._said, sure)
            if pieces[-1] and not unsure:
                self._keep(self._new, 0)
                self._new = 0
            elif len(self._window) > _LONGEST:
                self._keep(_KEPT, len(text) - self._said)
        return "".join(pieces)

    def flush(self) -> str:
        """Return the rest at the end, replacements for bytes without a character included."""
        text = self._decode()[self._said :]
        self._said += len(text)
        return text

    def _keep(self, tokens: int, unsaid: int) -> None:
        """Keep so many tokens in the window, of whose text so many characters are still to be said."""
        self._window = self._window[-tokens:]
        self._said = len(self._decode()) - unsaid

    def _decode(self) -> str:
        if not self._window:
            return ""
        return str(self._tokenizer.decode(self._window, clean_up_tokenization_spaces=False))


class StopStrings:
    """Cuts text at the first stop string, also where it is spread over pieces."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """With `keep`, the stop string that is found is part of the text."""
        self._stops, self._keep = tuple(stops), keep
        self._sorted, self._longest = sorted(stops), max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """Take text, and return what no stop string can begin in; when one is found, the text before it."""
        if self.found is not None:
            return ""
        text, held = self._held + piece, len(self._held)
        at, self.found = min(
            ((i, stop) for stop in self._stops if (i := text.find(stop, max(0, held - len(stop) + 1))) >= 0),
            key=lambda hit: hit[0],
            default=(-1, None),
        )
        if self.found is not None:
            ready = at + len(self.found) if self._keep else at
        else:
            ends = range(max(0, len(text) - self._longest + 1), len(text))
            ready = next((i for i in ends if self._begins_stop(text[i:])), len(text))
        self._held = text[ready:]
        return text[:ready]

    def _begins_stop(self, end: str) -> bool:
        """Return whether a text is the beginning of a stop string: in order, the next one begins with it then."""
        after = bisect_right(self._sorted, end)
        return after < len(self._sorted) and self._sorted[after].startswith(end)

    def flush(self) -> str:
        """Return what was held back, if it was no stop string."""
        text, self._held = "" if self.found is not None else self._held, ""
        return text
