"""Pruned variants in a pipeline: ranks drop layers, swap what is left to a variant, and take all back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

import elastic
from elastic import SemiStructured, Structured, Unstructured, Variant
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support import architectures
from support.serving.generations import Collector, continuation, prompts, same_unless_close
from support.static_quant import pack_static
from support.wrapped_model import assert_same_bits, bits, small

pytestmark = pytest.mark.slow
TEXT = architectures.prompt(4, 64, seed=5)["input_ids"]
VARIANTS = [
    Variant.parse("2:4"),
    Variant.parse("4:8"),
    Variant.parse("heads50"),
    Variant("wanda", Unstructured(0.5, "wanda"), calibration=TEXT),
    Variant("sparsegpt", SemiStructured(2, 4, "sparsegpt"), calibration=TEXT),
    Variant("channels", Structured(ffn=0.75, by="wanda"), calibration=TEXT),
]
TOKENS = 24
"""Of each answer."""
CLOSE = 0.03
"""Of logits: products in bfloat16 or in float32, whichever was faster where a model was packed."""
PROMPTS = prompts([5, 40, 12], architectures.VOCAB)


def statically(variant: Variant) -> Any:
    """The plain model with all layers packed for good."""
    model = architectures.build("llama-gqa")
    for layer in model.model.layers:
        pack_static(layer, variant)
    return model


def serve(fleet: Fleet) -> dict[tuple[int, ...], list[int]]:
    heard, asked = Collector(), {prompt: Request(prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS}
    for request in asked.values():
        fleet.submit(request, heard)
    heard.wait([request.id for request in asked.values()])
    return {prompt: heard.tokens[request.id] for prompt, request in asked.items()}


def test_stages_of_a_pipeline_are_in_any_pruned_variant_and_come_back() -> None:
    models = [architectures.build("llama-gqa") for _ in range(2)]
    before = bits(models[0])
    for number, model in enumerate(models):
        elastic.wrap(model, places=small(6 << 20, f"cpu#{number}"), variants=VARIANTS)
    stages, plain = {"r0": (0, 1), "r1": (2,)}, architectures.build("llama-gqa")
    whole = {prompt: continuation(plain, prompt, TOKENS) for prompt in PROMPTS}
    engine = {"block_tokens": 8, "max_batch_tokens": 64}
    with Fleet.of(*models, engine=engine, beat_timeout_s=60) as fleet:
        assert fleet.drop(layers={"r0": stages["r1"], "r1": stages["r0"]}).status == "applied"
        full = {rank: weights(fleet, rank) for rank in stages}
        for variant in VARIANTS:
            for rank, layers in stages.items():
                fleet.apply(rank, elastic.Swap(layers, variant.name))
                assert weights(fleet, rank) < full[rank], "what is packed is saved, by the ledger"
            found = serve(fleet)
            for rank, layers in stages.items():
                fleet.apply(rank, elastic.Restore(layers))
            assert found != whole, variant.name
            if not variant.config.calibrated:
                plain = statically(variant)
                assert all(same_unless_close(plain, prompt, tokens, CLOSE) for prompt, tokens in found.items()), variant
        assert serve(fleet) == whole
        assert fleet.restore().status == "applied"
        fleet.check()
    for model in models:
        elastic.unwrap(model)
        assert_same_bits(model, before)


def weights(fleet: Fleet, rank: str) -> int:
    """Bytes of the layers of a rank, by its ledger."""
    (place,) = fleet.look(rank).status.places
    return sum(nbytes for owner, nbytes in place.owners.items() if owner.startswith("layer:"))
