"""`wrap` and `unwrap`: a Hugging Face model becomes elastic in place, and an ordinary one again."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

from torch import nn

from elastic.config import SLO, Place
from elastic.errors import StateError
from elastic.hooks.layer_hooks import EnterLayer
from elastic.kvcache.storage.layout import choose_layout
from elastic.memory.checkpoint_file import Checkpoint
from elastic.runtime.controller_setup import Asked, choose_policy
from elastic.runtime.layer_benchmark import measure
from elastic.runtime.options import (
    WrapOptions,
    check_loaded,
    check_model,
    check_placement,
    check_prepack,
    check_shards,
    choose_places,
    parse_rate,
    parse_variants,
)
from elastic.runtime.runtime import Runtime
from elastic.weights.decoder import Decoder

if TYPE_CHECKING:
    from elastic.quant.sensitivity.profile_file import Profile
    from elastic.quant.variants.variant import Variant

Model = TypeVar("Model", bound=nn.Module)
_lock = threading.Lock()
_changing: WeakSet[nn.Module] = WeakSet()
"""Models that are being wrapped or unwrapped."""


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
    checkpoint: str | Path | Checkpoint | None = None,
    shards: int = 1,
    load_shards: Collection[int] | None = None,
    prepack: bool = False,
) -> Model:
    """Make a Hugging Face causal language model elastic, in place; returns the same object.

    Then the weights of its decoder layers and its KV cache live in pages of the same budget, under `model.elastic`, the
    `Runtime`; `generate`, `pipeline` and calls go on as before. `places` says what memory may be used, one place at
    least for each device of decoder layers (by default one, with most of what is free); a place's budget covers all of
    the model there. Layers that find no room are in host memory, and streamed when called. With `placement="as_loaded"`
    layers begin at their device's first place; "auto" fills places in order, and leaves room for a KV cache.

    `policy` says who calls actions. "manual": you do. "accuracy", "balanced", "performance", a `Policy` or its file: a
    controller swaps layers under pressure and back after it, in an `order`: a `Profile`, its file, "front_to_back",
    "last_first" or "contiguous". "scale", a `Scale`: it replicates and moves them over `places`, which models with the
    same `Scale(group=…)` share. An object with `decide(snapshot, state)`: what that says. Several: their cheapest
    remedy. All see `slo`; with `controller=False` it waits for `start()`. (docs/controller.md)

    `kv_layout`: "head_major", "batch_major" or "token_major"; None: the device's best. `checkpoint`: its safetensors
    file or directory; released weights are mapped from there, if its dtype is the files'. `variants`: what layers can
    be swapped to, such as "int8", "2:4" or a `Variant`, packed now and kept in host memory, for later processes in the
    directory `variant_cache`. `copy_rate` ("2GB") bounds the bytes a second copied while it computes. `shards`, a power
    of two: the parts of each layer for ranks that share it; of layers without data only `load_shards` are read (part p
    of layer l: `l * shards + p`). `prepack`: at a CPU place matrices are in oneDNN's order if faster, round otherwise.

    No thread may be in the model. Raises `ConfigError`, `StateError`, `CapacityError`; the model is as it was then.
    """
    decoder = _check(model, loads=load_shards is not None)
    packed, opened = parse_variants(variants), choose_places(decoder, places)
    options = WrapOptions(
        decoder=decoder,
        places=opened,
        placement=check_placement(placement),
        layouts={place.device: choose_layout(kv_layout, place.device, place.page_bytes) for place in reversed(opened)},
        files=Checkpoint(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint,
        variants=packed,
        variant_cache=variant_cache,
        copy_rate=parse_rate(copy_rate),
        slo=slo,
        start_controller=controller,
        shards=check_shards(shards),
        load_shards=check_loaded(load_shards, len(decoder.layers) * shards, checkpoint, packed),
        choose_prepacked=check_prepack(prepack, opened, shards, load_shards),
        make_policy=choose_policy(policy, slo, order, packed, decoder.layers, partial(measure, decoder, opened)),
    )
    return _install(model, options)


def _install(model: Model, options: WrapOptions) -> Model:
    from elastic.runtime.installation import install

    with _alone(model):
        _require_own_layers(model, options.decoder)
        install(model, options)
    return model


def _check(model: nn.Module, *, loads: bool = False) -> Decoder:
    decoder = check_model(model, loads=loads)
    with _alone(model):
        _require_own_layers(model, decoder)
    return decoder


def _require_own_layers(model: nn.Module, decoder: Decoder) -> None:
    from elastic.runtime.installation import installations  # imports transformers, which `import elastic` does not

    if model in installations or isinstance(getattr(model, "elastic", None), Runtime):
        raise StateError(f"{type(model).__name__} is already wrapped; unwrap it first")
    if _are_in_pages(decoder.layers):
        raise StateError(
            f"layers of this {type(model).__name__} are those of another model that is wrapped; unwrap that one first, "
            "or load them again if it is gone"
        )


def _are_in_pages(layers: Iterable[nn.Module]) -> bool:
    """Return whether there are layers of a wrapped model among these modules."""
    return any(isinstance(hook, EnterLayer) for layer in layers for hook in layer._forward_pre_hooks.values())


@contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Raise `StateError` if another thread wraps or unwraps the model; keep others from it meanwhile."""
    with _lock:
        if model in _changing:
            raise StateError(f"another thread wraps or unwraps this {type(model).__name__}; wait for it")
        _changing.add(model)
    try:
        yield
    finally:
        with _lock:
            _changing.discard(model)


def unwrap(model: Model) -> Model:
    """Leave the model as it was: no hook, no attribute, memory given back; returns the same object.

    Waits for actions and forward passes in flight. Caches that still live keep their contents, in ordinary tensors.
    Raises `StateError` for a model that is not wrapped, or inside one of its forward passes.
    """
    from elastic.runtime.installation import installations

    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise StateError(f"{kind} is not a model; unwrap takes what wrap returned")
    with _alone(model):
        if model not in installations:  # which knows more than the attribute, that anybody can set
            if _are_in_pages(model.modules()):
                raise StateError(
                    f"this {kind} is around, a part, or a shallow copy of a wrapped model; unwrap that one, or load it "
                    "again if it is gone"
                )
            raise StateError(f"{kind} is not wrapped; call elastic.wrap(model) first")
        installations[model].take_off()
        del installations[model]
    return model
