"""Fingerprints against whole models: seconds by a clock that counts operations, and bytes of batches.

The clock of a measurement is replaced: a batch takes as long as its operations, whatever this machine does meanwhile.
Batches and lengths are such as no fingerprint was measured at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.engines.continuous import chunk_profile
from elastic.engines.continuous.chunk_profile import Mix, profile_chunks
from elastic.engines.executor.kernels.paged_attention import NewTokens, PagedAttention
from elastic.estimation import profile as profiles
from elastic.estimation.activations import bound_bytes, peak_bytes
from elastic.estimation.costs import among_ranks
from elastic.estimation.fingerprint import take_layers
from elastic.estimation.model_layout import ModelLayout, layout_of
from elastic.estimation.profile import CostProfile, engine_for, measure_fingerprints
from elastic.planning.estimate.configuration import FULL
from elastic.planning.estimate.performance import InstanceCost
from elastic.planning.pipeline.chunk_cost import Chunk
from support.estimation.fingerprints import PerLayer, paper_fingerprints

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SLIDING = [*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2]
MODELS = {
    "biases, untied": transformers.LlamaConfig(
        **SIZES, num_hidden_layers=7, intermediate_size=96, attention_bias=True, mlp_bias=True
    ),
    "two kinds of attention, tied": transformers.Gemma3TextConfig(
        **SIZES, num_hidden_layers=8, intermediate_size=96, head_dim=8, layer_types=SLIDING, sliding_window=24
    ),
    "dense and sparse": transformers.Qwen3MoeConfig(
        **SIZES,
        num_hidden_layers=6,
        intermediate_size=160,
        head_dim=8,
        mlp_only_layers=[0, 3],
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=16,
    ),
}
HELD_OUT: tuple[Mix, ...] = (
    ((0, 27),),
    ((0, 41),),
    ((133, 19),),
    ((277, 1),),
    ((123, 1),) * 2,
    ((251, 1),) * 8,
    ((91, 1), (186, 1), (0, 21)),
)


ATTEND = PagedAttention.attend


class Operations(TorchDispatchMode):
    """A clock: a nanosecond for each operation of a product, or of attention, and for each element that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def perf_counter(self) -> float:
        return self.count * 1e-9

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        made = isinstance(first, torch.Tensor) and func._schema.returns[0].alias_info is None  # no view
        self.count += first.numel() if made else 0
        if func.name() in ("aten::mm", "aten::addmm", "aten::bmm"):
            self.count += 2 * first.numel() * args[-2].shape[-1]
        elif "scaled_dot_product" in func.name():
            self.count += 4 * args[0].numel() * args[1].shape[-2]
        return out

    def attend(self, kernel: PagedAttention, query: torch.Tensor, *args: Any) -> None:
        """Attend, and count what that is: each new token sees one more than the one before."""
        new: NewTokens = args[2]
        counts = torch.ones_like(new.seen) if new.counts is None else new.counts
        pairs = counts * (2 * new.seen - counts + 1) // 2
        self.count += int((4 * query.shape[0] * query.shape[2] * pairs).sum())
        ATTEND(kernel, query, *args)


@contextmanager
def counted() -> Iterator[None]:
    """Measure by that clock, each batch once, in two layers of each kind."""
    clock = Operations()
    with (
        clock,
        patch.object(PagedAttention, "attend", lambda *args: clock.attend(*args)),
        patch.object(chunk_profile, "time", clock),
        patch.object(profiles, "cached_bytes", lambda _: 0),
        patch.object(profiles, "PASSES", 1),
        patch.object(profiles, "ROUNDS", 1),
    ):
        yield


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name)
def measured(request: pytest.FixtureRequest) -> tuple[Any, ModelLayout, CostProfile]:
    """A model, its layout, and what two layers of each kind tell of it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[request.param]).eval().requires_grad_(False)
    with counted():
        return model, layout_of(model), measure_fingerprints(model, context=256, step_tokens=32, most_s=1e9)


def test_seconds_of_a_model_follow_from_its_fingerprints_and_not_from_its_bytes(
    measured: tuple[Any, ModelLayout, CostProfile],
) -> None:
    """At other lengths, at batches of 1, 2 and 8: within 5 %. By the bytes of layers more than 20 %."""
    model, layout, profile = measured
    parts = [(among_ranks(profile.layers[kind.name, FULL], 2), len(kind.layers)) for kind in layout.kinds]
    cost = InstanceCost(((*parts, (among_ranks(profile.around[FULL], 2), 1)),))  # as batches are profiled
    with counted(), engine_for(model, FULL, torch.device("cpu"), 320, 64) as engine:
        whole = profile_chunks(engine, HELD_OUT, 1).whole
    nbytes = sum(len(kind.layers) * kind.full.nbytes for kind in layout.kinds)
    ours, by_bytes = [], []
    for mix, taken in zip(HELD_OUT, (sample.seconds for sample in whole), strict=True):
        guess = cost.pass_s([Chunk(str(i), start, count) for i, (start, count) in enumerate(mix)])
        ours.append(abs(guess / taken - 1))
        tokens = sum(count for _, count in mix)
        by_bytes.append(abs(nbytes * tokens * 0.5e-9 / taken - 1))
    assert max(ours) < 0.05, ours
    assert max(by_bytes) > 0.2


def test_bytes_of_a_batch_follow_from_its_fingerprints(measured: tuple[Any, ModelLayout, CostProfile]) -> None:
    """The share of the bound that fingerprints took is near what the whole model takes, or above."""
    model, layout, profile = measured
    share = profile.activations[FULL]
    assert 0 < share <= 1
    with engine_for(model, FULL, torch.device("cpu"), 320, 64) as engine:
        for mix in (((0, 27),), ((133, 19),), ((251, 1),) * 8):
            estimated, most = share * bound_bytes(layout, mix, FULL, "cpu"), peak_bytes(engine, mix)
            assert most / 1.15 < estimated < 3 * most, mix


def test_a_fingerprint_is_measured_for_each_kind_and_explains_what_was_measured(
    measured: tuple[Any, ModelLayout, CostProfile],
) -> None:
    _, layout, profile = measured
    assert profile.layers.keys() == {(kind.name, FULL) for kind in layout.kinds}
    assert min(profile.r_squared.values()) > 0.99


def test_seconds_are_linear_in_the_layers_of_each_kind(measured: tuple[Any, ModelLayout, CostProfile]) -> None:
    """Of K kinds K + 1 fingerprints tell what a batch takes in the whole model. (Figure 7)"""
    model, layout, _ = measured
    fingerprints = paper_fingerprints(layout.kinds)
    assert len(fingerprints) == len(layout.kinds) + 1
    counts = {kind.name: len(kind.layers) for kind in layout.kinds}
    taken = zip(seconds(model), *(seconds(take_layers(model, layers)) for layers in fingerprints), strict=True)
    for whole, one, *more in taken:
        guess = PerLayer.solve(one, dict(zip(counts, more, strict=True))).of(counts)
        assert guess == pytest.approx(whole, rel=0.01)


def seconds(model: Any) -> list[float]:
    """What some batches take by the clock that counts."""
    with counted(), engine_for(model, FULL, torch.device("cpu"), 320, 64) as engine:
        return [sample.seconds for sample in profile_chunks(engine, HELD_OUT[::3], 1).whole]
