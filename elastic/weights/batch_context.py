"""How much of a batch this thread computes: what depends on the number of tokens goes by those of the whole batch.

So a replica takes the kernels that the layer would have taken for all rows together.
"""

from __future__ import annotations

import threading


class _Here(threading.local):
    part: tuple[int, int] | None = None


_here = _Here()


def set_batch_share(part: int, whole: int) -> None:
    """This thread computes so much of so much, in rows or tokens, until it says `clear_batch_share`."""
    _here.part = part, whole


def clear_batch_share() -> None:
    """This thread computes whole batches."""
    _here.part = None


def full_batch_tokens(tokens: int) -> int:
    """How many tokens the whole batch has where this thread has so many."""
    part = _here.part
    return tokens if part is None else tokens * part[1] // part[0]
