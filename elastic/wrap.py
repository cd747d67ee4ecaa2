"""`wrap` and `unwrap`: check everything, then install, so that it all comes off again. The composition root."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from elastic.assembly import homes, kv_memory, make_reserves, move_weights, open_places, pack
from elastic.calibration import measure
from elastic.config import SLO, Place
from elastic.control import Asked, choose_policy, set_up_control
from elastic.errors import StateError
from elastic.hooks.actions import Waiting
from elastic.hooks.gate import Gate
from elastic.hooks.install import ModelHooks
from elastic.hooks.migrate import MigrateMechanism
from elastic.hooks.moving import (
    layer_slots,
    make_layers,
)
from elastic.hooks.release import ReleaseMechanism
from elastic.hooks.reserve import ReservingLender
from elastic.hooks.structure import Decoder
from elastic.hooks.swap import MoveMechanism
from elastic.hooks.tenancy import Tenancy
from elastic.hooks.travel import Routes
from elastic.hooks.weights import ModelWeights
from elastic.kvcache.control import KV
from elastic.kvcache.layout import choose_layout
from elastic.kvcache.lending import KVLender
from elastic.memory.checkpoint import Checkpoint
from elastic.memory.janitor import janitor
from elastic.memory.pool import PagePool
from elastic.options import Options, check_model, check_placement, choose_places, parse_rate, parse_variants
from elastic.replication import replication
from elastic.runtime import Runtime, runtime
from elastic.types import Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Swap
from elastic.worker import Mechanism

if TYPE_CHECKING:
    from elastic.kvcache.memory import KVMemory
    from elastic.quant.profile_file import Profile
    from elastic.quant.variants import Variant

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
    _remember(model, _build(model, wanted))
    return model


def _remember(model: nn.Module, installed: _Installed) -> None:
    """For `unwrap`, or for when the model dies."""
    _installed[model] = installed
    weakref.finalize(model, janitor.put, installed.abandon).atexit = False


def _build(model: nn.Module, wanted: Options) -> _Installed:
    """Move the model's memory, then put everything on it; on an error it is as it was."""
    decoder = wanted.decoder
    with ExitStack() as memory_stack, ExitStack() as model_stack:
        slots = layer_slots(model, decoder)
        pools = open_places(model, decoder, wanted.places, slots, memory_stack)
        layers = make_layers(decoder, slots, homes(decoder, slots, pools, wanted.placement), wanted.files)
        pack(model, layers, pools, wanted.variants, wanted.variant_cache)
        reserves = make_reserves(layers, memory_stack)
        # a policy swaps layers: memory for streaming released ones is taken from the cache if one is ever released
        least_stages = 1 if wanted.make_policy is None else 0
        weights = move_weights(layers, pools, least_stages, memory_stack, model_stack)
        memory = kv_memory(decoder, pools, wanted.layouts, layers, memory_stack)
        gate = Gate()
        lender = ReservingLender(KVLender(memory, gate.exclusive), reserves)
        mechanisms = _mechanisms(wanted, memory, weights, pools, lender, memory_stack)
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


def _mechanisms(
    wanted: Options,
    memory: KVMemory,
    weights: ModelWeights,
    pools: list[PagePool],
    lender: ReservingLender,
    stack: ExitStack,
) -> dict[type, Mechanism]:
    from elastic.kvcache.migrate import MigrateKVMechanism
    from elastic.kvcache.resize import ResizeMechanism

    waiting, pace = Waiting(lender), wanted.pace
    moves = MoveMechanism(weights, lender, waiting, pace)
    routes = Routes(weights)
    routes.lay()
    tenancy = stack.enter_context(closing(Tenancy(pools, lender)))
    replicas = replication(wanted.decoder, memory, weights, tenancy, waiting, pace, stack)
    kv_migrations = stack.enter_context(closing(MigrateKVMechanism(memory, pace, weights.require_alone)))
    return {
        ResizeKV: ResizeMechanism(memory),
        Release: ReleaseMechanism(weights, lender, waiting),
        Swap: moves,
        Restore: moves,
        Migrate: MigrateMechanism(weights, routes, tenancy, waiting, pace),
        MigrateKV: kv_migrations,
        Replicate: replicas,
        Evict: replicas,
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
