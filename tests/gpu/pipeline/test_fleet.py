"""A fleet of ranks on GPUs that drop layers and take them back while they serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import elastic
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support import architectures
from support.serving.generations import Collector, continuation, prompts

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("simulator")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
TOKENS = 40


@pytest.mark.parametrize("devices", [(0, 0), pytest.param((0, 1), marks=TWO_DEVICES)], ids=["one", "two"])
def test_layers_are_dropped_and_come_back_under_running_requests(devices: tuple[int, ...]) -> None:
    plain = architectures.build("llama-gqa")
    models = [architectures.build("llama-gqa", device=f"cuda:{device}") for device in devices]
    for number, (model, device) in enumerate(zip(models, devices, strict=True)):
        elastic.wrap(model, places=[elastic.Place(f"cuda:{device}#{number}", torch.device("cuda", device), 256 << 20)])
    engine: dict[str, Any] = {"block_tokens": 4096, "max_batch_tokens": 64}
    fleet, heard = Fleet.of(*models, engine=engine, beat_timeout_s=60), Collector()
    fleet.start()
    try:
        expected = {}
        for number, text in enumerate(prompts([5, 40, 17, 12], architectures.VOCAB)):
            expected[f"r{number}"] = continuation(plain, text, TOKENS)
            fleet.submit(Request(text, TOKENS, id=f"r{number}"), heard)
        for name in expected:
            heard.wait_for_tokens(name, 2)
        dropped = fleet.drop(layers={"r0": (1, 2), "r1": (0,)})
        assert (dropped.status, dropped.why) == ("applied", "")
        assert dropped.freed_bytes == sum(fleet.layer_bytes())
        assert [model.elastic.dropped for model in models] == [(1, 2), (0,)]
        fleet.check()
        restored = fleet.restore()
        assert (restored.status, restored.why) == ("applied", "")
        heard.wait(list(expected))
        assert heard.tokens == expected
        assert fleet.status().totals.recomputed_tokens == 0
        fleet.check()
    finally:
        fleet.stop(drain=False)
        for model in models:
            elastic.unwrap(model)
