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
    return tuple(map(_heads_of, layer_configs(config)))


def cached_elements(config: Any) -> tuple[int, ...]:
    """Return the elements that the caches of `generate` hold of one token in each decoder layer, by a text config."""
    return tuple(map(_cached_of, layer_configs(config)))


def _heads_of(config: Any) -> AttentionHeads:
    queries = getattr(config, "num_attention_heads", None) or 1
    keys = getattr(config, "num_key_value_heads", None) or queries
    if hasattr(config, "new_decoder_architecture"):  # a Falcon, whose cache does not have what `num_kv_heads` says
        keys = queries if config.new_decoder_architecture or not config.multi_query else 1
    even = getattr(config, "hidden_size", 0) // queries
    dim = getattr(config, "head_dim", None) or getattr(config, "dim_head", None) or even
    key_dim, value_dim = (getattr(config, name, None) or dim for name in ("qk_head_dim", "v_head_dim"))
    return AttentionHeads(queries, keys, key_dim, value_dim)


def _cached_of(config: Any) -> int:
    latent = getattr(config, "kv_lora_rank", None)  # of MLA, whose caches hold latents, and the keys with positions
    if latent:
        return int(latent + config.qk_rope_head_dim)
    heads = _heads_of(config)
    return heads.keys * (heads.key_dim + heads.value_dim)
