"""Caches between two calls of the model give their pages up: page-locked host memory keeps them, bit for bit."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import elastic
from support.architectures import build, prompt

pytestmark = pytest.mark.cuda
HERE = "cuda:0"


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("architecture", ["llama-gqa", "qwen2-sliding", "deepseek-v3"])
def test_a_cache_at_rest_goes_to_the_host_and_comes_back(architecture: str, side: bool, wrapped: Any) -> None:
    """side: it was written on a stream of its own, which may not have got there yet."""
    model, inputs = build(architecture, device=HERE), prompt(2, device=HERE)
    token = torch.full((2, 1), 7, device=HERE)
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(token)), 1)

    def step(cache: Any) -> torch.Tensor:
        return model(token, attention_mask=mask, past_key_values=cache).logits

    expected = step(model(**inputs, use_cache=True).past_key_values)
    rt = wrapped(model).elastic
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
        cache = model(**inputs, use_cache=True).past_key_values
        running = model(**inputs, use_cache=True).past_key_values  # since when the first one rests
    used = rt.kv.used_bytes
    done = rt.kv.resize(used // 2)
    assert (done.status, done.moved_bytes > 0, rt.kv.used_bytes) == ("applied", True, used // 2)
    rt.kv.resize("max")
    moved, stayed = step(cache), step(running)
    assert torch.equal(moved, stayed)
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_goes_to_ordinary_memory_where_the_system_locks_none(wrapped: Any, simulator: ModuleType) -> None:
    model, inputs = build("llama-gqa", device=HERE), prompt(2, device=HERE)
    rt = wrapped(model).elastic
    caches = [model(**inputs, use_cache=True).past_key_values for _ in range(3)]
    before = [cache.layers[0].keys.clone() for cache in caches]
    simulator.fail("cuMemHostAlloc")
    done = rt.kv.resize(rt.kv.used_bytes // 3)
    assert (done.status, done.moved_bytes > 0) == ("applied", True)
    rt.kv.resize("max")
    assert all(torch.equal(cache.layers[0].keys, keys) for cache, keys in zip(caches, before, strict=True))
    rt.check()


def test_weights_return_where_a_cache_was(wrapped: Any) -> None:
    """The restore needs the pages that a released layer left and a cache took."""
    model = build("llama-gqa", device=HERE)
    before = elastic.wrap(model, places=["cuda:0=256MiB"]).elastic.status().places[0]
    elastic.unwrap(model)
    owned = sum(before.owners.values())
    rt = wrapped(model, [elastic.Place("cuda:0#tight", torch.device(HERE), owned + 14 * before.page_bytes)]).elastic
    inputs = prompt(2, device=HERE)
    expected = model(**inputs).logits
    rt.release([0, 1])
    caches = []
    while rt.kv.used_bytes + 6 * before.page_bytes <= rt.kv.capacity_bytes:
        caches.append(model(**inputs, use_cache=True).past_key_values)
    assert len(caches) > 1
    change = rt.restore([0, 1])
    assert change.status == "applied"
    assert rt.form() == ("float32",) * 3
    assert torch.equal(model(**inputs, use_cache=False).logits, expected)
