"""Gradients through a wrapped model are the plain model's, wherever what is trained may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import elastic
from elastic.errors import StateError
from support.architectures import build, prompt

ARCHITECTURES = ["llama-gqa", "mistral-sliding", "gpt2", "gemma3", "deepseek-v3"]


def embeddings(model: Any, **options: Any) -> torch.Tensor:
    """Of a prompt, to be differentiated."""
    found: torch.Tensor = model.get_input_embeddings()(prompt(**options)["input_ids"]).detach()
    return found.requires_grad_()


def assert_same_gradients(model: Any, wrap: Callable[[Any], Any], trained: Callable[[], list[torch.Tensor]]) -> None:
    """Of the loss on a prompt, the model plain and wrapped."""
    found = []
    for make in (lambda plain: plain, wrap):
        loss = make(model)(**prompt(3), labels=prompt(3)["input_ids"]).loss
        found.append(torch.autograd.grad(loss, trained()))
    for ours, theirs in zip(*found, strict=True):
        assert theirs.any()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_embeddings_of_a_frozen_model_get_the_plain_models_gradients(architecture: str, wrapped: Any) -> None:
    model = build(architecture)
    given = embeddings(model, batch=2)
    (expected,) = torch.autograd.grad(model(inputs_embeds=given).logits.square().sum(), given)
    out = wrapped(model)(inputs_embeds=given)
    (gradient,) = torch.autograd.grad(out.logits.square().sum(), given)
    assert torch.equal(gradient, expected)
    assert out.past_key_values.layers[0].keys.requires_grad
    assert model.elastic.kv.used_bytes == 0


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.filterwarnings("ignore:Both .past_key_values. and .cache. are set")  # by PEFT 0.21 and transformers 5.24
@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"])
def test_soft_prompts_outside_the_model_get_the_plain_models_gradients(kind: str, wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    made = {"PROMPT_TUNING": peft.PromptTuningConfig, "P_TUNING": peft.PromptEncoderConfig}
    config = made.get(kind, peft.PrefixTuningConfig)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    torch.manual_seed(0)
    model = peft.get_peft_model(build("llama-gqa"), config).eval()
    assert_same_gradients(model, wrapped, lambda: [p for p in model.parameters() if p.requires_grad])
    ids = model.generate(**prompt(3), max_new_tokens=8, do_sample=False, pad_token_id=0)
    elastic.unwrap(model)
    assert torch.equal(ids, model.generate(**prompt(3), max_new_tokens=8, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize("target", ["q_proj", "v_proj"])
def test_adapters_of_one_projection_get_the_plain_models_gradients(target: str, wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=[target], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama-gqa"), config).eval()
    assert_same_gradients(model, wrapped, lambda: [p for p in model.parameters() if p.requires_grad])


def test_what_a_hook_on_the_embeddings_trains_gets_the_plain_models_gradients(wrapped: Any) -> None:
    model = build("llama-gqa")
    added = torch.zeros(32, requires_grad=True)
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: out + added)
    assert_same_gradients(model, wrapped, lambda: [added])
    cache = DynamicCache()  # makes its layers as they come
    model(**prompt(), past_key_values=cache).logits.sum().backward()
    assert added.grad is not None
    assert type(cache.layers[-1]) is DynamicLayer
    handle.remove()


@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-sliding", "gpt2", "gemma3"])
@pytest.mark.parametrize("kind", [DynamicCache, None], ids=["stock", "elastic"])
def test_a_cache_of_a_generation_goes_on_with_gradients_as_a_stock_one(
    architecture: str, kind: Any, wrapped: Any
) -> None:
    def go_on(model: Any, cache: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        ids = prompt(2)["input_ids"]
        model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
        given = embeddings(model, batch=2, length=5, seed=2)
        out = model(inputs_embeds=given, past_key_values=cache)
        assert out.past_key_values is cache
        (gradient,) = torch.autograd.grad(out.logits.square().sum(), given)
        with torch.no_grad():
            return gradient, model(torch.tensor([[5], [6]]), past_key_values=cache).logits, cache

    model = build(architecture)
    model.set_attn_implementation("eager")  # the same numbers for single tokens, so that caches are equal
    expected = go_on(model, DynamicCache(config=model.config))
    wrapped(model)
    found = go_on(model, kind(config=model.config) if kind else elastic.ElasticCache(model))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2].get_seq_length() == expected[2].get_seq_length() == 24 + 3 + 5 + 1
    for ours, theirs in zip(found[2].layers, expected[2].layers, strict=True):
        assert type(ours) is type(theirs)
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    assert model.elastic.kv.used_bytes == 0


def test_rows_of_a_cache_at_several_places_go_on_with_gradients(wrapped: Any) -> None:
    places = [elastic.Place(name, torch.device("cpu"), 64 << 20, page_bytes=4096) for name in ("cpu#a", "cpu#b")]
    model = build("llama-gqa")
    given = embeddings(model, batch=4, length=5, seed=2)
    with torch.no_grad():
        stock = model(**prompt(4)).past_key_values
    (expected,) = torch.autograd.grad(model(inputs_embeds=given, past_key_values=stock).logits.sum(), given)
    wrapped(model, places)
    model.elastic.replicate([1], "cpu#b")
    with torch.no_grad():
        cache = model(**prompt(4)).past_key_values
    model.elastic.evict([1], "cpu#b")
    (gradient,) = torch.autograd.grad(model(inputs_embeds=given, past_key_values=cache).logits.sum(), given)
    assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert model.elastic.kv.used_bytes == 0


def test_a_later_cache_of_the_model_is_elastic_again(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    model(inputs_embeds=embeddings(model)).logits.sum().backward()
    model(**prompt())
    model.generate(**prompt(), max_new_tokens=3, pad_token_id=0)
    assert model.elastic.status().kv[0].idle_bytes > 0


def test_gradients_of_a_graph_older_than_a_release_are_there_after_it(wrapped: Any) -> None:
    plain, model = build("llama-gqa").requires_grad_(True), wrapped(build("llama-gqa").requires_grad_(True))
    plain(**prompt(3), labels=prompt(3)["input_ids"]).loss.backward()
    loss = model(**prompt(3), labels=prompt(3)["input_ids"]).loss
    model.elastic.release([0])
    loss.backward()
    model.elastic.restore()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("architecture", ["llama-gqa", "gpt2", "qwen3-moe"])
@pytest.mark.parametrize("act", ["release", "swap"])
def test_weights_that_are_not_at_their_place_in_full_refuse_gradients(
    architecture: str, act: str, wrapped: Any
) -> None:
    model = wrapped(build(architecture).requires_grad_(True), variants=("int4",))
    model.elastic.release([1]) if act == "release" else model.elastic.swap([1], "int4")
    out = model(inputs_embeds=(given := embeddings(model))).logits.square().sum()
    assert torch.autograd.grad(out, given, retain_graph=True)[0].any()
    with pytest.raises(StateError, match=r"1, which is in .*, gets no gradient there: .*requires_grad_\(False\)"):
        out.backward()
    model.zero_grad()
    for parameter in model.elastic.weights.slots(1).values():
        parameter.parameter.requires_grad_(False)
    model(inputs_embeds=given).logits.sum().backward()
    assert given.grad.any()
