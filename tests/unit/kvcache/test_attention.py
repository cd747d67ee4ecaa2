"""A wrapped model attends by our function, and nothing but the model itself knows: its config says what it said."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as t
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt_oss import modeling_gpt_oss

import elastic
from elastic import ConfigError
from elastic.engines.continuous import ContinuousEngine
from elastic.kvcache import attention
from elastic.kvcache.attention import elastic_attention, elastic_sdpa
from support.architectures import MLA, SMALL, VOCAB, build, prompt
from support.child_process import wait_for_the_janitor
from support.wrapped_model import pickled


def from_config(config: Any) -> Any:
    return t.AutoModelForCausalLM.from_config(config).eval()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "its config": lambda model: from_config(model.config),
    "a copy of its config": lambda model: from_config(copy.deepcopy(model.config)),
    "a pickle of its config": lambda model: from_config(pickled(model.config)),
    "its class": lambda model: type(model)(model.config).eval(),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules that attend by our function."""
    found: list[Any] = []
    ours = attention.elastic_sdpa
    monkeypatch.setattr(
        attention, "elastic_sdpa", lambda module, *a, **k: found.append(module) or ours(module, *a, **k)
    )
    return found


@pytest.mark.parametrize("how", COPIES)
def test_what_is_made_of_a_wrapped_model_attends_by_the_stock_function(
    how: str, wrapped: Any, calls: list[Any]
) -> None:
    model = wrapped(build("llama-gqa"))
    other = COPIES[how](model)
    assert other.config._attn_implementation == "sdpa"
    other.generate(**prompt(), max_new_tokens=3, pad_token_id=0)
    assert not calls
    model.generate(**prompt(), max_new_tokens=3, pad_token_id=0)
    assert set(calls) == {layer.self_attn for layer in model.model.layers}


def test_a_config_saved_while_wrapped_names_no_attention_of_ours(wrapped: Any, tmp_path: Any) -> None:
    model = wrapped(build("llama-gqa"))
    model.save_pretrained(tmp_path)
    assert "elastic" not in (tmp_path / "config.json").read_text()
    assert "elastic" not in str(vars(model.config))


@pytest.mark.parametrize("how", [None, "deepcopy", "pickle"])
def test_generate_batch_goes_on_working(how: str | None, wrapped: Any) -> None:
    def answers(model: Any) -> list[list[int]]:
        generation = t.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
        asked = [prompt(length=n, seed=n)["input_ids"][0].tolist() for n in (5, 12, 20)]
        settings = t.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64, max_requests_per_batch=4)
        settings.page_size = settings.block_size = 16  # the older versions' name
        found = model.generate_batch(asked, generation, settings, progress_bar=False)
        return [found[name].generated_tokens for name in sorted(found)]

    model = build("llama-gqa")
    expected = answers(model)
    assert all(len(tokens) == 8 for tokens in expected)
    wrapped(model)
    assert answers(model if how is None else COPIES[how](model)) == expected


def test_models_that_look_at_the_name_of_their_attention_go_on_as_before(wrapped: Any) -> None:
    torch.manual_seed(0)
    config = t.DeepseekV32Config(**SMALL, **MLA, index_topk=4, index_n_heads=2, index_head_dim=8)
    model = t.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    assert model.config._attn_implementation == "sdpa"
    expected = model(**prompt(2)).logits
    torch.testing.assert_close(wrapped(model)(**prompt(2)).logits, expected)


def test_the_choice_of_another_attention_holds_while_wrapped(wrapped: Any, calls: list[Any]) -> None:
    model = wrapped(build("llama-gqa"))
    model.set_attn_implementation("eager")
    model(**prompt())
    assert not calls
    assert elastic_attention(model, model.config) != "sdpa"
    assert not model.elastic.kv.memory.attention_follows()
    model.set_attn_implementation("sdpa")
    model(**prompt())
    assert calls
    assert elastic_attention(model, model.config) == "sdpa"
    assert model.elastic.kv.memory.attention_follows()


def test_latents_are_brought_to_the_weights_that_expand_them(wrapped: Any) -> None:
    """Those of MLA, which the model makes keys and values of before it attends."""
    model = wrapped(build("deepseek-v3"))
    assert elastic_attention(model, model.config) == "sdpa"
    assert not model.elastic.kv.memory.attention_follows()


def test_replicas_attend_as_their_layers_do(wrapped: Any, calls: list[Any]) -> None:
    places = [elastic.Place(name, torch.device("cpu"), 64 << 20, page_bytes=4096) for name in ("cpu#a", "cpu#b")]
    model = wrapped(build("llama-gqa"), places)
    model.elastic.replicate([1], "cpu#b")
    model.generate(**prompt(4), max_new_tokens=3, pad_token_id=0)
    assert len({id(module) for module in calls}) == 4


def test_the_last_model_that_is_unwrapped_leaves_the_stock_function(wrapped: Any) -> None:
    models = [build("llama-gqa"), build("gpt2")]
    place = elastic.Place("cpu#shared", torch.device("cpu"), 64 << 20, page_bytes=4096)
    for model in models:
        wrapped(model, place)
    elastic.unwrap(models[0])
    assert elastic_attention(models[0], models[0].config) != "sdpa"
    assert elastic_attention(models[1], models[1].config) == "sdpa"
    elastic.unwrap(models[1])
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward


def test_a_model_that_is_gone_leaves_the_stock_functions_too() -> None:
    stock, model = modeling_gpt_oss.eager_attention_forward, build("gpt-oss")
    elastic.wrap(model, places=[elastic.Place("cpu#gone", torch.device("cpu"), 64 << 20, page_bytes=4096)])
    assert AttentionInterface()["sdpa"] is not sdpa_attention_forward
    assert modeling_gpt_oss.eager_attention_forward is not stock
    del model
    gc.collect()
    wait_for_the_janitor()
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    assert modeling_gpt_oss.eager_attention_forward is stock


def test_the_last_model_of_a_kind_that_is_unwrapped_leaves_its_eager_function(wrapped: Any) -> None:
    stock = modeling_gpt_oss.eager_attention_forward
    models = [build("gpt-oss"), build("gpt-oss"), build("gemma2")]
    place = elastic.Place("cpu#shared", torch.device("cpu"), 64 << 20, page_bytes=4096)
    for model in models:
        wrapped(model, place)
    assert modeling_gpt_oss.eager_attention_forward is not stock
    assert elastic_attention(models[0], models[0].config) == "eager"
    elastic.unwrap(models[0])
    assert elastic_attention(models[0], models[0].config) is None
    assert elastic_attention(models[1], models[1].config) == "eager"
    assert modeling_gpt_oss.eager_attention_forward is not stock
    elastic.unwrap(models[1])
    assert modeling_gpt_oss.eager_attention_forward is stock


def test_what_another_library_makes_of_an_eager_function_is_left_alone(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", modeling_gpt_oss.eager_attention_forward)
    expected, model = build("gpt-oss")(**prompt()).logits, wrapped(build("gpt-oss"))
    ours, theirs = modeling_gpt_oss.eager_attention_forward, []

    def attend(*args: Any, **kwargs: Any) -> Any:
        theirs.append(args[0])
        return ours(*args, **kwargs)

    modeling_gpt_oss.eager_attention_forward = attend
    assert torch.equal(model(**prompt()).logits, expected)
    elastic.unwrap(model)
    assert modeling_gpt_oss.eager_attention_forward is attend
    assert torch.equal(model(**prompt()).logits, expected)
    assert len(theirs) == 6
    ContinuousEngine(wrapped(model)).stop()


class Attends:
    """An engine's cache that says what it was given."""

    def attend(self, layer: int, query: Any, key: Any, value: Any, scaling: Any, terms: Any = None) -> Any:
        self.terms = terms
        return query.transpose(1, 2)


STATES = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8)


def test_an_engines_cache_is_given_the_terms_of_scores_and_none_where_there_are_none() -> None:
    module: Any = torch.nn.Module()
    module.layer_idx, cache, sinks = 0, Attends(), torch.ones(4)
    elastic_sdpa(module, *STATES, None, paged_cache=cache, softcap=None, s_aux=None, position_bias=None)
    assert cache.terms is None
    elastic_sdpa(module, *STATES, torch.ones(1, 1, 1, 1), paged_cache=cache, softcap=5.0, s_aux=sinks, sliding_window=3)
    assert (cache.terms.softcap, cache.terms.sinks) == (5.0, sinks)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1, 1, 2, 2)}, "masks that the model makes"),
        ({"position_bias": torch.ones(1, 4, 2, 2)}, "biases of positions"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(given: dict[str, Any], words: str) -> None:
    module: Any = torch.nn.Module()
    module.layer_idx = 0
    with pytest.raises(ConfigError, match=words):
        elastic_sdpa(module, *STATES, **{"attention_mask": None, "paged_cache": Attends(), **given})


def test_what_another_library_registered_as_sdpa_is_left_alone(wrapped: Any) -> None:
    theirs: list[Any] = []

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        theirs.append(module)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("sdpa", attend)
    try:
        model = wrapped(build("llama-gqa"))
        model.generate(**prompt(), max_new_tokens=3, pad_token_id=0)
        assert theirs
        assert not model.elastic.kv.memory.attention_follows()
        elastic.unwrap(model)
        assert AttentionInterface()["sdpa"] is attend
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_plain_model_is_compiled_whole_beside_a_wrapped_one(attention: str, wrapped: Any) -> None:
    for name in ("llama-gqa", "gpt2"):
        wrapped(build(name), elastic.Place(f"cpu#{name}", torch.device("cpu"), 16 << 20, page_bytes=4096))
    plain = build("gpt2")
    plain.set_attn_implementation(attention)
    expected = plain(torch.arange(3, VOCAB)[None], use_cache=False).logits
    compiled = torch.compile(plain, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.arange(3, VOCAB)[None], use_cache=False).logits, expected)
