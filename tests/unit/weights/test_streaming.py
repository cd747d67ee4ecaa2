"""Prefetch buffers: who gets one, who gives way, what a failed copy or a held view leaves behind."""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch

import elastic
from elastic import CapacityError, StateError
from elastic.memory import copy_engine
from support.architectures import build, prompt
from support.child_process import wait_for_the_janitor


@pytest.fixture
def released(wrapped: Any) -> tuple[Any, Any]:
    """A model without one layer at its place, and the prefetch buffers of the place."""
    model = wrapped(build("llama-gqa"))
    model.elastic.release([0, 1, 2])
    (streamer,) = model.elastic.weights.streamers.values()
    return model, streamer


def held(streamer: Any) -> set[int]:
    return {buffer.layer.index for buffer in streamer.buffers if buffer.layer is not None}


def test_the_next_layer_is_fetched_while_one_computes(released: tuple[Any, Any]) -> None:
    model, streamer = released
    seen = []
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, i=i: seen.append((i, held(streamer))))
    model(**prompt())
    assert seen == [(0, {0, 1}), (1, {1, 2}), (2, {2, 0})]


def test_the_next_layer_is_asked_for_before_the_present_one_is_there(
    released: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, streamer = released
    start, copy, asked, both = streamer.copier.start, copy_engine.copy, [], threading.Event()

    def started(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        if len(asked) == 2:
            both.set()
        return start(*args, **kwargs)

    def copied(target: torch.Tensor, source: torch.Tensor) -> None:
        assert both.wait(30)
        copy(target, source)

    monkeypatch.setattr(streamer.copier, "start", started)
    monkeypatch.setattr(copy_engine, "copy", copied)
    assert torch.equal(model(**prompt()).logits, build("llama-gqa")(**prompt()).logits)


def test_with_one_buffer_a_layer_gives_way_to_the_next(released: tuple[Any, Any]) -> None:
    model, streamer = released
    expected = build("llama-gqa")(**prompt()).logits
    model.elastic.restore([0, 1])
    model.elastic.release(1)
    assert streamer.resize(1) == streamer.buffer_pages
    assert torch.equal(model(**prompt()).logits, expected)
    assert torch.equal(model(**prompt()).logits, expected)
    streamer.resize(2)


def test_a_thread_waits_for_a_buffer_until_one_is_left(released: tuple[Any, Any]) -> None:
    model, streamer = released
    first, second, third = model.elastic.weights.layers
    arrived = threading.Event()

    def enter() -> None:
        streamer.enter(third)
        arrived.set()
        streamer.leave(third)

    streamer.enter(first)
    streamer.enter(second)
    thread = threading.Thread(target=enter)
    thread.start()
    assert not arrived.wait(0.05)
    streamer.leave(first)  # and with it, what it contains
    thread.join(timeout=120)
    assert arrived.is_set()


def test_what_a_forward_left_without_its_hooks_is_forgotten_by_the_next(released: tuple[Any, Any]) -> None:
    model, streamer = released
    expected = build("llama-gqa")(**prompt()).logits
    streamer.enter(model.elastic.weights.layers[0])
    streamer.enter(model.elastic.weights.layers[1])
    assert torch.equal(model(**prompt()).logits, expected)
    assert not any(buffer.users for buffer in streamer.buffers)
    streamer.leave(model.elastic.weights.layers[0])


@pytest.mark.parametrize("looked_for", [False, True], ids=["by-waiting", "by-its-thread"])
def test_a_buffer_of_a_pass_that_died_is_for_other_threads(looked_for: bool, released: tuple[Any, Any]) -> None:
    model, streamer = released
    expected = build("llama-gqa")(**prompt()).logits
    model.elastic.restore([0, 1])
    streamer.resize(1)

    def interrupt(*_: Any) -> None:  # Ctrl-C: torch calls no hook behind it
        raise KeyboardInterrupt

    hook = model.model.layers[2].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**prompt())
    hook.remove()
    assert [len(buffer.users) for buffer in streamer.buffers] == [1]
    if looked_for:
        assert not model.elastic.gate.inside
    results: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: results.append(model(**prompt()).logits), daemon=True)
    other.start()
    other.join(30)
    assert torch.equal(results[0], expected)
    assert torch.equal(model(**prompt()).logits, expected), "the thread of that pass goes on, too"
    assert [len(buffer.users) for buffer in streamer.buffers] == [0]


def test_a_buffer_of_a_pass_whose_thread_is_gone_is_closed_with_its_layer(released: tuple[Any, Any]) -> None:
    model, streamer = released
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: sys.exit())

    def call_and_exit() -> None:
        with suppress(SystemExit):
            model(**prompt())

    dying = threading.Thread(target=call_and_exit)
    dying.start()
    dying.join(30)
    hook.remove()
    assert sum(len(buffer.users) for buffer in streamer.buffers) == 1
    model.elastic.restore()
    assert [buffer.users for buffer in streamer.buffers] == [[]]
    model.elastic.check()


def call_until_it_fails(model: Any) -> None:
    while True:
        model(**prompt(), past_key_values=elastic.ElasticCache(model))


@pytest.mark.parametrize("nth", range(1, 40, 4))
def test_a_failed_copy_fails_one_forward_and_no_other(
    nth: int, released: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, streamer = released
    expected = build("llama-gqa")(**prompt()).logits
    plain, left = copy_engine.copy, nth

    def failing(target: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise OSError("the disk is gone")
        plain(target, source)

    monkeypatch.setattr(copy_engine, "copy", failing)
    with pytest.raises(OSError, match="disk is gone"):
        call_until_it_fails(model)
    assert model.elastic.kv.used_bytes == 0, "the error keeps the forward's tensors until garbage is collected"
    assert torch.equal(model(**prompt()).logits, expected)
    assert not any(buffer.users for buffer in streamer.buffers)


def test_copies_that_fail_together_fail_one_forward(released: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = released
    failures = threading.Semaphore(0)

    def failing(target: torch.Tensor, source: torch.Tensor) -> None:
        failures.release()
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(copy_engine, "copy", failing)
        with pytest.raises(OSError, match="disk is gone"):
            model(**prompt())
        for _ in ("the layer", "the next one"):
            assert failures.acquire(timeout=30)
    assert torch.equal(model(**prompt()).logits, build("llama-gqa")(**prompt()).logits)


def test_a_forward_that_fails_inside_a_layer_leaves_its_buffer(released: tuple[Any, Any]) -> None:
    model, streamer = released
    expected = build("llama-gqa")(**prompt()).logits

    def fail(*args: Any) -> None:
        raise RuntimeError("from inside")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="from inside"):
        model(**prompt())
    handle.remove()
    assert not any(buffer.users for buffer in streamer.buffers)
    assert torch.equal(model(**prompt()).logits, expected)


def test_what_a_forward_shows_of_a_buffer_is_never_overwritten(released: tuple[Any, Any]) -> None:
    """A hook in a user's code may keep what it sees: its pages are retained, and the buffer gets others."""
    model, streamer = released
    expected = build("llama-gqa")(**prompt()).logits
    kept = []
    weight = model.model.layers[0].mlp.up_proj.weight
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: kept.append(weight[:2]))
    assert torch.equal(model(**prompt()).logits, expected)
    handle.remove()
    assert torch.equal(kept[0], build("llama-gqa").model.layers[0].mlp.up_proj.weight[:2])
    assert model.elastic.status().places[0].owners["retained"] > 0
    assert torch.equal(model(**prompt()).logits, expected)
    model.elastic.check()
    kept.clear()
    gc.collect()
    wait_for_the_janitor()
    assert "retained" not in model.elastic.status().places[0].owners
    assert len(streamer.buffers) == 2


def test_a_buffer_without_memory_is_an_error_in_words_and_the_model_goes_on(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt(), use_cache=False).logits
    from elastic.memory import places
    from support.faulty_backend import FaultyBackend

    wrapped(model)
    pool = places._open["cpu"][0]
    pool.backend = FaultyBackend(pool.backend)
    pool.backend.fail("map")
    model.elastic.release([0, 1])  # ahead of the forward pass, which tries again
    assert pool.backend.failures == 1
    pool.backend.fail("map")
    with pytest.raises(CapacityError, match="injected"):
        model(**prompt(), use_cache=False)
    model.elastic.check()
    assert torch.equal(model(**prompt(), use_cache=False).logits, expected)


def test_buffers_have_their_pages_before_a_forward_pass_needs_them(released: tuple[Any, Any]) -> None:
    model, streamer = released
    blocks, created = [buffer.block for buffer in streamer.buffers], streamer.pool.backend.created
    assert all(block.unmapped_pages == 0 for block in blocks)
    model(**prompt(), use_cache=False)
    assert [buffer.block for buffer in streamer.buffers] == blocks
    assert streamer.pool.backend.created == created


@pytest.mark.parametrize("full", [True, False])
def test_pages_that_cannot_be_made_ahead_fail_no_release(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Whether the device has no room, or its driver refuses for another reason."""
    model = wrapped(build("llama-gqa"))
    rt = model.elastic
    (streamer,) = rt.weights.streamers.values()
    rt.kv.trim()

    def fail(*_: Any, **__: Any) -> int:
        if full:
            raise CapacityError("the device is full", requested_bytes=1, free_bytes=0, total_bytes=1)
        raise StateError("the driver refuses")

    for owner, name in ((streamer.pool, "make_ready"), (streamer.pool.backend, "map")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            assert rt.release([0, 1]).status == "applied"
        rt.check()
        assert torch.equal(model(**prompt()).logits, build("llama-gqa")(**prompt()).logits)
        rt.restore()
