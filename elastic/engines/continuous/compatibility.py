"""The models and versions that continuous batching can serve: models are tried with one token, not by name."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from elastic.errors import BackendUnavailable, ConfigError
from elastic.kvcache.attention import attends


@torch.no_grad()
def require_servable(model: Any) -> None:
    """Raise `ConfigError` for a wrapped model whose caches do not come in equal blocks."""
    config = model.config.get_text_config(decoder=True)
    if not attends(model, config):
        raise ConfigError(
            f"attn_implementation={config._attn_implementation!r}: continuous batching needs a model that was loaded "
            "with 'sdpa', and calls it through transformers' attention interface"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(f"its layers are of kinds {sorted(kinds)}; continuous batching knows full and sliding ones")
    cache = Cache(layer_class_to_replicate=DynamicLayer)  # a stock one: the pages may all be taken
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    shapes = {(tuple(layer.keys.shape[1::2]), tuple(layer.values.shape[1::2])) for layer in cache.layers}
    wanted = find_num_key_value_heads(config), find_head_dim(config)
    if len(cache.layers) != config.num_hidden_layers or shapes != {(wanted, wanted)}:
        actual = ", ".join(f"keys of {k}, values of {v}" for k, v in sorted(shapes))
        raise ConfigError(
            f"continuous batching needs keys and values of (heads, dim) {wanted} in all {config.num_hidden_layers} "
            f"layers; {len(cache.layers)} layers have {actual}"
        )


SUPPORTED = (5, 23)
"""It is rewritten about monthly, and what we build on is not public; the latest rewrite came with 5.23."""


def require_supported(version: str | None = None) -> None:
    """Raise `BackendUnavailable` where transformers is another version (None: the installed one)."""
    if version is None:
        import transformers

        version = transformers.__version__
    major, minor = SUPPORTED
    if version.split(".")[:2] != [str(major), str(minor)]:
        raise BackendUnavailable(
            f"continuous batching on elastic pages needs transformers {major}.{minor}.x, this is {version}; "
            f"pip install 'transformers>={major}.{minor},<{major}.{minor + 1}', or use generate"
        )
