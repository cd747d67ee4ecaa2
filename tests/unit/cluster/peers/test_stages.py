"""Two ranks that compute each other's layers over their hubs, as many steps as come; one that goes ends the step."""

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
WAYS = {"a": LayerPath("a", ("a", "b", "a")), "b": LayerPath("b", ("a", "b", "a"))}


class Rank:
    """A copy of a model, and its hub."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        model = elastic.wrap(architectures.build("llama-gqa"), places=small(16 << 20, f"cpu#{name}"))
        stack.callback(elastic.unwrap, model)
        self.name, self.forward = name, StageForward(model, Turn())
        stack.callback(self.forward.close)
        self.done = {"a": 0, "b": 0}
        """Steps of each instance."""
        self.hub = stack.enter_context(closing(PeerHub(name, b"a key of this test's own")))

    def steps(self, home: str, count: int) -> list[Any]:
        plan, transport = WAYS[home].plan(self.name), self.hub.transport(home)
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
        futures = {(name, home): threads.submit(ranks[name].steps, home, 20) for name in ranks for home in ranks}
    for (name, home), future in futures.items():
        outputs = future.result()
        assert all(torch.equal(output.logits, expected) if name == home else output is None for output in outputs)


def test_a_rank_that_goes_is_lost_for_both_instances(ranks: dict[str, Rank]) -> None:
    with ThreadPoolExecutor(4) as threads:
        futures = {(name, home): threads.submit(ranks[name].steps, home, 10**6) for name in ranks for home in ranks}
        while any(rank.done[home] < 5 for rank in ranks.values() for home in ranks):
            assert not any(future.done() for future in futures.values())
            time.sleep(0.001)
        ranks["b"].hub.close()
        for future in futures.values():
            with pytest.raises(RankLost):
                future.result(30)
