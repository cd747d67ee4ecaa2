"""Two GPUs, with access to each other's memory or without: weights, caches and rows travel, and tokens stay the same.

Without access: `SIMCUDA_P2P=0`.
"""

from __future__ import annotations

import random
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.memory import copy_engine
from elastic.memory.backends.peers import can_access, reachable
from support.architectures import VOCAB, build, prompt
from support.child_process import in_child
from support.serving.generations import Collector, prompts, same_unless_close
from support.wrapped_model import assert_same_bits, bits, modules_of

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("no_violations"),
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device"),
]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def two_devices() -> list[elastic.Place]:
    return [elastic.Place(f"cuda:{i}", torch.device("cuda", i), 1 << 30) for i in range(2)]


def test_modules_travel_between_devices_bit_for_bit(wrapped: Any) -> None:
    torch.cuda.set_device(0)
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    before, expected, tokens = bits(model), model(**inputs).logits, model.generate(**inputs, **GREEDY)
    rt = wrapped(model, two_devices()).elastic
    choose = random.Random(0)
    for _ in range(6):
        module = choose.choice([name for layer in range(3) for name in modules_of(model, layer)])
        rt.migrate(module, choose.choice(["cuda:0", "cuda:1"]), kv=choose.random() < 0.5)
        assert torch.equal(model(**inputs).logits, expected)
        assert torch.cuda.current_device() == 0
    assert torch.equal(model.generate(**inputs, **GREEDY), tokens)
    rt.migrate([0, 1, 2], "cuda:1")
    assert torch.equal(model.generate(**inputs, **GREEDY), tokens)
    rt.migrate([0, 1, 2], "cuda:0")
    assert_same_bits(model, before)


def test_layers_go_to_another_device_as_the_model_is_wrapped_and_return(wrapped: Any) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    before, expected = bits(model), model(**inputs).logits
    rt = wrapped(model, two_devices()[::-1], placement="auto").elastic
    assert {where.place for layer in rt.status().residencies.values() for where in layer} == {"cuda:1"}
    assert torch.equal(model(**inputs).logits, expected)
    elastic.unwrap(model)
    assert_same_bits(model, before)


def test_a_cache_travels_between_devices_in_mid_generation(wrapped: Any) -> None:
    model, inputs = build("mistral-sliding", device="cuda:0"), prompt(2, device="cuda:0")
    tokens = model.generate(**inputs, **GREEDY)
    rt = wrapped(model, two_devices()).elastic
    first = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 3}, return_dict_in_generate=True)
    cache = first.past_key_values
    rt.migrate_kv([0, 2], "cuda:1")
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long, device="cuda:0")], 1)
    rest = model.generate(
        first.sequences, attention_mask=mask, past_key_values=cache, **{**GREEDY, "max_new_tokens": 5}
    )
    assert torch.equal(rest, tokens)


def test_rows_are_computed_by_replicas_on_another_device(wrapped: Any) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(4, device="cuda:0")
    tokens = model.generate(**inputs, **GREEDY)
    rt = wrapped(model, two_devices()).elastic
    rt.replicate([0, 1], "cuda:1")
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **GREEDY), tokens)
    rt.evict([0, 1], "cuda:1")
    assert torch.equal(model.generate(**inputs, **GREEDY), tokens)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "deepseek-v3"])
def test_layers_on_another_device_than_their_blocks_attend_as_at_home(
    name: str, wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys, values and sinks travel to the blocks, by a detour if need be: sinks come from pages."""
    model, travelled = build(name, device="cuda:0"), list[torch.Size]()

    def noted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        travelled.append(tensor.shape)
        return reachable(tensor, device)

    monkeypatch.setattr(copy_engine, "reachable", noted)
    rt = wrapped(model, two_devices()).elastic
    heard, requests = Collector(), [Request(text, 16, ignore_eos=True) for text in prompts([9, 40], VOCAB)]
    with ContinuousEngine(model, block_tokens=8, max_batch_tokens=64) as engine:
        engine.submit(requests[0], heard)
        heard.wait_for_tokens(requests[0].id, 3)
        rt.migrate([0, 1], "cuda:1", kv=False)
        travelled.clear()
        engine.submit(requests[1], heard)
        heard.wait([request.id for request in requests])
    assert (torch.Size([4]) in travelled) == (name == "gpt-oss")
    plain = build(name)
    assert all(same_unless_close(plain, request.prompt, heard.tokens[request.id]) for request in requests)


def test_a_detour_is_taken_where_devices_have_no_access() -> None:
    tensor = torch.arange(3, device="cuda:0")
    brought = reachable(tensor, torch.device("cuda:1"))
    assert (brought is tensor) == can_access(0, 1)
    assert brought.tolist() == [0, 1, 2]
    assert reachable(tensor, torch.device("cuda:0")) is tensor


ALONE = """
    import sys
    import torch
    sys.path[:0] = {paths!r}
    import elastic
    from elastic.engines.base import Request
    from elastic.engines.continuous import ContinuousEngine
    from support.architectures import VOCAB, build, prompt
    from support.serving.generations import prompts, serve

    model, inputs = build("llama-gqa", device="cuda:1"), prompt(2, device="cuda:1")
    model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert not torch._C._cuda_hasPrimaryContext(0)
    rt = elastic.wrap(model, places=["cuda:1#a=256MiB", "cuda:1#b=256MiB"], variants=["int8"]).elastic
    resting, running = (model(**inputs).past_key_values for _ in range(2))

    def answer():
        with ContinuousEngine(model, block_tokens=8, max_batch_tokens=64) as engine:
            serve(engine, [Request(text, 4) for text in prompts([5, 9], VOCAB)])

    steps = {{
        "swap": lambda: rt.swap([0], "int8"),
        "release": lambda: rt.release([2]),
        "migrate": lambda: rt.migrate([1], "cuda:1#b", kv=False),
        "generate": lambda: model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0),
        "save": model.state_dict,
        "restore": lambda: (rt.restore(), rt.migrate([1], "cuda:1#a")),
        "replicate": lambda: (rt.replicate([1], "cuda:1#b"), model(**inputs), rt.evict([1], "cuda:1#b")),
        "resize": lambda: rt.kv.resize(rt.kv.used_bytes // 2),
        "return": lambda: (rt.kv.resize("max"), model(inputs["input_ids"][:, :1], past_key_values=resting)),
        "serve": answer,
        "unwrap": lambda: elastic.unwrap(model),
    }}
    for name, step in steps.items():
        step()
        assert not torch._C._cuda_hasPrimaryContext(0), name
"""


def test_a_model_on_one_device_takes_no_memory_of_the_other() -> None:
    """A context takes some hundred MiB; torch makes one on the present device for many an innocent question."""
    in_child(textwrap.dedent(ALONE).format(paths=[str(Path(__file__).parents[2])]))
