"""The options of `wrap`, checked before anything is done to the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elastic.config import SLO, Place, parse_bytes, require
from elastic.errors import ConfigError, is_integer, require_flag, require_path_or_none
from elastic.hooks.forward_gate import traffic
from elastic.kvcache.storage.layout import KVLayout
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.places import require_memory
from elastic.memory.rate_limit import RateLimiter
from elastic.planning.sharding.bounds import is_degree
from elastic.quant.variants.eligible import is_packable
from elastic.runtime.controller_setup import MakePolicy
from elastic.weights.decoder import Decoder, find_decoder
from elastic.weights.prepacked.choice import prepacked_layout
from elastic.weights.prepacked.onednn import OneDNNLayout

if TYPE_CHECKING:
    from elastic.quant.variants.variant import Variant


ChooseLayout = Callable[[nn.Module, torch.Tensor, Sequence[torch.Tensor]], OneDNNLayout | None]
"""Of a parameter of a module, and all matrices that are given the same inputs, itself too; (): it is alone."""
PLACEMENTS = ("as_loaded", "auto")


@dataclass(frozen=True)
class WrapOptions:
    """The options of one `wrap`, checked."""

    decoder: Decoder
    places: list[Place]
    placement: str
    layouts: dict[torch.device, KVLayout]
    files: Checkpoint | None
    variants: list[Variant]
    variant_cache: str | Path | None
    copy_rate: RateLimiter
    slo: SLO | None
    start_controller: bool
    make_policy: MakePolicy | None
    shards: int = 1
    """Parts of each decoder layer that can be here or not by themselves."""
    load_shards: frozenset[int] | None = None
    """The parts whose weights are read from `files`, of layers without data; None: the model has all of them."""
    is_packable: Callable[[nn.Module, torch.Tensor], bool] = is_packable
    """Whether a module multiplies its input with a parameter of its own, so that this may be packed."""
    lives_in_pages: Callable[[torch.Tensor], bool] = lambda parameter: True
    """Whether a parameter of a decoder layer goes into pages, if it can; the others stay ordinary tensors."""
    choose_prepacked: ChooseLayout | None = None
    """How a full parameter of a module lies in its pages; None: plain. For layers that stay at one place."""

    def __post_init__(self) -> None:
        for name, value, kinds, allowed in (
            ("slo", self.slo, SLO, "an elastic.SLO"),
            ("checkpoint", self.files, Checkpoint, "a path"),
        ):
            require(value is None or isinstance(value, kinds), name, value, f"{allowed}, or None")
        object.__setattr__(self, "variant_cache", require_path_or_none(self.variant_cache, "variant_cache"))
        require_flag(self.start_controller, "controller")


def check_model(model: nn.Module, *, loads: bool = False) -> Decoder:
    """Return the decoder of a model that can be wrapped. Raises `ConfigError` for any other.

    With `loads` the parameters of its decoder layers have no data yet.
    """
    decoder = find_decoder(model)
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
        raise ConfigError(f"{type(model).__name__} is compiled; wrap the plain model (compiled ones are not supported)")
    inside = tuple(f"{name}." for name in decoder.layer_names) if loads else ()
    absent = [n for n, p in model.named_parameters() if p.device.type == "meta" and not n.startswith(inside)]
    if absent:
        raise ConfigError(
            f"{len(absent)} parameters have no data (such as {absent[0]}): accelerate offloaded them; load the model "
            "with a device_map that keeps every layer on a device"
        )
    served = ("cpu", "cuda", "meta") if loads else ("cpu", "cuda")
    others = {p.device for p in model.parameters() if p.device.type not in served}
    if others:
        raise ConfigError(f"parameters lie on {sorted(map(str, others))}; Elastic has pages on 'cpu' and 'cuda' only")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ConfigError(
            "the weights were made under torch.inference_mode(), so nobody is told when they are written; "
            "load the model outside of it"
        )
    if any(getattr(module, "quantization_scheme", None) is not None for module in model.modules()):
        raise ConfigError(
            "compressed-tensors expands the weights of this model in its forward passes, where they would be exchanged "
            "in their pages; load it with quantization_config=CompressedTensorsConfig(dequantize=True)"
        )
    return decoder


def choose_places(decoder: Decoder, places: Sequence[str | Place] | None) -> list[Place]:
    """Return the places to open. The first one named for a device is where that device's KV cache goes."""
    needed = [device for device in dict.fromkeys(map(device_of, decoder.layers)) if device.type != "meta"]
    if places is None:
        return [Place(str(device), device) for device in needed]
    chosen = [Place.parse(place) for place in one_or_several(places, (str, Place), "places", "'cpu=4GiB'")]
    names = [place.name for place in chosen]
    if len(set(names)) < len(names):
        raise ConfigError(f"places={names} names a place twice")
    without = [str(device) for device in needed if device not in {place.device for place in chosen}]
    if without:
        raise ConfigError(f"places={names} has none on {without}, where decoder layers lie")
    require_memory(chosen)
    return chosen


def one_or_several(value: Any, kinds: type | tuple[type, ...], option: str, example: str) -> list[Any]:
    """Return what an option has, one of these kinds or several, as a list. Raises `ConfigError` for what is neither."""
    if isinstance(value, kinds):
        return [value]
    listed = isinstance(value, Iterable) and not isinstance(value, Mapping | bytes)
    require(listed, option, value, f"one, such as {example}, or a list of them")
    return list(value)


def check_placement(placement: str) -> str:
    """Return a placement that is known. Raises `ConfigError` for any other."""
    if placement not in PLACEMENTS:
        raise ConfigError(f"placement={placement!r} is not known; use one of {', '.join(map(repr, PLACEMENTS))}")
    return placement


def check_shards(shards: int) -> int:
    """Return a number of parts that layers can be cut into. Raises `ConfigError` for any other."""
    require(is_integer(shards) and is_degree(shards), "shards", shards, "a power of two")
    return shards


def check_loaded(
    shards: Collection[int] | None, count: int, checkpoint: object, variants: Sequence[Variant]
) -> frozenset[int] | None:
    """Return the shards whose weights are to be read from files. Raises `ConfigError` for others than there are."""
    if shards is None:
        return None
    require(checkpoint is not None, "checkpoint", None, "the files of the model, where load_shards says what is read")
    require(isinstance(shards, Collection), "load_shards", shards, "a list of their numbers")
    wrong = [shard for shard in shards if not (is_integer(shard) and 0 <= shard < count)]
    require(not wrong, "load_shards", wrong, f"of 0 to {count - 1}")
    require(not variants, "variants", [v.name for v in variants], "empty where load_shards leaves weights out")
    return frozenset(shards)


def check_prepack(
    prepack: bool, places: Sequence[Place], shards: int, load_shards: Collection[int] | None
) -> ChooseLayout | None:
    """Return how matrices are to lie in pages; None: plain. Raises `ConfigError` where they cannot be packed."""
    require_flag(prepack, "prepack")
    if not prepack:
        return None
    names = [place.name for place in places]
    if len(places) > 1 or places[0].device.type != "cpu":
        raise ConfigError(
            f"prepack=True does not go with places={names}: matrices are packed for one place on a CPU; give one, or "
            "leave prepack out"
        )
    if shards > 1 or load_shards is not None:
        raise ConfigError(
            f"prepack=True does not go with shards={shards}, load_shards={load_shards}: parts of a layer are cut from "
            "plain matrices; leave prepack out, or do not cut layers"
        )
    return _layout_of


def _layout_of(
    module: nn.Module, parameter: torch.Tensor, together: Sequence[torch.Tensor] = ()
) -> OneDNNLayout | None:
    """Return how a parameter of a module is to lie in pages: plain, unless it is what `nn.Linear` multiplies with."""
    return prepacked_layout(parameter, together) if type(module).forward is nn.Linear.forward else None


def parse_variants(variants: Sequence[str | Variant]) -> list[Variant]:
    """Return the variants to pack. Raises `ConfigError` for one that is not known, or named twice."""
    from elastic.quant.variants.variant import Variant

    wanted = [Variant.parse(each) for each in one_or_several(variants, (str, Variant), "variants", "'int4'")]
    names = [variant.name for variant in wanted]
    if len(set(names)) < len(names):
        raise ConfigError(f"variants={names} names a variant twice")
    return wanted


def parse_rate(copy_rate: int | str | None) -> RateLimiter:
    """Return a limiter for bytes a second. Raises `ConfigError` for what is no rate."""
    rate = None if copy_rate is None else parse_bytes(copy_rate, option="copy_rate")
    if rate == 0:
        raise ConfigError(f"copy_rate={copy_rate!r} would never end; give bytes a second such as '2GB', or None")
    return RateLimiter(rate, traffic.busy)


def device_of(layer: nn.Module) -> torch.device:
    """Return the device of a layer's parameters."""
    return next(layer.parameters()).device
