"""The memory of an elastic model, from the ground up: places, weights in pages, packed variants, reserves, KV pools.

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

from elastic.actions.pages.broker import PageBroker
from elastic.actions.pages.staging_reserve import StagingReserve
from elastic.config import Place
from elastic.errors import ConfigError
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_state import ForwardState
from elastic.kvcache.decode_table import FILE, measure_ahead, table
from elastic.kvcache.decode_timing import processor
from elastic.kvcache.hf_cache import make_memory
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.layout import KVLayout
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.copy_engine import make_copy_engine
from elastic.memory.page_pool import PagePool
from elastic.memory.places import close_place, open_place
from elastic.runtime.handlers import make_handlers
from elastic.runtime.options import WrapOptions, device_of
from elastic.runtime.parts import ModelParts
from elastic.weights.decoder import Decoder
from elastic.weights.eligible import held_outside, layer_slots
from elastic.weights.initial_residency import choose_absent, spread
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.paging import give_back, make_layers, move_in, move_out
from elastic.weights.parameter_slot import ParameterSlot
from elastic.weights.streaming import WeightStreamer

if TYPE_CHECKING:
    from elastic.quant.variants.variant import Variant


def build_parts(model: nn.Module, options: WrapOptions, memory: ExitStack, on_model: ExitStack) -> ModelParts:
    """Move the model's weights into pages of its places, and make what works on them.

    `memory` gives back what was taken, `on_model` moves the weights out again before.
    """
    decoder = options.decoder
    choose_decode_kernels(options)
    slots = layer_slots(model, decoder)
    pools = open_places(model, decoder, options.places, slots, memory)
    layers = make_layers(decoder, slots, layer_pools(decoder, slots, pools, options.placement), options.files)
    pack_variants(model, layers, pools, options.variants, options.variant_cache)
    reserves = make_reserves(layers, memory)
    # by hand, a release must do when caches hold all the rest; a policy swaps layers: memory for streaming released
    # ones is taken from the cache if one is ever released (docs/controller.md)
    least_stages = 1 if options.make_policy is None else 0
    weights = move_weights(layers, pools, least_stages, memory, on_model)
    kv = make_kv(decoder, pools, options.layouts, layers, memory)
    gate, forward = ForwardGate(), ForwardState()
    broker = PageBroker(kv, reserves, gate.exclusive)
    handlers = make_handlers(decoder, pools, weights, kv, broker, forward, options.copy_rate, memory)
    return ModelParts(pools, weights, kv, broker, gate, forward, handlers)


def open_places(
    model: nn.Module, decoder: Decoder, chosen: list[Place], slots: list[dict[str, ParameterSlot]], stack: ExitStack
) -> tuple[PagePool, ...]:
    """Open the places and charge what stays in ordinary tensors on their devices."""
    outside = held_outside(model, decoder, slots)
    paged: Counter[str] = Counter()
    for layer in slots:
        for slot in layer.values():
            paged[str(slot.parameter.device)] += slot.parameter.nbytes
    pools = []
    for number, place in enumerate(chosen):
        first = all(place.device != earlier.device for earlier in chosen[:number])
        held = outside.get(str(place.device), Counter()) if first else Counter()
        pool = open_place(place, resident_bytes=held.total() + (paged[str(place.device)] if first else 0))
        stack.callback(close_place, pool)
        for owner, nbytes in held.items():
            pool.charge(owner, nbytes)
            stack.callback(pool.discharge, owner, nbytes)
        pools.append(pool)
    return tuple(pools)


def layer_pools(
    decoder: Decoder, slots: list[dict[str, ParameterSlot]], pools: Sequence[PagePool], placement: str
) -> Sequence[PagePool]:
    """Return the pool of the place at which each layer begins."""
    if placement == "auto":
        return spread([sum(slot.parameter.nbytes for slot in layer.values()) for layer in slots], pools)
    first = {pool.backend.device: pool for pool in reversed(pools)}
    return [first[device_of(layer)] for layer in decoder.layers]


def pack_variants(
    model: nn.Module,
    layers: list[WeightUnit],
    pools: Sequence[PagePool],
    variants: list[Variant],
    cache: str | Path | None,
) -> None:
    """Pack every layer for every variant, from its parameters where they are now, for their devices."""
    if not variants:
        return
    from elastic.quant.variants.calibration import inputs_of
    from elastic.quant.variants.eligible import LayerParameters, matrices
    from elastic.quant.variants.pack_model import measure_paths, obtain

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
            layer.variants[variant.name] = packed
        for device in {pool.backend.device for pool in pools} - {layer.device for layer in parameters}:
            with suppress(ConfigError):  # a format without kernels there: its layers stay
                measure_paths(made, device)


def choose_decode_kernels(options: WrapOptions) -> None:
    """Decide which kernels compute one new token, by the table beside the variants or by measuring; keep it there."""
    decoder, layouts = options.decoder, options.layouts
    if decoder.config._attn_implementation != "sdpa":
        return
    path = Path(options.variant_cache) / FILE if options.variant_cache is not None else None
    if path is not None and path.exists():
        table.load(path)
    dtype = next(p.dtype for p in decoder.layers[0].parameters() if p.is_floating_point())
    measure_ahead(decoder.config, dtype, layouts)
    if path is not None:
        table.save(path, map(processor, layouts))


def make_reserves(layers: list[WeightUnit], stack: ExitStack) -> dict[str, StagingReserve]:
    """Keep back, at each place, pages for the largest packed layer, so that it can be swapped when all is full."""
    most: dict[str, int] = {}
    for layer in layers:
        for variant in layer.variants:
            pages = layer.pages_in(layer.with_variant(variant))
            most[layer.pool.name] = max(most.get(layer.pool.name, 0), pages)
    reserves = {
        layer.pool.name: StagingReserve(layer.pool, most[layer.pool.name]) for layer in layers if layer.variants
    }
    for reserve in reserves.values():
        reserve.fill()
        stack.callback(reserve.close)
    return reserves


def move_weights(
    layers: list[WeightUnit],
    pools: Sequence[PagePool],
    least_stages: int,
    memory_stack: ExitStack,
    model_stack: ExitStack,
) -> ModelWeights:
    """Move the layers' weights into pages, one layer after another."""
    streamers = {pool.name: _streamer(pool, layers, memory_stack) for pool in pools}
    weights = ModelWeights(layers, streamers)
    absent: list[WeightUnit] = []
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
    weights.initially_resident = tuple(layer.index for layer in layers if not layer.absent)
    return weights


def _for_units(undo: Callable[[WeightUnit], None], weights: ModelWeights, layer: int) -> None:
    """Undo something for the units of which a layer consists by then."""
    for unit in weights.units(layer):
        undo(unit)


def _streamer(pool: PagePool, layers: list[WeightUnit], stack: ExitStack) -> WeightStreamer:
    """The stages of a place: none so far."""
    copier = make_copy_engine(pool.backend.device)
    stack.callback(copier.close)
    largest = max(layer.nbytes for layer in layers)
    streamer = WeightStreamer(pool, copier, largest, layers)
    streamer.least = 0
    stack.callback(streamer.close)
    return streamer


def make_kv(
    decoder: Decoder,
    pools: Sequence[PagePool],
    layouts: dict[torch.device, KVLayout],
    layers: Sequence[WeightUnit],
    stack: ExitStack,
) -> KVMemory:
    """Make the KV pool of each place, of the pages that are left there, and the caches' memory over them."""
    kv_pools: dict[str, tuple[KVPool, KVLayout]] = {}
    for pool in pools:
        device = pool.backend.device
        kv_pool = KVPool(pool, pool.free_pages * pool.page_bytes, host_offload=device.type == "cuda")
        stack.callback(kv_pool.close)
        kv_pools[pool.name] = kv_pool, layouts[device]
    memory = make_memory(decoder.config, list(kv_pools.values()), [kv_pools[layer.pool.name][0] for layer in layers])
    stack.callback(memory.let_go)
    return memory
