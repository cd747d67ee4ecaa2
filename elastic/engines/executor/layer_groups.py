"""Layers whose caches grow together: those of one kind of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic.engines.core.kv_state import KVFormat
from elastic.errors import ConfigError
from elastic.kvcache.storage.sector_space import BlockGroup
from elastic.weights.decoder import layer_configs

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind."""

    layers: tuple[int, ...]
    window: int | None
    """How many tokens they see; None: all. The token at position p is in slot p modulo the window."""


def layer_groups(config: Any) -> tuple[LayerGroup, ...]:
    """Group the layers of a model by its text config, in the order of their first layers. Raises `ConfigError`."""
    windows = [getattr(each, "sliding_window", None) for each in layer_configs(config)]
    kinds = getattr(config, "layer_types", None) or [FULL if window is None else SLIDING for window in windows]
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise ConfigError(f"its layers are of kinds {unknown}; continuous batching knows full and sliding ones")
    layers: dict[int | None, list[int]] = {}
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        layers.setdefault(window if kind == SLIDING else None, []).append(layer)
    return tuple(LayerGroup(tuple(members), window) for window, members in layers.items())


def block_groups(form: KVFormat) -> tuple[BlockGroup, ...]:
    """Return the blocks that groups of layers have by the form of their keys and values."""
    return tuple(BlockGroup(layers, form.block_bytes, form.kv_shards) for layers, _ in form.groups)
