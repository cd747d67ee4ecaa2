"""What would be compiled or captured without being asked for: a wrapped model runs as it is, or says so in words."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import CompileConfig, StaticCache

import elastic
from elastic import StateError
from elastic.hooks import uncompiled
from support.architectures import build, prompt
from support.wrapped_model import pickled

NEW = 8


def everywhere() -> CompileConfig:
    """Has `generate` compile as it does on a GPU by default."""
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    return config


def generate(model: Any, **options: Any) -> torch.Tensor:
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    return model.generate(**prompt(2, device=model.device), **asked | options)


@pytest.mark.parametrize("mode", [{}, {"prefill_chunk_size": 7}], ids=["greedy", "chunked prefill"])
@pytest.mark.parametrize("architecture", ["llama-gqa", "qwen3", "gemma3", "mistral-sliding", "gpt2"])
def test_generate_with_a_static_cache_runs_uncompiled(architecture: str, mode: dict[str, Any], wrapped: Any) -> None:
    model = build(architecture)
    expected = generate(model, disable_compile=True, **mode)
    wrapped(model)
    assert torch.equal(generate(model, compile_config=everywhere(), **mode), expected)
    assert model.elastic.kv.used_bytes == 0
    assert "_compiled_call" not in vars(model)


@pytest.mark.cuda
def test_generate_with_a_static_cache_runs_uncompiled_on_a_gpu(wrapped: Any) -> None:
    model = build("llama-gqa", device="cuda:0")
    expected = generate(model, disable_compile=True)
    assert torch.equal(generate(wrapped(model)), expected)


def test_a_static_cache_of_the_callers_own_is_left_alone(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = generate(model, disable_compile=True)
    cache = StaticCache(config=model.config, max_cache_len=64)
    wrapped(model)
    options = {"past_key_values": cache, "cache_implementation": None, "compile_config": everywhere()}
    assert torch.equal(generate(model, **options), expected)
    assert cache.get_seq_length() == 24 + NEW - 1


def test_it_is_said_once(wrapped: Any, caplog: pytest.LogCaptureFixture) -> None:
    uncompiled._warn_once.cache_clear()
    model = wrapped(build("llama-gqa"))
    with caplog.at_level(logging.WARNING, "elastic"):
        for _ in range(2):
            generate(model, compile_config=everywhere())
    assert [record.name for record in caplog.records].count("elastic.hooks.uncompiled") == 1
    assert "does not compile a wrapped model" in caplog.text


def test_the_base_model_of_an_adapted_one_runs_uncompiled_too(wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama-gqa"), config).eval().requires_grad_(False)
    expected = generate(model, disable_compile=True)
    assert torch.equal(generate(wrapped(model), compile_config=everywhere()), expected)


@pytest.mark.parametrize("how", ["unwrap", "deepcopy", "pickle"])
def test_what_is_not_wrapped_is_compiled(how: str, wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    if how == "unwrap":
        other = elastic.unwrap(model)
    elif how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        other = pickled(model)
    assert type(other.get_compiled_call(everywhere())) is not type(other.__call__)
    assert "_compiled_call" in vars(other)


@pytest.mark.parametrize("layers", [(), (1,)])
def test_a_trace_is_refused_in_words(layers: tuple[int, ...], wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    model.elastic.release(layers)
    with pytest.raises(StateError, match="cannot be traced; unwrap it first"):
        torch.jit.trace(lambda ids: model(ids, use_cache=False).logits, (prompt()["input_ids"],))  # type: ignore[no-untyped-call]
    assert torch.is_tensor(model(**prompt()).logits)


@pytest.mark.parametrize("layers", [(), (1,)])
def test_a_trace_of_a_layer_alone_is_refused_in_words(layers: tuple[int, ...], wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    expected = model(**prompt()).logits
    model.elastic.release(layers)
    hidden = torch.randn(1, 3, model.config.hidden_size)
    embeddings = model.model.rotary_emb(hidden, torch.arange(3)[None])
    layer = model.model.layers[1]
    with torch.no_grad(), pytest.raises(StateError, match="cannot be traced; unwrap it first"):
        torch.jit.trace(lambda hidden: layer(hidden, position_embeddings=embeddings), (hidden,))  # type: ignore[no-untyped-call]
    assert not model.elastic.gate.inside
    assert torch.equal(model(**prompt()).logits, expected)


def test_a_capture_in_a_cuda_graph_is_refused_in_words(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(build("llama-gqa"))
    for hook in model._forward_pre_hooks.values():
        monkeypatch.setattr(hook, "_gpus", [torch.device("cpu")])  # as if it had a place on a GPU
    monkeypatch.setattr("elastic.hooks.root_hooks.capturing", lambda: True)
    with pytest.raises(StateError, match="CUDA graph"):
        model(**prompt())
    monkeypatch.undo()
    assert torch.is_tensor(model(**prompt()).logits)
