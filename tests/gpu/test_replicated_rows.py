"""Rows of a batch on a GPU, for replicas beside it."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch

import elastic
from elastic.hooks.replicas.split_rows import BatchSlice, LayerInputs
from elastic.hooks.replicas.worker import ReplicaShard, ReplicaWorker
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
        with suppress(RuntimeError):  # which, unlike pytest.raises, keeps no frame, and so no tensor, of the pass
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


class Doubler(torch.nn.Module):
    """What is called as a decoder layer is."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * 2


@pytest.mark.cuda
def test_what_a_pass_was_given_can_be_written_once_it_is_given_up(simulator: Any) -> None:
    """Its kernels may not have begun: they would read what is written then."""
    device = torch.device("cuda", 0)
    worker = ReplicaWorker("cuda:0#b", device)
    hidden = torch.ones(4, 3, 8, device=device)
    rows = BatchSlice(2, 4, 4, device)
    shard = ReplicaShard(worker, rows, hidden, None, threads=1)
    shard.step(Doubler(), LayerInputs(["hidden_states"], (hidden,), {}).take(rows, None))
    shard.abort()
    hidden.zero_()
    assert simulator.violations() == []
    assert torch.equal(shard.output, torch.full((2, 3, 8), 2.0, device=device))
    worker.close()


@pytest.mark.cuda
@pytest.mark.usefixtures("no_violations")
def test_what_a_replica_returned_is_not_written_again_before_it_was_read() -> None:
    """Its memory comes from the stream of the replica, which others may use as soon as the tensor is gone."""
    device = torch.device("cuda", 0)
    worker = ReplicaWorker("cuda:0#b", device)
    hidden = torch.ones(4, 3, 8, device=device)
    rows = BatchSlice(2, 4, 4, device)
    shard = ReplicaShard(worker, rows, hidden, None, threads=1)
    shard.step(Doubler(), LayerInputs(["hidden_states"], (hidden,), {}).take(rows, None))
    total = shard.finish(device).sum()
    size = shard.output.shape
    del shard
    worker.put(lambda: torch.full(size, 9.0, device=device)).result()
    assert total.item() == 2 * size.numel()
    worker.close()
