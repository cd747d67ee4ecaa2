"""What the hooks tell about plain `generate`: a cache is a request."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers as t

from elastic.hooks.request_tracking import CacheRequestTracker
from support.architectures import build, prompt
from support.child_process import wait_for_the_janitor


def traffic(model: Any) -> Any:
    gc.collect()
    wait_for_the_janitor()
    return model.elastic.counters.read()


def test_a_generation_is_a_request(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    out = model.generate(**prompt(2), max_new_tokens=7, min_new_tokens=7, do_sample=False)
    length = prompt(2)["input_ids"].shape[1]
    assert out.shape[1] == length + 7
    seen = traffic(model)
    assert (seen.arrived, seen.completed, seen.running, seen.waiting) == (1, 1, 0, 0)
    assert (seen.prompt_tokens, seen.generated_tokens) == (2 * length, 14)
    assert (seen.ttft_s.count, seen.itl_s.count, seen.tpot_s.count) == (1, 6, 1)
    assert seen.ttft_s.mean is not None
    assert seen.tpot_s.mean is not None
    assert seen.ttft_s.mean > 0
    assert seen.tpot_s.mean == pytest.approx(seen.itl_s.mean)


def test_it_lives_as_long_as_its_cache(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    caches = [t.DynamicCache(config=model.config) for _ in range(3)]
    for cache in caches:
        model(**prompt(1), past_key_values=cache)
    model(torch.ones(1, 1, dtype=torch.long), past_key_values=caches[1])
    seen = traffic(model)
    assert (seen.arrived, seen.running, seen.completed, seen.generated_tokens) == (3, 3, 0, 4)
    del caches[0], cache
    seen = traffic(model)
    assert (seen.running, seen.completed) == (2, 1)
    del caches
    assert traffic(model).completed == 3


def test_a_forward_that_fails_ends_it_and_the_next_one_is_another(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    cache = t.DynamicCache(config=model.config)

    def fails(*args: Any) -> None:
        raise RuntimeError("in the middle")

    handle = model.model.layers[1].register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(**prompt(1), past_key_values=cache)
    handle.remove()
    seen = traffic(model)
    assert (seen.arrived, seen.failed, seen.running, seen.generated_tokens) == (1, 1, 0, 0)
    model(**prompt(1), past_key_values=cache)
    seen = traffic(model)
    assert (seen.arrived, seen.failed, seen.running, seen.generated_tokens) == (2, 1, 1, 1)


def test_an_engine_that_counts_by_itself_switches_it_off(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    first, second = model.elastic.occupy("a"), model.elastic.occupy("b")
    first.end()  # as an engine that was dropped, under the next one
    model.generate(**prompt(1), max_new_tokens=3, do_sample=False)
    assert traffic(model).arrived == 0
    second.end()
    model.generate(**prompt(1), max_new_tokens=3, do_sample=False)
    assert traffic(model).arrived == 1


def test_embeddings_and_forwards_without_a_cache(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    model(inputs_embeds=model.get_input_embeddings()(prompt(3)["input_ids"]))
    model(**prompt(3), use_cache=False)
    seen = traffic(model)
    assert (seen.arrived, seen.completed, seen.generated_tokens) == (1, 1, 3)


class Cache:
    """Anything that can be referred to weakly."""


class Tells:
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.heard.append((name, *args[1:2]))


def test_nothing_is_remembered_while_nobody_observes() -> None:
    observer, users, cache = Tells(), ["an engine"], Cache()
    generations = CacheRequestTracker(observer, users)  # type: ignore[arg-type]
    assert generations.begin(cache, torch.ones(2, 3, dtype=torch.long)) is None
    users.clear()
    assert generations.begin(cache, None) is None
    assert generations.begin(cache, torch.ones(3)) is None
    assert observer.heard == []
    request = generations.begin(cache, torch.ones(2, 3, dtype=torch.long))
    assert generations.begin(cache, torch.ones(2, 1, dtype=torch.long)) == request
    assert request is not None
    generations.end(cache, request, failed=False)
    assert [name for name, *_ in observer.heard] == ["arrived", "scheduled", "produced"]
    assert observer.heard[2] == ("produced", 2)
    users.append("one that came meanwhile")
    generations.end(cache, request, failed=True)
    assert len(observer.heard) == 3
