"""A measurement of fingerprints in the engine, on a device of this machine: the seconds that estimates are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.config import Place
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import Pace, fit_cost
from elastic.estimation.fingerprint import fingerprint, take_layers
from elastic.estimation.kv_room import KVRoom, kv_shape_of
from elastic.estimation.model_layout import LayerKind, ModelLayout, layout_of
from elastic.estimation.weight_pages import WeightPages, kernel_target
from elastic.planning.estimate.configuration import FULL
from elastic.planning.estimate.devices import CPU_PAGE_BYTES, CUDA_PAGE_BYTES
from elastic.planning.pipeline.chunk_cost import ChunkCost
from elastic.wrap import unwrap, wrap

CACHED_BYTES = 128 << 20
"""What caches of a processor hold at most: a fingerprint has more weights, or layers would be read from there."""
_SEQUENCES = 9


@dataclass(frozen=True)
class Profile:
    """Costs that were fitted to measurements, of one kind of device."""

    device: str
    """Its type: "cpu" or "cuda"."""
    layers: Mapping[tuple[str, str], ChunkCost]
    """(kind of layer, weights) -> the cost of one layer."""
    around: Mapping[str, ChunkCost]
    """Weights -> the cost of what is around the layers."""


def measure_fingerprints(
    model: Any,
    weights: Sequence[str] = (FULL,),
    *,
    device: str | torch.device = "cpu",
    context: int = 512,
    step_tokens: int = 512,
    most_s: float = 2.0,
    pace: Pace | None = None,
) -> Profile:
    """Measure a fingerprint of each kind of layer, in the model's weights and in variants: `most_s` seconds for each.

    `model` is a directory, of whose layers only those of fingerprints are read, or a loaded model, which stays as it
    is. Costs are fitted to batches of up to `step_tokens` new tokens and contexts of up to `context`. `pace` is called
    behind each batch, and may wait or raise. Raises `ConfigError` for a model that the engine cannot serve.
    """
    target = torch.device(device)
    dtype = torch.float32 if target.type == "cpu" else None
    kinds = layout_of(model, dtype).kinds
    layers: dict[tuple[str, str], ChunkCost] = {}
    around: dict[str, ChunkCost] = {}
    for kind in kinds:
        chosen = fingerprint_layers(kind)
        for name in weights:
            small = (
                take_layers(model, chosen) if not isinstance(model, str | Path) else fingerprint(model, chosen, dtype)
            )
            with engine_for(small.to(target), name, target, context + step_tokens, step_tokens) as engine:
                cost = fit_cost(engine, step_tokens, most_s, pace=pace)
            layers[kind.name, name] = cost.layer
            around.setdefault(name, cost.rest)
    return Profile(target.type, layers, around)


def fingerprint_layers(kind: LayerKind) -> tuple[int, ...]:
    """Choose the layers of a kind that are measured: two, or as many as no cache of a processor holds."""
    count = max(2, -(-CACHED_BYTES // max(1, kind.full.nbytes)))
    return kind.layers[:count]


def fingerprint_bytes(layout: ModelLayout, kind: LayerKind, weights: str, tokens: int) -> int:
    """Return about what the fingerprint of a kind takes while requests of so many tokens are measured, in a variant."""
    chosen = fingerprint_layers(kind)
    forms = 1 if weights == FULL else 2  # of a layer that is swapped both forms are there for a moment
    kv = kv_shape_of(layout.config, layout.dtype.itemsize).token_bytes * len(chosen) * _SEQUENCES * tokens
    return sum(layout.fixed.values()) + forms * len(chosen) * kind.full.nbytes + kv


@contextmanager
def engine_for(
    model: Any, weights: str, device: torch.device, tokens: int, step_tokens: int
) -> Iterator[ContinuousEngine]:
    """Serve a model in a variant, on a place that has room for some requests of so many tokens."""
    nbytes = _budget(model, weights, device, tokens)
    place = Place(f"{device}#fingerprint", device, nbytes)
    wrap(model, places=[place], variants=() if weights == FULL else (weights,), controller=False)
    try:
        if weights != FULL:
            model.elastic.swap(range(model.config.get_text_config(decoder=True).num_hidden_layers), weights)
        engine = ContinuousEngine(model, max_batch_tokens=step_tokens, share_prefixes=False)
        try:
            yield engine
        finally:
            engine.stop()
    finally:
        unwrap(model)


def _budget(model: Any, weights: str, device: torch.device, tokens: int) -> int:
    """Return the bytes that a model needs with so many tokens of some requests."""
    layout = layout_of(model)
    page_bytes = CPU_PAGE_BYTES if device.type == "cpu" else CUDA_PAGE_BYTES
    pages = WeightPages(layout, page_bytes, kernel_target(device.type, ""))
    every = range(len(layout.decoder.layers))
    room = KVRoom(layout.config, kv_shape_of(layout.config, layout.dtype.itemsize), 32, page_bytes, every)
    held = pages.fixed + pages.layers(every, FULL, 1) + pages.staging(weights, 1)
    return (held + room.pages(_SEQUENCES, tokens)) * page_bytes
