"""What waits for pages is kept from caches without a gap: whoever looks in a gap is not told afterwards."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.actions.deferred import DeferredActions
from elastic.types import Restore
from support.architectures import build
from support.child_process import wait_for_the_janitor
from support.wrapped_model import tight


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


def test_a_driver_that_fails_while_pages_are_taken_leaves_them_held_back() -> None:
    def refuse(*asked: object) -> bool:
        raise RuntimeError("the driver failed")

    held: list[int] = []
    shares = {"cpu": SimpleNamespace(hold_back=held.append)}
    broker: Any = SimpleNamespace(shares=shares, take_from_cache=refuse)
    weights: Any = SimpleNamespace(streamers={})
    deferred, units = DeferredActions(weights, broker), [Unit(index) for index in range(2)]
    waiting: Any = units
    deferred.replace([], waiting, Restore((0, 1)))
    with pytest.raises(RuntimeError, match="the driver failed"):
        deferred.take(waiting, 6)
    deferred.forget(waiting[1:])
    assert held == [6, 3]


def test_nothing_is_held_back_for_layers_that_have_their_pages(wrapped: Any) -> None:
    """New caches would get less than is left for them when all have returned."""
    model = build("llama-gqa")
    rt = wrapped(model, tight(model, 40)).elastic
    handler, least = rt._executor.runner.handlers[Restore], list[int]()
    (kv,) = handler._broker._pools.values()
    layers, full = (0, 1, 2), kv.limits.open
    rt.release(layers)
    cache = model(torch.ones(1, 440, dtype=torch.long)).past_key_values
    fill, commit = handler._fill, handler.commit

    def filled(switch: Any, prepared: Any) -> None:
        fill(switch, prepared)
        least.append(kv.limits.open)

    def committed(prepared: Any) -> None:
        least.append(kv.limits.open)
        commit(prepared)

    handler._fill, handler.commit = filled, committed
    assert rt.restore().status == "deferred"
    del cache
    wait_for_the_janitor()
    deadline = time.monotonic() + 30
    while rt.busy:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(least) > len(layers)
    assert min(least) >= kv.limits.open == full
    rt.check()
