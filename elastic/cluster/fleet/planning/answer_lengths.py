"""How long an answer usually is."""

from __future__ import annotations

from collections import deque


class AnswerLengths:
    """The tokens of the last 256 answers that ended by themselves. Not thread-safe."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=256)

    def note(self, *tokens: int) -> None:
        """Note that answers have ended."""
        self._lengths.extend(tokens)

    def usual(self) -> int | None:
        """Return the length that nine of ten of them do not exceed (P90); None: there are none yet."""
        if not self._lengths:
            return None
        return sorted(self._lengths)[-(-9 * len(self._lengths) // 10) - 1]
