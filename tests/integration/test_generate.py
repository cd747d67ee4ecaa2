"""The wrapped model writes the plain model's tokens, however it is driven."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BartConfig, BertConfig, DynamicCache, RecurrentGemmaConfig

import elastic
from elastic.kvcache.attention import elastic_attention
from elastic.kvcache.layers.elastic_layer import ElasticLayer
from elastic.weights.decoder import CACHE_NAMES, cache_argument, returned_cache
from support.architectures import CONFIGS, GQA, SMALL, build, in_turn, prompt

NEW = 12
ARCHITECTURES = list(CONFIGS)
PURE_ATTENTION = [name for name in ARCHITECTURES if name != "qwen3-next"]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beam": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sample": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.3},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 7},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
}
KINDS = ["llama-gqa", "gemma3", "deepseek-v3", "qwen3-next"]
"""Of each kind of cache one architecture: full, sliding, latent and linear. With these all modes are tried.

Only greedily both one row alone and several of different lengths: they are several, but where one alone is allowed.
"""
OTHERS = [name for name in ARCHITECTURES if name not in KINDS]
ASSISTED = ["llama-gqa", "gemma2", "gemma3", "deepseek-v3"]
"""Whose caches are full, of both kinds with eager attention, of both kinds, and latent."""


def generate(model: Any, batch: int, **mode: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(
        **prompt(batch, device=model.device), max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, **mode
    )


@pytest.mark.parametrize(("architecture", "mode"), [*itertools.product(KINDS, MODES), *in_turn(OTHERS, list(MODES))])
def test_generate_gives_the_plain_models_tokens(architecture: str, mode: str, wrapped: Any, device: str) -> None:
    if mode == "prompt lookup" and architecture not in PURE_ATTENTION:
        pytest.skip("the stock model cannot roll its linear layers back")
    model = build(architecture, device=device)
    batches = {"greedy": [1, 3], "prompt lookup": [1]}.get(mode, [3])
    expected = [generate(model, batch, **MODES[mode]) for batch in batches]
    wrapped(model)
    for batch, tokens in zip(batches, expected, strict=True):
        assert torch.equal(generate(model, batch, **MODES[mode]), tokens)
    (kv,) = model.elastic.status().kv
    assert kv.used_bytes == 0
    assert kv.idle_bytes > 0, "the elastic cache was not used"


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name in ASSISTED else pytest.mark.long) for name in PURE_ATTENTION],
)
def test_assisted_decoding_gives_the_plain_models_tokens(architecture: str, wrapped: Any, device: str) -> None:
    model, assistant = build(architecture, device=device), build(architecture, seed=3, device=device)
    try:
        expected = generate(model, 1, do_sample=False, assistant_model=assistant)
    except RuntimeError as error:  # of Gemma 2 with eager attention, before transformers 5.23
        pytest.skip(f"the stock model cannot: {error}")
    wrapped(model)
    wrapped(assistant)
    assert torch.equal(generate(model, 1, do_sample=False, assistant_model=assistant), expected)


@pytest.mark.parametrize("layout", ["head_major", "batch_major", "token_major"])
@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-sliding", "deepseek-v3"])
def test_every_layout_gives_the_same_tokens(architecture: str, layout: str, wrapped: Any, device: str) -> None:
    model = build(architecture, device=device)
    if device != "cpu" and layout != "token_major":
        with pytest.raises(elastic.ConfigError, match="token_major"):
            wrapped(model, kv_layout=layout)
        return
    expected = generate(model, 3, do_sample=False, num_beams=2)
    wrapped(model, kv_layout=layout)
    assert torch.equal(generate(model, 3, do_sample=False, num_beams=2), expected)


def test_a_cache_in_large_pages_takes_no_page_for_each_head(device: str) -> None:
    """Two sequences of a layer share one: of keys, and of values."""
    model = build("llama-mha", device=device)
    expected = generate(model, 2, do_sample=False)
    elastic.wrap(model, places=f"{device}=256MiB/2MiB")
    assert torch.equal(generate(model, 2, do_sample=False), expected)
    (kv,) = model.elastic.status().kv
    assert kv.idle_bytes == 2 * model.config.num_hidden_layers * (2 << 20)
    elastic.unwrap(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_each_attention_choice_gives_the_plain_models_logits(attention: str, wrapped: Any, device: str) -> None:
    model = build("llama-mha", device=device)
    model.set_attn_implementation(attention)
    inputs = prompt(3, device=device)
    expected = model(**inputs).logits
    wrapped(model)
    assert torch.equal(model(**inputs).logits, expected)
    assert elastic_attention(model, model.config) == attention


def test_a_plain_loop_needs_no_argument(wrapped: Any, device: str) -> None:
    model = build("llama-gqa", device=device)
    tokens = generate(model, 1, do_sample=False)
    wrapped(model)
    ids, cache = prompt(device=device)["input_ids"], None
    step = ids
    for _ in range(NEW):
        out = model(step, past_key_values=cache)
        cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], dim=1)
    assert torch.equal(ids, tokens)
    assert model.elastic.kv.used_bytes > 0
    assert type(cache) is DynamicCache


@pytest.mark.parametrize("kind", ["bart", "bert"])
def test_a_decoder_that_attends_to_an_encoder_makes_the_cache_that_it_needs(kind: str, wrapped: Any) -> None:
    """Another than without an encoder, whose states a call may be given."""
    crossed = {**SMALL, "is_decoder": True, "add_cross_attention": True}
    sizes = {"d_model": 32, "decoder_attention_heads": 4, "decoder_layers": 2, "decoder_ffn_dim": 48}
    configs = {"bert": BertConfig(**crossed), "bart": BartConfig(**crossed, **sizes, is_encoder_decoder=False)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[kind], dtype=torch.float32).eval().requires_grad_(False)
    seen = {"encoder_hidden_states": torch.randn(2, 5, 32)}

    def two_steps() -> list[torch.Tensor]:
        first = model(**prompt(2), **seen)
        second = model(torch.tensor([[5], [6]]), **{cache_argument(model): returned_cache(first)}, **seen)
        return [first.logits, second.logits]

    expected = two_steps()
    wrapped(model)
    assert all(map(torch.equal, two_steps(), expected))


def test_a_call_without_a_cache_forgets_the_text_before(wrapped: Any) -> None:
    """Also where the model has states of its own, which it begins anew together with the cache that it makes."""
    config = RecurrentGemmaConfig(
        **GQA, head_dim=8, lru_width=32, attention_window_size=16, block_types=["recurrent", "attention"]
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    token = torch.tensor([[5]])
    expected = model(token).logits
    wrapped(model)
    model(**prompt())
    assert torch.equal(model(token).logits, expected)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_model_takes_its_cache_by_either_name(name: str, wrapped: Any) -> None:
    """As models of transformers do since 5.24 and did before, and as code that comes with a checkpoint may."""
    model = build("llama-gqa")
    tokens, own = generate(model, 1, do_sample=False), cache_argument(model)

    class Named(type(model)):  # type: ignore[misc]
        def _call(self, input_ids: Any, given: Any, use_cache: Any, **kwargs: Any) -> Any:
            return super().forward(input_ids, **{own: given}, use_cache=use_cache, **kwargs)

    class Before(Named):
        def forward(
            self, input_ids: Any = None, past_key_values: Any = None, use_cache: Any = None, **more: Any
        ) -> Any:
            return self._call(input_ids, past_key_values, use_cache, **more)

    class Since(Named):
        def forward(self, input_ids: Any = None, cache: Any = None, use_cache: Any = None, **more: Any) -> Any:
            return self._call(input_ids, cache, use_cache, **more)

    model.__class__ = {"past_key_values": Before, "cache": Since}[name]
    wrapped(model)
    ids = step = prompt()["input_ids"]
    cache = None
    for turn in range(NEW):
        out = model(step, cache) if turn % 2 else model(step, **{name: cache})
        assert cache is None or returned_cache(out) is cache
        cache, step = returned_cache(out), out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], dim=1)
    assert torch.equal(ids, tokens)
    assert isinstance(cache.layers[0], ElasticLayer)
    assert isinstance(returned_cache(model(ids, None)).layers[0], ElasticLayer)


def test_an_empty_stock_cache_is_adopted_in_place(wrapped: Any, device: str) -> None:
    model = wrapped(build("llama-gqa", device=device))
    cache = DynamicCache(config=model.config)
    layers = cache.layers
    out = model(**prompt(device=device), past_key_values=cache)
    assert out.past_key_values is cache
    assert cache.layers is not layers
    assert cache.get_seq_length() == 24
    assert model.elastic.kv.used_bytes > 0


def test_a_cache_with_contents_is_left_alone(wrapped: Any, device: str) -> None:
    model = build("llama-gqa", device=device)
    cache = model(**prompt(device=device)).past_key_values
    wrapped(model)
    model(torch.tensor([[5]], device=device), past_key_values=cache)
    assert cache.get_seq_length() == 25
    assert model.elastic.kv.used_bytes == 0


def test_the_base_model_alone_is_elastic_too(wrapped: Any, device: str) -> None:
    model = build("llama-gqa", device=device)
    expected = model.model(**prompt(device=device)).last_hidden_state
    wrapped(model)
    out = model.model(**prompt(device=device))
    assert torch.equal(out.last_hidden_state, expected)
    assert model.elastic.kv.used_bytes > 0


def test_an_explicit_cache_lives_over_several_turns(wrapped: Any, device: str) -> None:
    model = build("mistral-sliding", device=device)
    ids = prompt(length=30, device=device)["input_ids"]
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    more = model.generate(expected, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    wrapped(model)
    cache = elastic.ElasticCache(model)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    first = model.generate(ids, **options)
    assert torch.equal(first, expected)
    assert torch.equal(model.generate(first, **options), more)


def test_pipeline_and_streaming(wrapped: Any, assets: Any, device: str) -> None:
    from transformers import TextStreamer, pipeline

    model, tokenizer = assets
    model.to(device)
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    texts = ["import os\n\ndef main():\n", "class Parser:\n"]
    expected = [writer(text, **options)[0]["generated_text"] for text in texts]
    batched = writer(texts, batch_size=2, **options)
    wrapped(model)
    assert [writer(text, **options)[0]["generated_text"] for text in texts] == expected
    assert writer(texts, batch_size=2, **options) == batched
    pieces: list[str] = []

    class Collector(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)

    ids = tokenizer(texts[0], return_tensors="pt").to(device)
    model.generate(**ids, max_new_tokens=NEW, do_sample=False, streamer=Collector(tokenizer, skip_prompt=True))
    assert "".join(pieces) == expected[0]


def test_training_uses_the_stock_cache(wrapped: Any, device: str) -> None:
    model = wrapped(build("llama-gqa", device=device))
    model.requires_grad_(True)
    out = model(**prompt(device=device), labels=prompt(device=device)["input_ids"])
    out.loss.backward()
    assert model.elastic.kv.used_bytes == 0
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("architecture", ["llama-mha", "llama-gqa", "mistral-sliding", "gpt2"])
def test_bfloat16_stays_within_twice_the_plain_models_error(architecture: str, wrapped: Any, device: str) -> None:
    inputs = prompt(3, device=device)
    exact = build(architecture, device=device).double()(**inputs).logits
    model = build(architecture, dtype=torch.bfloat16, device=device)
    plain = model(**inputs)
    step = torch.full((3, 1), 7, device=device)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long, device=device)], dim=1)
    plain_step = model(step, attention_mask=mask, past_key_values=plain.past_key_values).logits
    ids = torch.cat([inputs["input_ids"], step], dim=1)
    exact_step = build(architecture, device=device).double()(ids, attention_mask=mask).logits[:, -1:]
    wrapped(model)
    out = model(**inputs)
    out_step = model(step, attention_mask=mask, past_key_values=out.past_key_values).logits
    for ours, theirs, true in [(out.logits, plain.logits, exact), (out_step, plain_step, exact_step)]:
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max()


def test_bfloat16_decoding_of_a_trained_model_stays_within_twice_the_plain_error(
    wrapped: Any, assets: Any, device: str
) -> None:
    model, tokenizer = assets
    model.to(device)
    ids = tokenizer('import os\n\ndef read_file(path):\n    """Read a file."""\n' * 6, return_tensors="pt")[
        "input_ids"
    ].to(device)

    def decode(model: Any) -> torch.Tensor:
        out, logits = model(ids[:, :8]), []
        for i in range(8, ids.shape[1]):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values)
            logits.append(out.logits.double())
        return torch.cat(logits, dim=1)

    exact = copy.deepcopy(model).double()(ids).logits[:, 8:]
    model.to(torch.bfloat16)
    plain = decode(model)
    wrapped(model)
    ours = decode(model)
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()
    assert (ours - exact).square().mean() <= 4 * (plain - exact).square().mean()
