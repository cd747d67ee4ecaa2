"""Layers that ranks come to share take no more pages meanwhile than one layer of a pause needs, by the ledger."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from elastic.cluster.control.stage_questions import PauseSteps
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support import architectures
from support.cluster.peak_pages import Owned, owned_pages
from support.serving.generations import Collector, prompts
from support.wrapped_model import small

LAYERS, TP = 12, 2
NAMES = ("r0", "r1")
OF_BASE = 0.09
"""Of what the paper's base form needs besides: it copies all keys and values that stay to pages in a row."""


@pytest.fixture
def fleet(wrapped: Any) -> Any:
    config = LlamaConfig(**{**architectures.GQA, "num_hidden_layers": LAYERS, "max_position_embeddings": 2048})
    models = []
    for number in range(2):
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).eval()
        models.append(wrapped(model, small(24 << 20, f"cpu#{number}"), shards=TP))
    engine = {"block_tokens": 8, "max_batch_tokens": 64}
    with Fleet.of(*models, engine=engine, beat_timeout_s=60, routing="round_robin") as made:
        made.models = models
        yield made


def changed(fleet: Any, tp: int, layers_per_step: int) -> list[Owned]:
    """Have instances become another degree, no step being computed meanwhile; return the pages of each rank."""
    fleet._groups.ranks.ask_all(dict.fromkeys(NAMES, PauseSteps()))  # until layers have changed
    with ExitStack() as stack:
        counts = [stack.enter_context(owned_pages(model.elastic.pools[0])) for model in fleet.models]
        done = fleet.reshard(NAMES, tp=tp, exchange="stall", layers_per_step=layers_per_step)
        assert done.status == "applied", done.why
    return counts


def test_a_layer_at_a_pause_needs_the_keys_and_values_of_a_layer_besides(fleet: Any) -> None:
    heard = Collector()
    for number, prompt in enumerate(prompts([200, 200, 150, 150], architectures.VOCAB)):
        fleet.submit(Request(prompt, 1_500, id=f"r{number}", ignore_eos=True), heard)
    for number in range(4):
        heard.wait_for_tokens(f"r{number}", 2)
    weights = sum(fleet.models[0].elastic.layer_pages)
    for tp in (TP, 1):
        for count in changed(fleet, tp, 1):
            kept = ((count.before if tp == TP else count.after) - weights) // TP
            assert kept > LAYERS
            assert count.transient <= OF_BASE * kept
    for count in changed(fleet, TP, LAYERS):
        assert count.transient > 2 * OF_BASE * (count.before - weights) // TP, "all layers at one pause need more"
    assert not heard.ends, "an answer that ends meanwhile gives pages back that were counted"
    for number in range(4):
        fleet.cancel(f"r{number}")
