"""Rows of a batch on a GPU, for replicas beside it."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch

import elastic
from elastic.hooks.replicas.split_rows import BatchSlice
from elastic.hooks.replicas.worker import ReplicaShard
from support.architectures import build, prompt


@pytest.mark.cuda
def test_rows_are_there_once_they_are_taken_to_a_cpu() -> None:
    hidden = torch.full((4, 3, 8), 2.0, device="cuda") * 3
    rows = BatchSlice(1, 3, 4, torch.device("cpu")).take(hidden)
    assert torch.equal(rows, torch.full((2, 3, 8), 6.0))


@pytest.mark.cuda
def test_a_pass_that_fails_half_way_leaves_the_next_one_right(wrapped: Any) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(4, device="cuda:0")
    expected = model(**inputs).logits
    places = [elastic.Place(f"cuda:0#{name}", torch.device("cuda", 0), 1 << 30) for name in "ab"]
    rt = wrapped(model, places).elastic
    rt.replicate(range(3), "cuda:0#b")

    def fail(*_: Any) -> None:
        raise RuntimeError("half way")

    for layer in range(3):
        handle = model.model.layers[layer].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="half way"):
            model(**inputs)
        handle.remove()
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    assert len(rt.passes()) > 0


@pytest.mark.cuda
def test_a_replica_that_fails_on_its_own_stream_leaves_the_next_pass_right(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(4, device="cuda:0")
    expected = model(**inputs).logits
    places = [elastic.Place(f"cuda:0#{name}", torch.device("cuda", 0), 1 << 30) for name in "ab"]
    rt = wrapped(model, places).elastic
    rt.replicate(range(3), "cuda:0#b")
    forward, home = ReplicaShard._forward, threading.current_thread()
    calls = itertools.count()

    def fail_at_the_second(shard: ReplicaShard, layer: Any, inputs: Any) -> None:
        if threading.current_thread() is not home and next(calls) == 1:
            raise RuntimeError("half way")
        forward(shard, layer, inputs)

    monkeypatch.setattr(ReplicaShard, "_forward", fail_at_the_second)
    with pytest.raises(RuntimeError, match="half way"):
        model(**inputs)
    for _ in range(2):
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    assert len(rt.passes()) > 0
