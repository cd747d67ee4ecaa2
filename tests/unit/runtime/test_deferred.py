"""What waits for pages is kept from caches without a gap: whoever looks in a gap is not told afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elastic.actions.deferred import DeferredActions
from elastic.types import Restore


class Unit:
    """A layer of three pages that is in host memory."""

    cut = None
    pool = SimpleNamespace(name="cpu")

    def __init__(self, index: int) -> None:
        self.index = index

    def with_variant(self, variant: str | None, parts: tuple[str, ...]) -> str:
        return "full"

    def pages_in(self, precision: str) -> int:
        return 3


def test_a_retry_that_changes_nothing_holds_back_as_much_all_the_time() -> None:
    held: list[int] = []
    broker: Any = SimpleNamespace(shares={"cpu": SimpleNamespace(hold_back=held.append)})
    weights: Any = SimpleNamespace(streamers={})
    deferred, units = DeferredActions(weights, broker), [Unit(index) for index in range(3)]
    waiting: Any = units
    deferred.replace([], waiting, Restore((0, 1, 2)))
    deferred.replace(waiting, waiting, Restore((0, 1, 2)))
    deferred.replace(waiting, waiting[1:], Restore((0, 1, 2)))
    assert held == [9, 9, 6]
    (left,) = deferred.actions()
    assert left.layers == (1, 2)
    deferred.forget(waiting)
    assert (held[-1], deferred.actions()) == (0, ())
