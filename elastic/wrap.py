"""`wrap` and `unwrap`: check everything, then install, so that it all comes off again. The composition root."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from elastic.config import Place
from elastic.errors import ConfigError, StateError
from elastic.hooks.gate import Gate
from elastic.hooks.install import ModelHooks
from elastic.hooks.structure import Decoder, find_decoder
from elastic.kvcache.layout import Layout, choose_layout
from elastic.kvcache.pool import KVPool
from elastic.memory.janitor import janitor
from elastic.memory.places import close_place, open_place
from elastic.memory.pool import PagePool
from elastic.runtime import Runtime, runtime
from elastic.types import Residency

if TYPE_CHECKING:
    from elastic.kvcache.memory import KVMemory

Model = TypeVar("Model", bound=nn.Module)
_POLICIES = ("manual",)
_MAX_TOKENS_IF_UNKNOWN = 8192


def wrap(
    model: Model,
    *,
    policy: str = "manual",
    places: Sequence[str | Place] | None = None,
    kv_layout: str | None = None,
) -> Model:
    """Make a Hugging Face causal language model elastic, in place; returns the same object.

    From then on `generate`, `pipeline` and plain calls keep their KV cache in virtual memory under `model.elastic`, the
    `Runtime`. `places` says what memory may be used, at least one place for each device that holds decoder layers (by
    default one each, with most of what is free); a place's budget covers the model's own weights there too.
    `policy="manual"` is the only one yet: actions are called by hand. `kv_layout` is "head_major", "batch_major" or
    "token_major"; None takes the best for the device.

    Raises `ConfigError` for a model or option that cannot work, `StateError` for a wrapped model, `CapacityError` for a
    budget too small for the model; in each case the model is as it was.
    """
    if policy not in _POLICIES:
        raise ConfigError(f"policy={policy!r} is not known; choose one of {_POLICIES}")
    decoder = _check_model(model)
    chosen = _choose_places(decoder, places)
    layouts = {place.device: choose_layout(kv_layout, place.device) for place in chosen}
    with ExitStack() as memory_stack, ExitStack() as model_stack:
        pools = [_open(place, model, decoder, memory_stack) for place in chosen]
        memory = _kv_memory(decoder, pools, layouts, memory_stack)
        gate = Gate()
        run = Runtime(gate, memory, pools, _residencies(decoder, chosen))
        for kv_pool in memory.pools:
            kv_pool.on_settled = partial(run.settled, kv_pool.pool.name)
        _install(model, decoder, gate, memory, run, model_stack)
        run.start()
        installed = _Installed(run, model_stack.pop_all(), memory_stack.pop_all())
    _installed[model] = installed
    weakref.finalize(model, janitor.put, installed.abandon).atexit = False
    return model


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

    def __init__(self, run: Runtime, on_model: ExitStack, memory: ExitStack) -> None:
        self._run = run
        self._on_model = on_model
        self._memory = memory

    def take_off(self) -> None:
        if self._run.in_forked_child:  # the memory is the parent's
            self._on_model.close()
            return
        with self._run.last_safe_point():
            self._on_model.close()
            self._memory.close()

    def abandon(self) -> None:
        """The model is gone without `unwrap`."""
        if not self._run.in_forked_child:
            self._run.close()
            self._memory.close()


_installed: weakref.WeakKeyDictionary[nn.Module, _Installed] = weakref.WeakKeyDictionary()


def _check_model(model: nn.Module) -> Decoder:
    decoder = find_decoder(model)
    if isinstance(getattr(model, "elastic", None), Runtime):
        raise StateError(f"{type(model).__name__} is already wrapped; unwrap it first")
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
        raise ConfigError(f"{type(model).__name__} is compiled; wrap the plain model (compiled ones are not supported)")
    absent = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if absent:
        raise ConfigError(
            f"{len(absent)} parameters have no data (such as {absent[0]}): accelerate offloaded them; load the model "
            "with a device_map that keeps every layer on a device"
        )
    others = {p.device for p in model.parameters() if p.device.type not in ("cpu", "cuda")}
    if others:
        raise ConfigError(f"parameters lie on {sorted(map(str, others))}; Elastic has pages on 'cpu' and 'cuda' only")
    return decoder


def _choose_places(decoder: Decoder, places: Sequence[str | Place] | None) -> list[Place]:
    """The places to open. The first one named for a device is where that device's KV cache goes."""
    needed = list(dict.fromkeys(_device(layer) for layer in decoder.layers))
    if places is None:
        return [Place(str(device), device) for device in needed]
    chosen = [Place.parse(place) for place in ([places] if isinstance(places, str | Place) else places)]
    names = [place.name for place in chosen]
    if len(set(names)) < len(names):
        raise ConfigError(f"places={names} names a place twice")
    without = [str(device) for device in needed if device not in {place.device for place in chosen}]
    if without:
        raise ConfigError(f"places={names} has none on {without}, where decoder layers lie")
    return chosen


def _open(place: Place, model: nn.Module, decoder: Decoder, stack: ExitStack) -> PagePool:
    """Open a place and charge what the model holds on its device."""
    held = _held_bytes(model, decoder, place.device)
    pool = open_place(place, resident_bytes=sum(held.values()))
    stack.callback(close_place, pool)
    for owner, nbytes in held.items():
        pool.charge(owner, nbytes)
        stack.callback(pool.discharge, owner, nbytes)
    return pool


def _held_bytes(model: nn.Module, decoder: Decoder, device: torch.device) -> Counter[str]:
    """Bytes of parameters and buffers on a device: `layer:i`, or `fixed:name` for what lies outside the layers."""
    owners = {name: f"layer:{i}" for i, name in enumerate(decoder.layer_names)}
    held: Counter[str] = Counter()
    seen: set[int] = set()
    for name, tensor in _tensors(model):
        storage = tensor.untyped_storage()
        if tensor.device != device or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        layer = next((owner for prefix, owner in owners.items() if name.startswith(prefix + ".")), None)
        held[layer or f"fixed:{name.rsplit('.', 1)[0]}"] += storage.nbytes()
    return held


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _kv_memory(
    decoder: Decoder, pools: list[PagePool], layouts: dict[torch.device, Layout], stack: ExitStack
) -> KVMemory:
    from elastic.kvcache.memory import KVMemory

    kv_pools: dict[torch.device, tuple[KVPool, Layout]] = {}
    needed = {_device(layer) for layer in decoder.layers}
    for pool in pools:
        device = pool.backend.device
        if device in needed and device not in kv_pools:
            maximum = pool.free_pages * pool.page_bytes
            kv_pool = KVPool(pool, maximum, host_offload=device.type == "cuda")
            stack.callback(kv_pool.close)
            kv_pools[device] = kv_pool, layouts[device]
    memory = KVMemory(kv_pools, getattr(decoder.config, "max_position_embeddings", None) or _MAX_TOKENS_IF_UNKNOWN)
    stack.callback(memory.let_go)
    return memory


def _install(model: nn.Module, decoder: Decoder, gate: Gate, memory: KVMemory, run: Runtime, stack: ExitStack) -> None:
    """Put hooks, attention function and runtime on the model."""
    from elastic.kvcache.attention import AttentionSwitch
    from elastic.kvcache.cache import Caches

    hooks, attention = ModelHooks(gate, Caches(memory)), AttentionSwitch(model)
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


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


def _residencies(decoder: Decoder, places: list[Place]) -> dict[str, tuple[Residency, ...]]:
    """Each layer whole, on the first place of its device."""
    names = {place.device: place.name for place in reversed(places)}
    found: dict[str, tuple[Residency, ...]] = {}
    for name, layer in zip(decoder.layer_names, decoder.layers, strict=True):
        dtype = str(next(layer.parameters()).dtype).removeprefix("torch.")
        found[name] = (Residency(names[_device(layer)], dtype),)
    return found
