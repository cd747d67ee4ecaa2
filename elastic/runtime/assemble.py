"""Weights in pages, a KV cache of what they leave, and the runtime that moves both: the same under every engine.

What differs is given in: `make_kv` builds what caches live in, `make_handlers` the actions that make sense there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from torch import nn

from elastic.actions.base import ActionHandler
from elastic.actions.pages.broker import PageBroker
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_state import ForwardState
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.runtime.build import (
    choose_prepacked,
    layer_pools,
    make_kv_pools,
    make_reserves,
    move_weights,
    open_places,
    pack_head,
    pack_variants,
    warn_of_other_files,
)
from elastic.runtime.controller_setup import connect_controller
from elastic.runtime.cutting import cut_layers
from elastic.runtime.options import WrapOptions
from elastic.runtime.parts import ModelParts
from elastic.runtime.runtime import Runtime
from elastic.weights.eligible import layer_slots
from elastic.weights.layer import Absence
from elastic.weights.paging import make_layers

MakeKV = Callable[[Sequence[KVPool], Sequence[KVPool], ExitStack], KVMemory]
"""Given the KV pools of the places, and those of the decoder layers by index."""
MakeHandlers = Callable[[ModelParts, ExitStack], Mapping[type, ActionHandler]]
"""Given all parts but the handlers."""


def assemble(
    model: nn.Module,
    options: WrapOptions,
    make_kv: MakeKV,
    make_handlers: MakeHandlers,
    memory: ExitStack,
    on_model: ExitStack,
) -> ModelParts:
    """Move the model's weights into pages of its places, and make what works on them.

    `memory` gives back what was taken, `on_model` moves the weights out again before.
    """
    decoder = options.decoder
    slots = layer_slots(model, decoder, options.lives_in_pages)
    pools = open_places(model, decoder, options.places, slots, memory)
    homes = layer_pools(decoder, slots, pools, options.placement)
    cuts = cut_layers(decoder, slots, homes, options.shards)
    layers = make_layers(decoder, slots, homes, options.files, cuts)
    warn_of_other_files(layers, options.files)
    pack_variants(model, layers, pools, options.variants, options.variant_cache, options.is_packable)
    choose_prepacked(layers, options.choose_prepacked)
    pack_head(model, options.choose_prepacked, on_model)
    reserves = make_reserves(layers, memory)
    # by hand, a release must do when caches hold all the rest; a policy swaps layers: memory for streaming released
    # ones is taken from the cache if one is ever released (docs/controller.md)
    least_buffers = 1 if options.make_policy is None else 0
    weights = move_weights(layers, pools, least_buffers, memory, on_model, options.load_shards)
    kv_pools = make_kv_pools(pools, memory)
    of_place = {kv_pool.pool.name: kv_pool for kv_pool in kv_pools}
    kv = make_kv(kv_pools, [of_place[layer.pool.name] for layer in layers], memory)
    memory.callback(kv.let_go)
    gate, forward = ForwardGate(), ForwardState()
    broker = PageBroker(kv, reserves, gate.exclusive)
    for unit in layers:
        if unit.absent is Absence.DROPPED:  # caches can have its pages, as those of what was dropped later
            broker.shares[unit.pool.name].record_resident(unit.pages - unit.held_pages)
    parts = ModelParts(pools, weights, kv, broker, gate, forward)
    parts.handlers.update(make_handlers(parts, memory))
    return parts


def connect(runtime: Runtime, parts: ModelParts, options: WrapOptions, stack: ExitStack) -> None:
    """Have memory tell the runtime what happens by itself, and the controller watch it: all late wires."""
    for kv_pool in parts.kv.pools:
        kv_pool.on_settled = partial(runtime.resize_settled, kv_pool.pool.name)
    for place, streamer in parts.weights.streamers.items():
        streamer.on_spare = partial(parts.broker.give_to_cache, place)
    for pool in parts.pools:
        pool.listeners.append(runtime.pages_came_free)
        stack.callback(pool.listeners.remove, runtime.pages_came_free)
    connect_controller(runtime, parts, options.make_policy, options.slo, stack)
