"""The first release of an engine that keeps no prefetch buffer waits for the pages of one, as a restore for its own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from elastic import CapacityError
from elastic.types import Release
from support.architectures import build
from support.child_process import wait_for_the_janitor
from support.wrapped_model import tight

OPTIONS: dict[str, Any] = {"variants": ["int8"], "policy": "balanced", "controller": False}


def full_cache(model: Any) -> Any:
    return model(torch.ones(1, 300, dtype=torch.long)).past_key_values


def wait_until_absent(rt: Any) -> None:
    deadline = time.monotonic() + 30
    while rt.form()[1:3] != ("absent", "absent"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def waiting(wrapped: Any) -> Any:
    """A model whose releases wait, and its handler."""
    model = build("llama-gqa")
    rt = wrapped(model, tight(model, 40, **OPTIONS), **OPTIONS).elastic
    handler = rt._executor.runner.handlers[Release]
    handler._waits = True
    return model, rt, handler


def test_it_is_deferred_and_done_when_caches_end(waiting: Any) -> None:
    model, rt, _ = waiting
    full, cache = rt.form(), full_cache(model)
    assert rt.plan(Release((1, 2)))[0].status == "deferred"
    held = rt.kv.capacity_bytes
    change = rt.release([1, 2])
    assert (change.status, change.layers, change.deferred) == ("deferred", (), (1, 2))
    assert rt.form() == full
    assert rt.kv.capacity_bytes < held, "new caches leave the pages that it waits for"
    del cache
    wait_until_absent(rt)
    rt.check()
    assert rt.restore().status == "applied"


def test_whoever_wants_the_layer_otherwise_ends_the_wait(waiting: Any) -> None:
    model, rt, _ = waiting
    before, cache = rt.kv.capacity_bytes, full_cache(model)
    assert rt.release([1]).status == "deferred"
    assert rt.restore([1]).status == "applied"
    del cache
    assert rt.kv.capacity_bytes == before
    assert "absent" not in rt.form()


def test_it_is_refused_where_its_layers_would_not_pay_for_the_buffer(waiting: Any, monkeypatch: Any) -> None:
    model, rt, handler = waiting
    cache = full_cache(model)
    (streamer,) = handler._weights.streamers.values()
    monkeypatch.setattr(streamer, "buffer_pages", 10 * streamer.buffer_pages)
    with pytest.raises(CapacityError, match="no room for the prefetch buffer"):
        rt.release([1])
    del cache


def test_a_rank_that_has_a_buffer_waits_for_one_that_has_not(waiting: Any) -> None:
    _, rt, handler = waiting
    owners, form = rt.status().places[0].owners, rt.form()
    prepared = handler.prepare(Release((1, 2)))
    assert handler.layers(prepared) == (1, 2)
    handler.shorten(prepared, ())
    handler.commit(prepared)
    assert handler.finish(prepared).deferred == (1, 2)
    assert (rt.status().places[0].owners, rt.form()) == (owners, form)
    rt.check()


def test_pages_that_come_free_before_it_is_known_to_wait_are_not_missed(waiting: Any, monkeypatch: Any) -> None:
    model, rt, handler = waiting
    caches, commit = [full_cache(model)], handler.commit

    def end_caches(prepared: Any) -> None:
        caches.clear()
        wait_for_the_janitor()
        commit(prepared)

    monkeypatch.setattr(handler, "commit", end_caches)
    assert rt.release([1, 2]).status == "deferred"
    wait_until_absent(rt)
    rt.check()
