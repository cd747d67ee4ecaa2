"""Continuous batching on a GPU: what the engine writes on one stream and reads on another is in order."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import elastic
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from support import architectures
from support.serving.generations import Collector, prompts, same_unless_close, serve
from support.serving.tracked_engine import TrackedEngine


@pytest.mark.cuda
def test_requests_go_on_after_a_forward_pass_that_failed(simulator: ModuleType, wrapped: Any) -> None:
    model = architectures.build("llama-gqa", device="cuda:0")
    wrapped(model, [elastic.Place("cuda:0", torch.device("cuda:0"), 1 << 30)])
    asked = prompts([9, 40], architectures.VOCAB)
    with ContinuousEngine(model, block_tokens=8, max_batch_tokens=64) as engine:
        before = [Request(p, 6) for p in asked]
        expected = serve(engine, before)

        def fail(*_: Any) -> None:
            handle.remove()
            raise RuntimeError("half way")

        handle = model.model.layers[1].register_forward_hook(fail)
        failed = Request(asked[1], 6)
        assert serve(engine, [failed]).ends[failed.id].finish == "failed"
        assert torch.cuda.default_stream("cuda:0").query(), "the step still writes blocks that are free now"
        again = [Request(p, 6) for p in asked]
        heard = serve(engine, again)
    for old, new in zip(before, again, strict=True):
        assert heard.tokens[new.id] == expected.tokens[old.id]


@pytest.mark.cuda
@pytest.mark.usefixtures("no_violations")
def test_a_prompt_is_shared_by_the_weights_that_computed_it(wrapped: Any) -> None:
    """Blocks of other weights lie beside those that are written, and what the full ones have computed serves all."""
    prompt, tokens = prompts([80], architectures.VOCAB)[0], 8
    places = [elastic.Place("cuda:0", torch.device("cuda:0"), 1 << 30)]
    model = wrapped(architectures.build("llama-gqa", device="cuda:0"), places, variants=["int8"])
    rt, found = model.elastic, list[tuple[list[int], int | None]]()
    with ContinuousEngine(model, block_tokens=8, max_batch_tokens=64) as engine:
        for layers in ((0, 1, 2), (0, 1, 2), (1,), (), (), (1,), (0, 1, 2)):
            rt.restore()
            if layers:
                rt.swap(layers, "int8")
            heard = serve(engine, [request := Request(prompt, tokens, ignore_eos=True)])
            found.append((heard.tokens[request.id], heard.first[request.id].cached_tokens))
    assert [cached for _, cached in found] == [0, 72, 0, 0, 72, 72, 72]
    assert found[0][0] == found[1][0]
    plain = architectures.build("llama-gqa")
    assert all(same_unless_close(plain, prompt, got) for got, _ in found[3:5])


@pytest.mark.cuda
@pytest.mark.usefixtures("no_violations")
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama-gqa", "eager"),
        ("gemma2", "eager"),
        ("gpt-oss", "eager"),
        ("deepseek-v3", "sdpa"),
        ("deepseek-v3", "eager"),
    ],
)
def test_softcaps_sinks_and_short_values_are_right_while_weights_leave_and_return(
    name: str, attention: str, wrapped: Any
) -> None:
    """Sinks lie in pages that leave with their layer; eager functions are tried on the stream of the first step."""
    model = architectures.build(name, device="cuda:0")
    model.set_attn_implementation(attention)
    rt = wrapped(model, [elastic.Place("cuda:0", torch.device("cuda:0"), 1 << 30)]).elastic
    heard, requests = Collector(), [Request(p, 20, ignore_eos=True) for p in prompts([9, 40, 70], architectures.VOCAB)]
    with ContinuousEngine(model, block_tokens=8, max_batch_tokens=64) as engine:
        for request in requests:
            engine.submit(request, heard)
        heard.wait_for_tokens(requests[2].id, 3)
        rt.release([0, 1])
        heard.wait_for_tokens(requests[2].id, 8)
        rt.restore()
        heard.wait([request.id for request in requests])
    plain = architectures.build(name)
    for request in requests:
        assert len(heard.tokens[request.id]) == 20
        assert same_unless_close(plain, request.prompt, heard.tokens[request.id])


@pytest.mark.cuda
@pytest.mark.usefixtures("no_violations")
def test_a_request_comes_from_a_cpu_with_its_keys_and_values() -> None:
    """They are copied from the memory file of a rank on the CPU, and what computes with them is behind the copy."""
    (prompt,), tokens = prompts([40], architectures.VOCAB), 30
    here = TrackedEngine(architectures.build("llama-gqa"))
    there = TrackedEngine(architectures.build("llama-gqa", device="cuda:0"), 256 << 20)
    heard, request = Collector(), Request(prompt, tokens, ignore_eos=True)
    here.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 3)
    states, kv = here.engine.moves.hand_over(request.id)
    there.engine.moves.receive(states, kv, here.sources_of(kv))
    there.engine.adopt(states, heard, kv=kv)
    here.engine.moves.release(request.id)
    heard.wait([request.id])
    assert len(heard.tokens[request.id]) == tokens
    assert same_unless_close(architectures.build("llama-gqa"), prompt, heard.tokens[request.id])
    assert here.computed + there.computed == len(prompt) + tokens - 1, "nothing is computed again"
    for each in (here, there):
        each.close()
