"""Ranks that measure what their steps cost have steps of equal cost in a pipeline, and the plain model's tokens."""

from __future__ import annotations

import pytest

import elastic
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support import architectures
from support.serving.generations import Collector, is_continuation, prompts
from support.wrapped_model import small

pytestmark = pytest.mark.slow
NEVER = elastic.Overload(tick_s=60.0, lookahead=True)


def test_prompts_are_cut_by_cost_in_a_pipeline_and_answers_stay_the_same() -> None:
    plain = architectures.build("qwen3")
    models = [architectures.build("qwen3") for _ in range(2)]
    for number, model in enumerate(models):
        elastic.wrap(model, places=small(4 << 20, f"cpu#{number}"))
    layers, heard = len(plain.model.layers), Collector()
    options = {"block_tokens": 8, "max_batch_tokens": 32}
    with Fleet.of(*models, engine=options, policy=NEVER, beat_timeout_s=60) as fleet:
        requests = [Request(prompt, 60) for prompt in prompts([100, 30, 90, 20], architectures.VOCAB)]
        fleet.submit(requests[0], heard)
        heard.wait_for_tokens(requests[0].id, 3)
        price = fleet.drop(sum(fleet.layer_bytes()), dry_run=True).price
        assert price is not None
        assert price.slower > 0  # a hop, if nothing else
        fleet.drop(layers={"r0": range(layers // 2, layers), "r1": range(layers // 2)})
        for request in requests[1:]:
            fleet.submit(request, heard)
        heard.wait([request.id for request in requests])
        assert fleet.restore().status == "applied"
        fleet.check()
    for request in requests:
        assert is_continuation(plain, request.prompt, 60, heard.tokens[request.id])
    for model in models:
        elastic.unwrap(model)
