"""CUDA graphs are replayed only while all weights lie where they lay at the capture."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.engines.vllm.model.graphs import SWITCHES, Addresses, CapturedGraphs
from elastic.errors import BackendUnavailable
from elastic.hooks.forward_gate import ForwardGate


class Weights:
    addresses: Addresses = (100, 200)

    def __call__(self) -> Addresses:
        return self.addresses


class Owner:
    """What a model runner has its graphs in."""


def runner_with(owner: str, switch: str, captured: bool) -> Any:
    """A model runner of vLLM, as far as its graphs."""
    holder = Owner()
    setattr(holder, switch, captured)
    return SimpleNamespace(**{owner: holder})


@pytest.mark.parametrize(("owner", "switch"), SWITCHES)
@pytest.mark.parametrize("moved", [(100, None), (100, 300)], ids=["packed or absent", "elsewhere"])
def test_no_graph_while_a_weight_is_not_where_it_was(owner: str, switch: str, moved: Addresses) -> None:
    runner, weights = runner_with(owner, switch, True), Weights()
    graphs = CapturedGraphs(runner, weights, ForwardGate())
    graphs.note_capture()
    for addresses, replayed in ((weights.addresses, True), (moved, False), (moved, False), (weights.addresses, True)):
        weights.addresses = addresses
        graphs.update()
        assert getattr(getattr(runner, owner), switch) is replayed


@pytest.mark.parametrize(("owner", "switch"), SWITCHES)
def test_without_graphs_nothing_is_switched_on(owner: str, switch: str) -> None:
    runner = runner_with(owner, switch, False)
    graphs = CapturedGraphs(runner, Weights(), ForwardGate())
    graphs.note_capture()
    graphs.update()
    assert getattr(getattr(runner, owner), switch) is False


@pytest.mark.parametrize(("owner", "switch"), SWITCHES)
def test_graphs_go_with_their_runner(owner: str, switch: str) -> None:
    """They are held as long as the worker is, though a worker that vLLM never stopped leaves the model behind."""
    runner = runner_with(owner, switch, True)
    graphs, gone = CapturedGraphs(runner, Weights(), ForwardGate()), weakref.ref(getattr(runner, owner))
    graphs.note_capture()
    del runner
    gc.collect()
    assert gone() is None


def test_a_runner_that_does_not_say_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="enforce_eager"):
        CapturedGraphs(SimpleNamespace(), Weights(), ForwardGate()).note_capture()
