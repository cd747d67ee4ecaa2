"""Keys and values in 8 bits on a GPU: what is rounded and written on one stream is read on another in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic.engines.base import Request
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.executor.block_layout import Int8Blocks, layout_of
from support import architectures
from support.cluster.engine_group import EngineGroup
from support.serving.generations import Collector, prompts, serve
from support.serving.tracked_engine import TrackedEngine

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
PROMPTS = prompts([9, 40, 17, 5], architectures.VOCAB)
NAMES = [f"r{number}" for number in range(len(PROMPTS))]
TOKENS = 20
ENGINE: dict[str, Any] = {"nbytes": 256 << 20, "block_tokens": 26214, "kv_cache_dtype": "int8"}
"""Blocks of 2**15 places with their scales, so large that each request or two need a sector of their own."""


def requests() -> list[Request]:
    return [Request(prompt, TOKENS, id=name) for name, prompt in zip(NAMES, PROMPTS, strict=True)]


def alone(architecture: str) -> dict[str, list[int]]:
    """The tokens of an engine on the CPU that computes all layers by itself."""
    tracked = TrackedEngine(architectures.build(architecture), kv_cache_dtype="int8")
    try:
        return serve(tracked.engine, requests()).tokens
    finally:
        tracked.close()


def near(heard: dict[str, list[int]], expected: dict[str, list[int]]) -> bool:
    """Whether most first tokens are those of the CPU: another rounding may turn a nearly equal choice."""
    return sum(heard[name][:3] == expected[name][:3] for name in NAMES) >= len(NAMES) - 1


@pytest.fixture(params=[("cuda:0",), pytest.param(("cuda:0", "cuda:1"), marks=TWO_DEVICES)], ids=["one", "two"])
def ranks(request: pytest.FixtureRequest) -> Iterator[EngineGroup]:
    made = EngineGroup("ab", devices=request.param, wrap={"shards": 2}, **ENGINE)
    yield made
    made.close()


@pytest.mark.parametrize("layout", ["head_centric", "token_major"])
def test_blocks_hold_on_a_gpu_what_they_hold_on_a_cpu(layout: str) -> None:
    """Written and read there, bit for bit: values, and the scales behind them."""
    form = KVFormat(12, layout, "int8", 2, 16, (((0,), None),))
    blocks = layout_of(form, torch.float32)
    assert isinstance(blocks, Int8Blocks)
    fill = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 20, 16, generator=fill) for _ in range(2))
    numbers, offsets = torch.arange(20) // 12, torch.arange(20) % 12
    found = []
    for device in ("cpu", "cuda:0"):
        cache = torch.zeros(2 * blocks.block_elements, dtype=torch.int8, device=device)
        places = blocks.parts(torch.zeros(1, dtype=torch.int64, device=device)).places
        index = blocks.write_index(numbers.to(device), offsets.to(device), places)
        blocks.write(cache, index, keys.to(device), values.to(device))
        found.append(cache.cpu())
    assert found[0].any()
    assert torch.equal(*found)


@pytest.mark.parametrize("architecture", ["llama-gqa", "gemma3"])
def test_an_engine_answers_as_on_a_cpu(architecture: str) -> None:
    tracked = TrackedEngine(architectures.build(architecture, device="cuda:0"), **ENGINE)
    try:
        heard = serve(tracked.engine, requests()).tokens
    finally:
        tracked.close()
    assert near(heard, alone(architecture))


def test_shards_and_layers_go_to_another_rank_and_come_back(ranks: EngineGroup) -> None:
    ranks.join("a", "b")
    heard = Collector()
    for request in requests():
        ranks["a"].submit(request, heard)
    heard.wait_for_tokens("r3", 3)
    ranks.move("a", (1, 4, 5), "b")
    ranks.check()
    heard.wait_for_tokens("r3", TOKENS // 2)
    ranks.part("a")
    heard.wait(NAMES)
    assert near(heard.tokens, alone("llama-gqa"))
    assert ranks.tracked["a"].computed == sum(len(prompt) + TOKENS - 1 for prompt in PROMPTS)
