"""Assembling the memory of an elastic model: its places, its weights in pages, packed variants, reserves, KV pools.

Everything is undone by the stacks that are given, in reverse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from elastic.config import Place
from elastic.errors import ConfigError
from elastic.hooks.layer import LayerWeights
from elastic.hooks.moving import choose_absent, give_back, held_outside, move_in, move_out, spread
from elastic.hooks.reserve import Reserve
from elastic.hooks.slots import Slot
from elastic.hooks.streaming import Streamer
from elastic.hooks.structure import Decoder
from elastic.hooks.weights import ModelWeights
from elastic.kvcache.layout import Layout
from elastic.kvcache.pool import KVPool
from elastic.memory.copying import make_copier
from elastic.memory.places import close_place, open_place
from elastic.memory.pool import PagePool
from elastic.options import device_of

if TYPE_CHECKING:
    from elastic.kvcache.memory import KVMemory
    from elastic.quant.variants import Variant


def open_places(
    model: nn.Module, decoder: Decoder, chosen: list[Place], slots: list[dict[str, Slot]], stack: ExitStack
) -> list[PagePool]:
    """Open the places and charge what stays in ordinary tensors on their devices."""
    outside = held_outside(model, decoder, slots)
    paged: Counter[str] = Counter()
    for here in slots:
        for slot in here.values():
            paged[str(slot.parameter.device)] += slot.parameter.nbytes
    pools = []
    for number, place in enumerate(chosen):
        home = all(place.device != earlier.device for earlier in chosen[:number])
        held = outside.get(str(place.device), Counter()) if home else Counter()
        pool = open_place(place, resident_bytes=held.total() + (paged[str(place.device)] if home else 0))
        stack.callback(close_place, pool)
        for owner, nbytes in held.items():
            pool.charge(owner, nbytes)
            stack.callback(pool.discharge, owner, nbytes)
        pools.append(pool)
    return pools


def homes(decoder: Decoder, slots: list[dict[str, Slot]], pools: list[PagePool], placement: str) -> Sequence[PagePool]:
    """The place of each layer."""
    if placement == "auto":
        return spread([sum(slot.parameter.nbytes for slot in here.values()) for here in slots], pools)
    first = {pool.backend.device: pool for pool in reversed(pools)}
    return [first[device_of(layer)] for layer in decoder.layers]


def pack(
    model: nn.Module,
    layers: list[LayerWeights],
    pools: Sequence[PagePool],
    variants: list[Variant],
    cache: str | Path | None,
) -> None:
    """Pack every layer for every variant, from its parameters where they are now, for their devices."""
    if not variants:
        return
    from elastic.quant.build import measure_paths, obtain
    from elastic.quant.calibrate import inputs_of
    from elastic.quant.selection import LayerParameters, matrices

    own = [layer for layer in layers if layer.slots]
    parameters = [
        LayerParameters(w.name, {name: (slot.homes[0][0], slot.parameter) for name, slot in w.slots.items()})
        for w in own
    ]
    used = {f"{p.name}.{name}": p.parameters[name][0] for p in parameters for name, w, _ in matrices(p) if w.ndim == 2}
    for variant in variants:
        text = variant.calibration
        inputs = partial(inputs_of, model, used, text) if text is not None else dict[str, torch.Tensor]
        made = obtain(parameters, variant, cache, inputs)
        for layer, packed in zip(own, made, strict=True):
            layer.variants = {**layer.variants, variant.name: packed}
        for device in {pool.backend.device for pool in pools} - {layer.device for layer in parameters}:
            with suppress(ConfigError):  # a format without kernels there: its layers stay
                measure_paths(made, device)


def make_reserves(layers: list[LayerWeights], stack: ExitStack) -> dict[str, Reserve]:
    """For each place, pages kept back for the largest packed layer, so that it can be swapped when all is full."""
    most: dict[str, int] = {}
    for layer in layers:
        for variant in layer.variants:
            pages = layer.pages_in(layer.form_with(variant))
            most[layer.pool.name] = max(most.get(layer.pool.name, 0), pages)
    reserves = {layer.pool.name: Reserve(layer.pool, most[layer.pool.name]) for layer in layers if layer.variants}
    for reserve in reserves.values():
        reserve.fill()
        stack.callback(reserve.close)
    return reserves


def move_weights(
    layers: list[LayerWeights],
    pools: Sequence[PagePool],
    least_stages: int,
    memory_stack: ExitStack,
    model_stack: ExitStack,
) -> ModelWeights:
    """Move the layers' weights into pages, one layer after another."""
    streamers = {pool.name: _streamer(pool, layers, memory_stack) for pool in pools}
    weights = ModelWeights(layers, streamers)
    absent: list[LayerWeights] = []
    for pool in pools:
        own = [layer for layer in layers if layer.pool is pool and layer.slots]
        if own:
            streamer = streamers[pool.name]
            streamer.least = least_stages
            stages, elsewhere = choose_absent(own, pool.free_pages, streamer.stage_pages, least_stages=least_stages)
            streamer.resize(stages)
            absent += elsewhere
    for layer in layers:
        memory_stack.callback(_for_units, give_back, weights, layer.index)
        model_stack.callback(_for_units, move_out, weights, layer.index)
        move_in(layer, absent=layer in absent)
        if layer.variants:
            layer.keep()
    weights.at_home = tuple(layer.index for layer in layers if not layer.absent)
    return weights


def _streamer(pool: PagePool, layers: list[LayerWeights], stack: ExitStack) -> Streamer:
    """The stages of a place: none so far."""
    copier = make_copier(pool.backend.device)
    stack.callback(copier.close)
    largest = max(layer.nbytes for layer in layers)
    streamer = Streamer(pool, copier, largest, layers)
    streamer.least = 0
    stack.callback(streamer.close)
    return streamer


def _for_units(do: Callable[[LayerWeights], None], weights: ModelWeights, layer: int) -> None:
    for unit in weights.units(layer):
        do(unit)


def kv_memory(
    decoder: Decoder,
    pools: list[PagePool],
    layouts: dict[torch.device, Layout],
    layers: Sequence[LayerWeights],
    stack: ExitStack,
) -> KVMemory:
    from elastic.kvcache.cache import make_memory

    kv_pools: dict[str, tuple[KVPool, Layout]] = {}
    for pool in pools:
        device = pool.backend.device
        kv_pool = KVPool(pool, pool.free_pages * pool.page_bytes, host_offload=device.type == "cuda")
        stack.callback(kv_pool.close)
        kv_pools[pool.name] = kv_pool, layouts[device]
    memory = make_memory(decoder.config, list(kv_pools.values()), [kv_pools[layer.pool.name][0] for layer in layers])
    stack.callback(memory.let_go)
    return memory
