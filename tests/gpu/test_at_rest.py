"""What a model costs the driver while nothing changes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import elastic
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from support.architectures import VOCAB, build, prompt
from support.child_process import wait_for_the_janitor
from support.serving.generations import prompts, serve

pytestmark = pytest.mark.cuda
PLACE = elastic.Place("cuda:0", torch.device("cuda:0"), 1 << 30)
STOPPING = ("device_sync", "pageable_h2d", "pageable_d2h")
"""Waits for a whole device, and copies that the host waits for."""


def counts(simulator: ModuleType, names: tuple[str, ...]) -> dict[str, int]:
    return {name: simulator.count(name) for name in names}


@pytest.mark.parametrize("architecture", ["llama-gqa", "qwen2-sliding", "deepseek-v3"])
def test_a_decode_step_at_rest_maps_no_page_and_stops_no_device(
    architecture: str, wrapped: Any, simulator: ModuleType
) -> None:
    model = wrapped(build(architecture, device="cuda:0"), places=[PLACE])
    inputs = prompt(2, device="cuda:0")
    given = model(**inputs)
    token = given.logits[:, -1:].argmax(-1)
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(token)), dim=1)
    longer = torch.cat((mask, torch.ones_like(token)), dim=1)
    model(input_ids=token, attention_mask=mask, past_key_values=given.past_key_values)
    wait_for_the_janitor()  # which creates pages ahead of time
    before = counts(simulator, simulator.PAGE_CALLS + STOPPING)
    model(input_ids=token, attention_mask=longer, past_key_values=given.past_key_values)
    assert counts(simulator, simulator.PAGE_CALLS + STOPPING) == before


def test_streamed_layers_stop_no_device(wrapped: Any, simulator: ModuleType) -> None:
    model = wrapped(build("llama-gqa", device="cuda:0"), places=[PLACE])
    inputs = prompt(2, device="cuda:0")
    model.elastic.release([0, 1, 2])
    expected = model(**inputs, use_cache=False).logits.cpu()
    wait_for_the_janitor()  # which creates pages ahead of time
    before = counts(simulator, simulator.PAGE_CALLS + STOPPING)
    logits = model(**inputs, use_cache=False).logits
    assert counts(simulator, simulator.PAGE_CALLS + STOPPING) == before
    assert torch.equal(logits.cpu(), expected)


def test_steps_of_an_engine_at_rest_map_no_page_and_stop_no_device(wrapped: Any, simulator: ModuleType) -> None:
    model = wrapped(build("llama-gqa", device="cuda:0"), places=[PLACE])
    asked, calls = prompts([5, 21], VOCAB), (*simulator.PAGE_CALLS, "device_sync")
    with ContinuousEngine(model, block_tokens=8, max_batch_tokens=64, share_prefixes=False) as engine:
        serve(engine, [Request(text, 12, ignore_eos=True) for text in asked])  # whose blocks are mapped, and free now
        wait_for_the_janitor()
        before = counts(simulator, calls)
        heard = serve(engine, [Request(text, 12, ignore_eos=True) for text in asked])
        assert counts(simulator, calls) == before
    assert [len(tokens) for tokens in heard.tokens.values()] == [12, 12]
