"""Blocks that have to be copied again."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from elastic.engines.pipeline.written_blocks import DirtyBlockTracker


def test_blocks_are_told_once_and_again_if_they_could_not_be_copied() -> None:
    written = DirtyBlockTracker((None, 8), 4)
    written.note(([5, 6, 9], [1, 2]), 0, 10)
    written.note(([7], [3]), 2, 3)
    assert written.take() == ((5, 6, 7, 9), (1, 2, 3))
    assert written.take() == ((), ())
    written.note(([5, 6, 9], [1, 2]), 10, 11)
    taken = written.take()
    assert taken == ((9,), (1,)), "the token at 10 is in the place of the one at 2 where 8 are seen"
    written.note(([7], [3]), 3, 4)
    written.add(taken)
    assert written.take() == ((7, 9), (1, 3))


def test_blocks_go_with_sectors_that_were_given_back() -> None:
    """A rank that makes room for a layer gives idle sectors back, whose blocks held something when it began."""
    mapped = [(0, 0), (0, 1), (1, 2)]
    memory: Any = SimpleNamespace(lock=nullcontext(), mapped_sectors=mapped, blocks_per_sector=lambda group: 4 >> group)
    written = DirtyBlockTracker((None, None), 4, memory=memory)
    written.note(([3, 4], [4, 5]), 0, 8)
    del mapped[0]
    assert written.take() == ((4,), (4, 5))
    written.add(((3, 5), (6,)))
    assert written.take() == ((5,), ())
