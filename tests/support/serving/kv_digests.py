"""The keys and values of a request as they lie in an engine's memory: to see that a move changes no bit."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch

from elastic.engines.continuous import ContinuousEngine


def kv_digests(engine: ContinuousEngine, request: str) -> dict[str, list[str]]:
    """For each answer that has blocks a digest of each layer's keys and values, of the tokens that can be seen."""
    return {kv.sequence: layer_digests(engine, kv) for kv in engine.moves.locate(request)}


def layer_digests(engine: ContinuousEngine, kv: Any) -> list[str]:
    """Of each layer, in order; only while nothing writes the sequence's blocks."""
    cache = engine._runner.cache
    digests: dict[int, str] = {}
    for group, (layers, window) in enumerate(engine.kv_format.groups):
        blocks = torch.tensor([kv.blocks[group]], device=cache.device)
        seen = torch.arange(max(0, kv.computed - (window or kv.computed)), kv.computed, device=cache.device)
        slots = seen if window is None else seen % window
        for layer in layers:
            decoder_layer, part = divmod(layer, cache.kv_shards)
            parts = cache.parts(group, (part,))
            index = cache.layout.read_index(blocks, parts.places)
            keys, values = cache.layout.read(cache.layers[decoder_layer].elements, index)
            both = torch.stack([keys, values])[..., slots, :].contiguous().cpu()
            digests[layer] = blake2b(both.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
    return [digests[layer] for layer in sorted(digests)]
