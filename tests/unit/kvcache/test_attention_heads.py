"""What a config says of heads, and of a token in a cache, against the cache that the model itself makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t

from elastic.kvcache.attention_heads import attention_heads, cached_elements
from support.architectures import CONFIGS, SMALL

FALCONS: list[dict[str, Any]] = [
    {},
    {"multi_query": False},
    {"new_decoder_architecture": True, "num_kv_heads": 2},
]


def cached(config: Any) -> list[int | None]:
    """The elements of a token in each layer of the model's own cache; None: it has no keys."""
    model = t.AutoModelForCausalLM.from_config(config).eval()
    layers = model(torch.ones(1, 3, dtype=torch.long), use_cache=True).past_key_values.layers
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    return [None if k is None or v is None else (k.numel() + v.numel()) // k.shape[2] for k, v in pairs]


@pytest.mark.parametrize("name", CONFIGS)
def test_caches_hold_what_the_config_says(name: str) -> None:
    """Latents, where keys and values are expanded from them; in each layer its own, where layers have unlike heads."""
    said, held = cached_elements(CONFIGS[name]()), cached(CONFIGS[name]())
    assert [mine for mine, real in zip(said, held, strict=True) if real] == list(filter(None, held))


@pytest.mark.parametrize("options", FALCONS)
def test_a_falcons_cache_holds_other_heads_than_its_config_names(options: dict[str, Any]) -> None:
    config = t.FalconConfig(**SMALL, **options)
    assert list(cached_elements(config)) == cached(config)


def test_heads_are_those_that_attend() -> None:
    assert set(attention_heads(CONFIGS["deepseek-v3"]())) == {(4, 4, 16, 12)}
    assert attention_heads(CONFIGS["gemma4"]()) == ((4, 2, 8, 8), (4, 2, 8, 8), (4, 2, 16, 16))
