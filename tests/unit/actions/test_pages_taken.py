"""Pages that an action has taken from the KV cache come back when it fails, whatever the driver or the place says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic import CapacityError, StateError
from elastic.actions import replicate
from support.architectures import build
from support.weights.sharded import place, wide
from support.wrapped_model import small


def pages_of(rt: Any) -> list[dict[str, Any]]:
    """The KV cache of each place, and the owners of its pages."""
    return [
        {"maximum": kv.maximum_bytes, **at.owners} for kv, at in zip(rt.status().kv, rt.status().places, strict=True)
    ]


@pytest.mark.parametrize("call", ["map", "create"])
@pytest.mark.parametrize(
    ("before", "action"),
    [
        (lambda rt: None, lambda rt: rt.swap(0, "int8")),
        (lambda rt: rt.release(0), lambda rt: rt.restore(0)),
        (lambda rt: rt.drop(shards=[1, 2]), lambda rt: rt.restore(shards=[1, 2])),
        (lambda rt: rt.drop(0), lambda rt: rt.restore(shards=[1, 2])),
        (lambda rt: rt.drop(0), lambda rt: rt.restore(0)),
    ],
)
def test_a_driver_that_refuses_pages_leaves_the_cache_what_it_had(
    call: str,
    before: Callable[[Any], object],
    action: Callable[[Any], object],
    wrapped: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide().save_pretrained(tmp_path)
    rt = wrapped(wide(), place(), variants=["int8"], shards=4, checkpoint=tmp_path).elastic
    before(rt)
    rt.kv.trim()
    for pool in rt.pools:
        pool.trim()
    had = pages_of(rt)

    def refuse(*args: Any, **options: Any) -> None:
        raise StateError(f"the driver refuses to {call}")

    with monkeypatch.context() as patch:
        patch.setattr(rt.pools[0].backend, call, refuse)
        with pytest.raises(StateError, match="the driver refuses"):
            action(rt)
    assert pages_of(rt) == had
    action(rt)
    rt.restore(0)


def test_prefetch_buffers_of_several_places_are_made_all_or_none(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = wrapped(build("llama-gqa"), [small(1 << 20), small(1 << 20, "cpu#b")]).elastic
    rt.migrate(2, "cpu#b")
    for streamer in rt.weights.streamers.values():
        streamer.least = 0  # as under a policy
    rt.restore(rt.release([0, 2]).layers)
    had = pages_of(rt)
    second = rt.weights.streamers["cpu#b"]

    def full(count: int) -> int:
        if count:
            raise CapacityError("another model was faster", requested_bytes=1, free_bytes=0, total_bytes=1)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(second, "resize", full)
        with pytest.raises(CapacityError, match="another model was faster"):
            rt.release([0, 2])
    assert pages_of(rt) == had
    assert rt.release([0, 2]).layers == (0, 2)


def test_a_replica_whose_thread_cannot_start_takes_no_pages(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = wrapped(build("llama-gqa"), [small(1 << 20), small(1 << 20, "cpu#b")]).elastic
    had = pages_of(rt)

    def no_thread(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(replicate, "ReplicaWorker", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            rt.replicate(1, "cpu#b")
    assert pages_of(rt) == had
    assert rt.replicate(1, "cpu#b").layers == (1,)


def test_layers_that_were_released_give_their_pages_up_also_where_no_prefetch_buffer_can_be_filled(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = wrapped(build("llama-gqa"), [small(1 << 20), small(1 << 20, "cpu#b")]).elastic
    rt.migrate(2, "cpu#b")
    rt.kv.trim()

    def refuse(*args: Any, **options: Any) -> None:
        raise StateError("the driver refuses to map")

    with monkeypatch.context() as patch:
        patch.setattr(rt.pools[0].backend, "map", refuse)
        assert (
            rt.release([0, 2]).status == "applied"
        )  # a buffer finds its pages at its first use, or says that it cannot
    assert rt.form() == ("absent", "float32", "absent")
    assert [owner for place in pages_of(rt) for owner in place if owner.startswith("layer")] == ["layer:1"]
    assert rt.events()[-1].ok
