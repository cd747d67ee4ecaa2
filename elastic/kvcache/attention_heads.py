"""The heads that attend in each decoder layer, as a model's config tells."""

from __future__ import annotations

from typing import Any, NamedTuple

from elastic.weights.decoder import layer_configs


class AttentionHeads(NamedTuple):
    """The heads of one layer, as they attend; a cache may hold less, where they are expanded from it."""

    queries: int
    keys: int
    """Heads of keys, and of values."""
    key_dim: int
    value_dim: int


def attention_heads(config: Any) -> tuple[AttentionHeads, ...]:
    """Return the heads of each decoder layer by a text config."""
    layers = []
    for layer in layer_configs(config):
        queries = getattr(layer, "num_attention_heads", None) or 1
        keys = getattr(layer, "num_key_value_heads", None) or queries
        if hasattr(layer, "new_decoder_architecture"):  # a Falcon, whose cache does not have what `num_kv_heads` says
            keys = queries if layer.new_decoder_architecture or not layer.multi_query else 1
        even = getattr(layer, "hidden_size", 0) // queries
        dim = getattr(layer, "head_dim", None) or getattr(layer, "dim_head", None) or even
        key_dim, value_dim = (getattr(layer, name, None) or dim for name in ("qk_head_dim", "v_head_dim"))
        layers.append(AttentionHeads(queries, keys, key_dim, value_dim))
    return tuple(layers)


def cached_elements(config: Any) -> tuple[int, ...]:
    """Return the elements that the caches of `generate` hold of one token in each decoder layer, by a text config."""
    elements = []
    for layer, heads in zip(layer_configs(config), attention_heads(config), strict=True):
        latent = getattr(layer, "kv_lora_rank", None)  # of MLA, whose caches hold latents, and the keys with positions
        expanded = heads.keys * (heads.key_dim + heads.value_dim)
        elements.append(int(latent + layer.qk_rope_head_dim) if latent else expanded)
    return tuple(elements)
