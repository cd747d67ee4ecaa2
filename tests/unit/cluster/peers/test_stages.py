"""Two ranks that compute each other's layers, or parts of them, over their hubs; one that goes ends the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

import elastic
from elastic.cluster.peers.hub import PeerHub
from elastic.engines.pipeline.forward import StageForward
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.turn import Turn
from elastic.errors import RankLost
from support import architectures
from support.wrapped_model import small

TEXT: dict[str, Any] = {"input_ids": architectures.prompt(length=200)["input_ids"], "use_cache": False}
WAYS = {home: LayerPath(home, ("a", "a", "b", "b", "a", "a"), shards=2) for home in "ab"}
"""The second of three layers is at b."""
SHARED = {home: LayerPath(home, ("a", "b", "a", "a", "a", "b"), shards=2) for home in "ab"}
"""The first and the last are at both."""


class Rank:
    """A copy of a model, and its hub."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        model = elastic.wrap(architectures.build("llama-gqa"), places=small(16 << 20, f"cpu#{name}"), shards=2)
        stack.callback(elastic.unwrap, model)
        self.name, self.forward = name, StageForward(model, Turn())
        stack.callback(self.forward.close)
        self.done = {"a": 0, "b": 0}
        """Steps of each instance."""
        self.hub = stack.enter_context(closing(PeerHub(name, b"a key of this test's own")))

    def steps(self, path: LayerPath, count: int) -> list[Any]:
        home = path.home
        plan, transport = path.plan(self.name), self.hub.transport(home)
        outputs = []
        for step in range(count):
            outputs.append(self.forward.run(plan, transport, step, TEXT))
            self.done[home] += 1
        return outputs


@pytest.fixture
def ranks() -> Iterator[dict[str, Rank]]:
    with ExitStack() as stack:
        made = {name: Rank(name, stack) for name in "ab"}
        for rank in made.values():
            rank.hub.meet({name: other.hub.address for name, other in made.items()})
        yield made


def test_instances_compute_each_others_layers_with_the_bits_of_one(ranks: dict[str, Rank]) -> None:
    expected = architectures.build("llama-gqa")(**TEXT).logits
    with ThreadPoolExecutor(4) as threads:
        futures = {(name, home): threads.submit(ranks[name].steps, WAYS[home], 20) for name in ranks for home in ranks}
    for (name, home), future in futures.items():
        outputs = future.result()
        assert all(torch.equal(output.logits, expected) if name == home else output is None for output in outputs)


def test_instances_share_layers_with_the_same_bits_at_both(ranks: dict[str, Rank]) -> None:
    plain = architectures.build("llama-gqa")(**TEXT).logits
    with ThreadPoolExecutor(4) as threads:
        futures = {
            (name, home): threads.submit(ranks[name].steps, SHARED[home], 20) for name in ranks for home in ranks
        }
    outputs = {key: future.result() for key, future in futures.items()}
    expected = outputs["a", "a"][0].logits
    torch.testing.assert_close(expected, plain)
    for (name, home), steps in outputs.items():
        assert all(torch.equal(output.logits, expected) if name == home else output is None for output in steps)


@pytest.mark.parametrize("ways", [WAYS, SHARED], ids=["layers", "shards"])
def test_a_rank_that_goes_is_lost_for_both_instances(ways: dict[str, LayerPath], ranks: dict[str, Rank]) -> None:
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(rank.steps, path, 10**6) for rank in ranks.values() for path in ways.values()]
        while any(rank.done[home] < 5 for rank in ranks.values() for home in ranks):
            assert not any(future.done() for future in futures)
            time.sleep(0.001)
        ranks["b"].hub.close()
        for future in futures:
            with pytest.raises(RankLost):
                future.result(30)
