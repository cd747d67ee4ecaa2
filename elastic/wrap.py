"""`wrap` and `unwrap`: check everything, then install, so that it all comes off again. The composition root."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from elastic.actions.base import ActionHandler
from elastic.actions.deferred import DeferredActions
from elastic.actions.migrate import MigrateHandler
from elastic.actions.pages.allocation import WeightPageAllocator
from elastic.actions.pages.broker import PageBroker
from elastic.actions.release import ReleaseHandler
from elastic.actions.swap import SwapHandler
from elastic.config import SLO, Place
from elastic.errors import StateError
from elastic.hooks.device_transfer import TransferRouter
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_state import ForwardState
from elastic.hooks.install import ModelHooks
from elastic.kvcache.api import KV
from elastic.kvcache.storage.layout import choose_layout
from elastic.memory.background import janitor
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.page_pool import PagePool
from elastic.runtime.build import (
    choose_decode_kernels,
    homes,
    kv_memory,
    make_reserves,
    move_weights,
    open_places,
    pack,
)
from elastic.runtime.controller_setup import Asked, choose_policy, set_up_control
from elastic.runtime.layer_benchmark import measure
from elastic.runtime.options import WrapOptions, check_model, check_placement, choose_places, parse_rate, parse_variants
from elastic.runtime.replication import replication
from elastic.runtime.runtime import Runtime, runtime
from elastic.types import Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Swap
from elastic.weights.decoder import Decoder
from elastic.weights.eligible import layer_slots
from elastic.weights.model import ModelWeights
from elastic.weights.paging import make_layers

if TYPE_CHECKING:
    from elastic.kvcache.manager import KVMemory
    from elastic.quant.sensitivity.profile_file import Profile
    from elastic.quant.variants.variant import Variant

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    *,
    policy: Asked | Sequence[Asked] = "manual",
    slo: SLO | None = None,
    order: str | Path | Profile = "front_to_back",
    controller: bool = True,
    places: Sequence[str | Place] | None = None,
    placement: str = "as_loaded",
    variants: Sequence[str | Variant] = (),
    variant_cache: str | Path | None = None,
    copy_rate: int | str | None = None,
    kv_layout: str | None = None,
    checkpoint: str | Path | None = None,
) -> Model:
    """Make a Hugging Face causal language model elastic, in place; returns the same object.

    From then on the weights of its decoder layers and its KV cache live in pages of the same budget, under
    `model.elastic`, the `Runtime`; `generate`, `pipeline` and plain calls go on as before. `places` says what memory
    may be used, at least one place for each device that holds decoder layers (by default one each, with most of what is
    free); a place's budget covers everything of the model there. Layers that it is too small for are kept in host
    memory and streamed when they are called. With `placement="as_loaded"` layers begin at the first place of their
    device; "auto" fills the places in their order, as far as leaves room for a KV cache.

    `policy` says who calls actions. "manual": you do. "accuracy", "balanced", "performance", a `Policy` or its file: a
    controller swaps layers under pressure and restores them after it, in an `order` that is a `Profile`, its file,
    "front_to_back", "last_first" or "contiguous". "scale", a `Scale`: it replicates and moves them over `places`;
    models with the same `Scale(group=…)` lend each other theirs. An object with `decide(snapshot, state)`: what that
    says. Several, in a tuple: their cheapest remedy. All look at `slo`; with `controller=False` the thread waits for
    `start()`. (docs/controller.md)

    `kv_layout` is "head_major", "batch_major" or "token_major"; None: the best for the device. `checkpoint`: the
    safetensors that the model was loaded from, a file or a directory; released weights are read from there by mmap.

    `variants` are what layers can be swapped to: "int8", "int4", "int3", or a `Variant`, packed now and kept in host
    memory beside the full weights. `variant_cache` is a directory that keeps them for the next start and for other
    processes. `copy_rate`, such as "2GB", bounds the bytes a second of what moves while a model of
    the process computes; None: no bound.

    Raises `ConfigError` for a model or option that cannot work, `StateError` for a wrapped model, `CapacityError` for
    a budget too small; in each case the model is as it was.
    """
    decoder, parsed = check_model(model), parse_variants(variants)
    chosen = choose_places(decoder, places)
    wanted = WrapOptions(
        decoder,
        chosen,
        check_placement(placement),
        {place.device: choose_layout(kv_layout, place.device) for place in chosen},
        Checkpoint(checkpoint) if checkpoint is not None else None,
        parsed,
        variant_cache,
        parse_rate(copy_rate),
        slo=slo,
        start_controller=controller,
        make_policy=choose_policy(policy, slo, order, parsed, decoder.layers, partial(measure, decoder, chosen)),
    )
    _remember(model, _build(model, wanted))
    return model


def _remember(model: nn.Module, installed: _Installed) -> None:
    """For `unwrap`, or for when the model dies."""
    _installed[model] = installed
    weakref.finalize(model, janitor.submit, installed.abandon).atexit = False


def _build(model: nn.Module, wanted: WrapOptions) -> _Installed:
    """Move the model's memory, then put everything on it; on an error it is as it was."""
    decoder = wanted.decoder
    choose_decode_kernels(decoder, wanted.layouts, wanted.variant_cache)
    with ExitStack() as memory_stack, ExitStack() as model_stack:
        slots = layer_slots(model, decoder)
        pools = open_places(model, decoder, wanted.places, slots, memory_stack)
        layers = make_layers(decoder, slots, homes(decoder, slots, pools, wanted.placement), wanted.files)
        pack(model, layers, pools, wanted.variants, wanted.variant_cache)
        reserves = make_reserves(layers, memory_stack)
        # by hand, a release must do when caches hold all the rest; a policy swaps layers: memory for streaming released
        # ones is taken from the cache if one is ever released (docs/controller.md)
        least_stages = 1 if wanted.make_policy is None else 0
        weights = move_weights(layers, pools, least_stages, memory_stack, model_stack)
        memory = kv_memory(decoder, pools, wanted.layouts, layers, memory_stack)
        gate, forward = ForwardGate(), ForwardState()
        broker = PageBroker(memory, reserves, gate.exclusive)
        mechanisms = _mechanisms(wanted, memory, weights, forward, pools, broker, memory_stack)
        run = Runtime(gate, partial(KV, memory), weights, forward, pools, mechanisms)
        _connect(run, memory, weights, broker, pools, memory_stack)
        set_up_control(run, memory, weights, pools, wanted.make_policy, wanted.slo, memory_stack)
        _install(model, decoder, gate, memory, run, weights, model_stack)
        run.start(controlled=wanted.start_controller)
        return _Installed(run, weights, model_stack.pop_all(), memory_stack.pop_all())


def unwrap(model: Model) -> Model:
    """Leave the model as it was: no hook, no attribute, memory given back; returns the same object.

    Waits for actions and forward passes in flight. Caches that still live keep their contents, in ordinary tensors.
    Raises `StateError` for a model that is not wrapped, or inside one of its forward passes.
    """
    runtime(model)
    _installed[model].take_off()
    del _installed[model]
    return model


class _Installed:
    """What `wrap` did to a model, and how it is undone: what is on the model first, its memory after."""

    def __init__(self, run: Runtime, weights: ModelWeights, on_model: ExitStack, memory: ExitStack) -> None:
        self._run = run
        self._weights = weights
        self._on_model = on_model
        self._memory = memory

    def take_off(self) -> None:
        if self._run.in_forked_child:
            raise StateError(
                "this model was wrapped before the process forked: its weights lie in pages of the parent, which may "
                "change them; load it again in the child"
            )
        with self._run.last_safe_point():
            try:
                self._on_model.close()
            finally:  # a layer that finds no ordinary memory keeps its pages, as `retained`, and goes on working
                self._memory.close()

    def abandon(self) -> None:
        """The model is gone without `unwrap`."""
        if not self._run.in_forked_child:
            self._run.close()
            self._weights.let_go()
            self._memory.close()


_installed: weakref.WeakKeyDictionary[nn.Module, _Installed] = weakref.WeakKeyDictionary()


def _mechanisms(
    wanted: WrapOptions,
    memory: KVMemory,
    weights: ModelWeights,
    forward: ForwardState,
    pools: list[PagePool],
    broker: PageBroker,
    stack: ExitStack,
) -> dict[type, ActionHandler]:
    from elastic.actions.migrate_kv import MigrateKVHandler
    from elastic.actions.resize_kv import ResizeHandler

    waiting, pace = DeferredActions(broker), wanted.pace
    moves = SwapHandler(weights, broker, waiting, pace)
    routes = TransferRouter(weights, forward)
    routes.lay()
    tenancy = stack.enter_context(closing(WeightPageAllocator(pools, broker)))
    replicas = replication(wanted.decoder, memory, weights, forward, tenancy, waiting, pace, stack)
    kv_migrations = stack.enter_context(closing(MigrateKVHandler(memory, pace, weights.require_alone)))
    return {
        ResizeKV: ResizeHandler(memory),
        Release: ReleaseHandler(weights, broker, waiting),
        Swap: moves,
        Restore: moves,
        Migrate: MigrateHandler(weights, routes, tenancy, waiting, pace),
        MigrateKV: kv_migrations,
        Replicate: replicas,
        Evict: replicas,
    }


def _connect(
    run: Runtime,
    memory: KVMemory,
    weights: ModelWeights,
    broker: PageBroker,
    pools: list[PagePool],
    stack: ExitStack,
) -> None:
    """Have memory tell the runtime what happens by itself."""
    for kv_pool in memory.pools:
        kv_pool.on_settled = partial(run.settled, kv_pool.pool.name)
    for name, streamer in weights.streamers.items():
        streamer.on_spare = partial(broker.give_to_cache, name)
    for pool in pools:
        pool.listeners.append(run.pages_came_free)
        stack.callback(pool.listeners.remove, run.pages_came_free)


def _install(
    model: nn.Module,
    decoder: Decoder,
    gate: ForwardGate,
    memory: KVMemory,
    run: Runtime,
    weights: ModelWeights,
    stack: ExitStack,
) -> None:
    """Put hooks, attention function and runtime on the model."""
    from elastic.kvcache.attention import AttentionSwitch
    from elastic.kvcache.hf_cache import ElasticCaches

    hooks = ModelHooks(gate, ElasticCaches(memory), weights, run.forward, run.generations)
    attention = AttentionSwitch(model)
    stack.callback(hooks.remove)
    hooks.install(decoder)
    if len(weights.streamers) > 1:
        hooks.let_stand_in(decoder)
    stack.callback(attention.remove)
    attention.install()
    memory.attention_follows = attention.everywhere
    model.elastic = run  # type: ignore[assignment]
    stack.callback(_forget, weakref.ref(model))


def _forget(model: weakref.ref[nn.Module]) -> None:
    alive = model()
    if alive is not None:
        del alive.elastic
