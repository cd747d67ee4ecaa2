"""What the ranks of a layer exchange: the same bits for all, from whomever they are asked first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import starmap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.tensor_parallel.exchange import StepExchange
from elastic.engines.pipeline.transport import StepFailure
from elastic.errors import StateError
from elastic.planning.sharding.heads import heads_of
from support.pipeline.queue_transport import QueueExchange

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def exchanges(path: LayerPath) -> tuple[QueueExchange, dict[str, StepExchange]]:
    """The ends of a layer's ranks."""
    queues, found = QueueExchange(), {}
    for rank in path.holders(0):
        transport = queues.transport(rank, path.home)

        def receive(awaited: Any, transport: Any = transport) -> list[torch.Tensor]:
            return list(starmap(transport.receive, awaited))

        found[rank] = StepExchange(path.plan(rank), transport, 0, receive)
        found[rank].begin(0)
    return queues, found


@settings(max_examples=30)
@given(st.text("abcd", min_size=4, max_size=4), st.sampled_from(DTYPES), st.integers(0, 3))
def test_a_sum_is_rounded_once_and_the_same_everywhere(ranks: str, dtype: torch.dtype, seed: int) -> None:
    queues, ends = exchanges(LayerPath("a", tuple(ranks), shards=4))
    partials = torch.randn(len(ends), 1, 3, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with ThreadPoolExecutor(4) as threads:
        sums = [threads.submit(end.summed, own) for end, own in zip(ends.values(), partials, strict=True)]
        found = [future.result(10) for future in sums]
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial
    assert all(torch.equal(each, total.to(dtype)) for each in found)
    assert not queues.boxes


@settings(max_examples=50)
@given(st.text("abcd", min_size=4, max_size=4), st.integers(1, 9))
def test_heads_are_gathered_in_order_however_many_there_are(ranks: str, count: int) -> None:
    """Where there are fewer heads than shards, a rank may have none."""
    path = LayerPath("a", tuple(ranks), shards=4)
    queues, ends = exchanges(path)
    heads = torch.arange(float(2 * count * 3)).view(1, 2, count, 3)
    with ThreadPoolExecutor(4) as threads:
        futures = []
        for rank, end in ends.items():
            own = heads_of(path.shards_of(rank), 4, count)
            futures.append(threads.submit(end.gathered, heads[:, :, own], count))
        assert all(torch.equal(future.result(10), heads) for future in futures)
    assert not queues.boxes


def test_exchanges_of_a_layer_are_told_apart() -> None:
    queues, ends = exchanges(LayerPath("a", ("a", "b"), shards=2))
    one, two = torch.ones(1, 1, 2), torch.full((1, 1, 2), 2.0)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(lambda: (ends["b"].summed(one), ends["b"].summed(two)))
        assert torch.equal(ends["a"].summed(one), one + one)
        assert torch.equal(ends["a"].summed(two), two + two)
        first.result(10)
    assert not queues.boxes


def test_what_came_before_a_failure_is_used_and_nothing_is_waited_for_behind_it() -> None:
    _, ends = exchanges(LayerPath("a", ("a", "b"), shards=2))
    own = torch.ones(1, 1, 2)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(ends["b"].summed, own)
        ends["a"].summed(own)
        other.result(10)
    ends["b"].fail(StepFailure("broken"))
    with pytest.raises(StateError, match="broken"):
        ends["a"].summed(own)
