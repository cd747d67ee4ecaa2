"""Under autocast keys and values have different dtypes, and a cache may be used in and out of it."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from support.architectures import build, in_turn, prompt

NEW = 8
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "chunked prefill": {"prefill_chunk_size": 7},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


def autocast(dtype: torch.dtype | None = torch.bfloat16) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def plain_attention(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose attention is the same wrapped or not: its numbers differ only if its cache does."""
    model = build(architecture, dtype)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("driven", "dtype"),
    in_turn(itertools.product(MODES, ["llama-gqa", "mistral-sliding", "gemma3"]), [torch.float32, torch.float16]),
    ids=str,
)
def test_generate_under_autocast_gives_the_plain_models_tokens(
    driven: tuple[str, str], dtype: torch.dtype, wrapped: Any
) -> None:
    mode, architecture = driven

    def generate() -> torch.Tensor:
        batch = 1 if mode == "prompt lookup" else 3
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **MODES[mode]}
        with autocast():
            tokens: torch.Tensor = model.generate(**prompt(batch), **options)
        return tokens

    model = plain_attention(architecture, dtype)
    expected = generate()
    wrapped(model)
    assert torch.equal(generate(), expected)
    assert model.elastic.kv.used_bytes == 0
    assert model.elastic.status().kv[0].idle_bytes > 0, "the elastic cache was not used"


@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-sliding"])
@pytest.mark.parametrize(
    "dtypes",
    [(None, torch.bfloat16, None), (torch.bfloat16, None, torch.bfloat16), (torch.bfloat16, torch.float16, None)],
    ids=["in the middle", "at both ends", "two kinds"],
)
def test_one_cache_in_and_out_of_autocast_is_the_stock_one(
    architecture: str, dtypes: tuple[torch.dtype | None, ...], wrapped: Any
) -> None:
    def logits(cache: Any) -> torch.Tensor:
        found = []
        for turn, dtype in enumerate(dtypes):
            with autocast(dtype):
                found.append(model(prompt(2, 9, seed=turn)["input_ids"], past_key_values=cache).logits.float())
        return torch.cat(found, dim=1)

    model = plain_attention(architecture)
    stock = DynamicCache(config=model.config)
    try:
        expected = logits(stock)
    except RuntimeError as error:  # since transformers 5.24: autocast joins no bfloat16 to float16
        pytest.skip(f"the stock cache cannot: {error}")
    wrapped(model)
    cache = DynamicCache(config=model.config)
    assert torch.equal(logits(cache), expected)
    assert model.elastic.kv.used_bytes > 0
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        for name in ("keys", "values"):
            held, known = getattr(ours, name), getattr(theirs, name)
            assert held.dtype == known.dtype
            assert torch.equal(held[:, :, -known.shape[2] :], known)


def test_attention_under_autocast_stays_within_twice_the_plain_models_error(wrapped: Any) -> None:
    ids = torch.cat([prompt(3)["input_ids"], torch.full((3, 1), 7)], dim=1)
    mask = torch.cat([prompt(3)["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)

    def step(model: Any) -> torch.Tensor:
        with autocast():
            cache = model(**prompt(3)).past_key_values
            logits: torch.Tensor = model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits
        return logits

    model = build("llama-gqa")
    exact = build("llama-gqa").double()(ids, attention_mask=mask).logits[:, -1:]
    plain = step(model)
    assert (step(wrapped(model)) - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_accelerates_mixed_precision_gives_the_plain_models_tokens(wrapped: Any) -> None:
    from accelerate import Accelerator

    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(plain_attention("llama-gqa"))
    expected = model.generate(**prompt(3), **options)
    assert torch.equal(wrapped(model).generate(**prompt(3), **options), expected)


def test_a_cache_that_is_empty_again_takes_any_dtype(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    cache = DynamicCache(config=model.config)
    with autocast():
        model(**prompt(), past_key_values=cache)
    assert [cache.layers[0].keys.dtype, cache.layers[0].values.dtype] == [torch.float32, torch.bfloat16]
    cache.reset()
    model(**prompt(), past_key_values=cache)
    assert [cache.layers[0].keys.dtype, cache.layers[0].values.dtype] == [torch.float32, torch.float32]
