"""`wrap` and `unwrap`: check everything, then install, so that it all comes off again. The composition root."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from elastic.calibration import measure
from elastic.config import SLO, Place
from elastic.control import Asked, choose_policy, set_up_control
from elastic.errors import StateError
from elastic.hooks.actions import Waiting
from elastic.hooks.gate import Gate
from elastic.hooks.install import ModelHooks
from elastic.hooks.layer import LayerWeights
from elastic.hooks.migrate import MigrateMechanism
from elastic.hooks.moving import (
    choose_absent,
    give_back,
    held_outside,
    layer_slots,
    make_layers,
    move_in,
    move_out,
    spread,
)
from elastic.hooks.release import ReleaseMechanism
from elastic.hooks.reserve import Reserve, ReservingLender
from elastic.hooks.slots import Slot
from elastic.hooks.streaming import Streamer
from elastic.hooks.structure import Decoder
from elastic.hooks.swap import MoveMechanism
from elastic.hooks.travel import Routes
from elastic.hooks.weights import ModelWeights
from elastic.kvcache.control import KV
from elastic.kvcache.layout import Layout, choose_layout
from elastic.kvcache.lending import KVLender
from elastic.kvcache.pool import KVPool
from elastic.memory.checkpoint import Checkpoint
from elastic.memory.copying import Pace, make_copier
from elastic.memory.janitor import janitor
from elastic.memory.places import close_place, open_place
from elastic.memory.pool import PagePool
from elastic.options import Options, check_model, check_placement, choose_places, device_of, parse_rate, parse_variants
from elastic.runtime import Runtime, runtime
from elastic.types import Migrate, Release, ResizeKV, Restore, Swap
from elastic.worker import Mechanism

if TYPE_CHECKING:
    from elastic.kvcache.memory import KVMemory
    from elastic.quant.profile_file import Profile
    from elastic.quant.variants import Variant

Model = TypeVar("Model", bound=nn.Module)
_MAX_TOKENS_IF_UNKNOWN = 8192


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
    "front_to_back", "last_first" or "contiguous". "scale", a `Scale`: it replicates and moves them over `places`. An
    object with `decide(snapshot, state)`: what that says. Several, in a tuple: their cheapest remedy. All look at
    `slo`; with `controller=False` the thread waits for `start()`. (docs/controller.md)

    `kv_layout` is "head_major", "batch_major" or "token_major"; None: the best for the device. `checkpoint`: the
    safetensors that the model was loaded from, a file or a directory; released weights are read from there by mmap.

    `variants` are what layers can be swapped to: "int8", "int4", "int3", or a `Variant`. Each is packed now, for every
    layer, and kept in host memory beside the full weights. `variant_cache` is a directory, such as the model's, where
    they are kept on disk too, for the second start and for other processes. `copy_rate`, such as "2GB", bounds the
    bytes a second of what is moved, where it would slow down what computes beside it (a CPU); None: it does not.

    Raises `ConfigError` for what cannot work, `StateError` for a wrapped model, `CapacityError` for a budget too small
    for the model; in each case the model is as it was.
    """
    decoder = check_model(model)
    chosen = choose_places(decoder, places)
    parsed = parse_variants(variants)
    wanted = Options(
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
    _installed[model] = installed = _build(model, wanted)
    weakref.finalize(model, janitor.put, installed.abandon).atexit = False
    return model


def _build(model: nn.Module, wanted: Options) -> _Installed:
    """Move the model's memory, then put everything on it; on an error it is as it was."""
    decoder = wanted.decoder
    with ExitStack() as memory_stack, ExitStack() as model_stack:
        slots = layer_slots(model, decoder)
        pools = _open_places(model, decoder, wanted.places, slots, memory_stack)
        layers = make_layers(decoder, slots, _homes(decoder, slots, pools, wanted.placement), wanted.files)
        _pack(model, layers, wanted.variants, wanted.variant_cache)
        reserves = _reserves(layers, memory_stack)
        # a policy swaps layers: memory for streaming released ones is taken from the cache if one is ever released
        least_stages = 1 if wanted.make_policy is None else 0
        weights = _weights(layers, pools, least_stages, memory_stack, model_stack)
        memory = _kv_memory(decoder, pools, wanted.layouts, layers, memory_stack)
        gate = Gate()
        lender = ReservingLender(KVLender(memory, gate.exclusive), reserves)
        mechanisms = _mechanisms(memory, weights, pools, lender, wanted.pace, memory_stack)
        run = Runtime(gate, partial(KV, memory), weights, pools, mechanisms)
        _connect(run, memory, weights, lender, pools, memory_stack)
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


def _open_places(
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


def _homes(decoder: Decoder, slots: list[dict[str, Slot]], pools: list[PagePool], placement: str) -> Sequence[PagePool]:
    """The place of each layer."""
    if placement == "auto":
        return spread([sum(slot.parameter.nbytes for slot in here.values()) for here in slots], pools)
    first = {pool.backend.device: pool for pool in reversed(pools)}
    return [first[device_of(layer)] for layer in decoder.layers]


def _pack(model: nn.Module, layers: list[LayerWeights], variants: list[Variant], cache: str | Path | None) -> None:
    """Pack every layer for every variant, from its parameters where they are now."""
    if not variants:
        return
    from elastic.quant.build import obtain
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
        for layer, packed in zip(own, obtain(parameters, variant, cache, inputs), strict=True):
            layer.variants = {**layer.variants, variant.name: packed}


def _reserves(layers: list[LayerWeights], stack: ExitStack) -> dict[str, Reserve]:
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


def _weights(
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


def _mechanisms(
    memory: KVMemory,
    weights: ModelWeights,
    pools: list[PagePool],
    lender: ReservingLender,
    pace: Pace,
    stack: ExitStack,
) -> dict[type, Mechanism]:
    from elastic.kvcache.resize import ResizeMechanism

    waiting = Waiting(lender)
    moves = MoveMechanism(weights, lender, waiting, pace)
    routes = Routes(weights)
    routes.lay()
    migrations = MigrateMechanism(weights, routes, pools, lender, waiting, pace)
    stack.callback(migrations.close)
    return {
        ResizeKV: ResizeMechanism(memory),
        Release: ReleaseMechanism(weights, lender, waiting),
        Swap: moves,
        Restore: moves,
        Migrate: migrations,
    }


def _connect(
    run: Runtime,
    memory: KVMemory,
    weights: ModelWeights,
    lender: ReservingLender,
    pools: list[PagePool],
    stack: ExitStack,
) -> None:
    """Have memory tell the runtime what happens by itself."""
    for kv_pool in memory.pools:
        kv_pool.on_settled = partial(run.settled, kv_pool.pool.name)
    for name, streamer in weights.streamers.items():
        streamer.on_spare = partial(lender.lend, name)
    for pool in pools:
        pool.listeners.append(run.pages_came_free)
        stack.callback(pool.listeners.remove, run.pages_came_free)


def _kv_memory(
    decoder: Decoder,
    pools: list[PagePool],
    layouts: dict[torch.device, Layout],
    layers: Sequence[LayerWeights],
    stack: ExitStack,
) -> KVMemory:
    from elastic.kvcache.memory import KVMemory

    kv_pools: dict[str, tuple[KVPool, Layout]] = {}
    for pool in pools:
        device = pool.backend.device
        kv_pool = KVPool(pool, pool.free_pages * pool.page_bytes, host_offload=device.type == "cuda")
        stack.callback(kv_pool.close)
        kv_pools[pool.name] = kv_pool, layouts[device]
    max_tokens = getattr(decoder.config, "max_position_embeddings", None) or _MAX_TOKENS_IF_UNKNOWN
    memory = KVMemory(list(kv_pools.values()), max_tokens, [kv_pools[layer.pool.name][0] for layer in layers])
    stack.callback(memory.let_go)
    return memory


def _install(
    model: nn.Module,
    decoder: Decoder,
    gate: Gate,
    memory: KVMemory,
    run: Runtime,
    weights: ModelWeights,
    stack: ExitStack,
) -> None:
    """Put hooks, attention function and runtime on the model."""
    from elastic.kvcache.attention import AttentionSwitch
    from elastic.kvcache.cache import Caches

    hooks, attention = ModelHooks(gate, Caches(memory), weights, run.generations), AttentionSwitch(model)
    stack.callback(hooks.remove)
    hooks.install(decoder)
    stack.callback(attention.remove)
    attention.install()
    model.elastic = run  # type: ignore[assignment]
    stack.callback(_forget, weakref.ref(model))


def _forget(model: weakref.ref[nn.Module]) -> None:
    alive = model()
    if alive is not None:
        del alive.elastic
