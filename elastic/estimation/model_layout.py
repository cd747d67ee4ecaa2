"""A model without weights, and its decoder layers by kind: layers of one kind are alike in all but their numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.engines.continuous.compatibility import refusal
from elastic.errors import ConfigError
from elastic.estimation.kv_room import KVShape, kv_shape_of
from elastic.kvcache.attention_heads import AttentionHeads, attention_heads
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.model_files import read_config, reading, require_full_weights
from elastic.quant.variants.eligible import LayerParameters, head_sizes
from elastic.runtime.runtime import Runtime
from elastic.weights.decoder import Decoder, find_decoder
from elastic.weights.eligible import held_outside, layer_slots
from elastic.weights.parameter_slot import ParameterSlot
from elastic.weights.proxy.tensor import WeightProxy


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Decoder layers of one class, with parameters of the same names, shapes and dtypes, and one kind of attention.

    A kind of a layout is equal to itself alone, and a key of what is counted of it.
    """

    name: str
    layers: tuple[int, ...]
    attention: str
    """Of `config.layer_types`, such as "sliding_attention"; "": the model does not tell."""
    module: nn.Module
    """The first of them."""
    slots: Mapping[str, ParameterSlot]
    """Its parameters that live in pages, by their names in the layer."""
    path: str
    """Its name in the model."""
    full: LayerLayout
    """How it lies in pages."""

    @cached_property
    def parameters(self) -> LayerParameters:
        """What quantization sees of it."""
        return self.having({name: slot.parameter for name, slot in self.slots.items()})

    def having(self, tensors: Mapping[str, torch.Tensor]) -> LayerParameters:
        """Return the same with tensors of other shapes, `[...]`, such as those of a shard."""
        modules = {name: slot.homes[0][0] for name, slot in self.slots.items()}
        pairs = {name: (modules[name], tensor) for name, tensor in tensors.items()}
        return LayerParameters(self.path, pairs, head_sizes=head_sizes(self.module))


@dataclass(frozen=True)
class ModelLayout:
    """A model whose parameters may have no data, and what its config makes of it."""

    model: Any
    dtype: torch.dtype
    """Of its first parameter."""
    decoder: Decoder
    heads: tuple[AttentionHeads, ...]
    """Of each layer."""
    kv_shape: Callable[[str], KVShape]
    """Gives the keys and values of one token in one layer by their form, as `kv_shape_of`."""
    kinds: tuple[LayerKind, ...]
    fixed: Mapping[str, int]
    """Bytes of what stays in ordinary tensors, by owner: embedding, head, norms, buffers."""
    trial: Callable[[], Any]
    """Gives the model on the meta device that stands for it where engines try what they can serve."""

    @cached_property
    def kind_of(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        by_layer = {layer: kind for kind in self.kinds for layer in kind.layers}
        return tuple(by_layer[layer] for layer in range(len(self.decoder.layers)))

    @cached_property
    def refusal(self) -> str:
        """Why the engine would not serve it, in its words; "": it would, or its config does not make its class."""
        try:
            model = self.trial()
        except ConfigError:
            return ""
        return refusal(model)


def layout_of(source: Any, dtype: torch.dtype | None = None) -> ModelLayout:
    """Return the layout of a model directory, a config, or a model, in a dtype; None: its own.

    Of a directory, `config.json` is enough. Raises `ConfigError` for what is no decoder, and for heads that cannot be.
    """
    model = source if isinstance(source, nn.Module) else meta_model(source, dtype)
    trial = partial(_as_configured, source) if model is source else lambda: model
    if isinstance(getattr(model, "elastic", None), Runtime):
        model = _without_data(model)
    decoder = find_decoder(model)
    heads = attention_heads(decoder.config)
    for each in heads:
        if each.queries % each.keys:
            raise ConfigError(
                f"{type(decoder.config).__name__}: {each.queries} heads of queries cannot share {each.keys} heads of "
                "keys and values evenly; correct num_attention_heads or num_key_value_heads"
            )
    slots = layer_slots(model, decoder)
    fixed: dict[str, int] = {}
    for held in held_outside(model, decoder, slots).values():
        for owner, nbytes in held.items():
            fixed[owner] = fixed.get(owner, 0) + nbytes
    own_dtype = next(model.parameters()).dtype
    kv_shape = cache(partial(kv_shape_of, decoder.config, own_dtype.itemsize))
    return ModelLayout(model, own_dtype, decoder, heads, kv_shape, _kinds(decoder, slots), fixed, trial)


def meta_model(source: Any, dtype: torch.dtype | None = None) -> Any:
    """Make the model of a directory or a config on the meta device: it has no data, whatever its size."""
    from transformers import AutoModelForCausalLM

    path = isinstance(source, str | Path)
    config = (
        read_config(str(source), option="MODEL") if path else copy.deepcopy(source)
    )  # transformers writes the dtype
    if not hasattr(config, "get_text_config"):
        raise ConfigError(
            f"{type(source).__name__} is no model; give a directory with config.json, a config or a model"
        )
    own = getattr(config, "dtype", None) or torch.bfloat16
    what = f"MODEL {source}" if path else type(config).__name__
    require_full_weights(
        config, what, "which is not estimated; name the directory of its full weights, or leave quantization_config out"
    )
    return _on_meta(AutoModelForCausalLM.from_config, config, dtype or own, what)


def _on_meta(make: Callable[..., Any], config: Any, dtype: torch.dtype, what: str) -> Any:
    """Make a model of a config on the meta device. Raises `ConfigError` where that fails."""
    with torch.device("meta"), reading(what, "see that its config.json is whole"):
        model = make(config, dtype=dtype).eval()
    return model.to("meta")  # some draw parameters by functions that know no default device


def _as_configured(model: nn.Module) -> Any:
    """Make the model that the config of a model makes of its class: no weights, adapters, hooks or quantized layers.

    Raises `ConfigError` for a class that its config does not make.
    """
    from transformers import PreTrainedModel

    plain = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    if plain is None:
        raise ConfigError(f"{type(model).__name__} has no model of transformers in it; give its config")
    dtype = torch.get_default_dtype()  # another one would be that of all threads meanwhile
    return _on_meta(plain._from_config, copy.deepcopy(plain.config), dtype, type(plain).__name__)


def _without_data(model: nn.Module) -> nn.Module:
    """Return a plain copy of a wrapped model on the meta device, but for parameters of other libraries' kinds."""
    empty = partial(torch.empty_like, device="meta")
    shapes: dict[int, Any] = {id(each): empty(each) for each in model.buffers()}
    plain = nn.Parameter, WeightProxy
    shapes |= {id(p): nn.Parameter(empty(p), False) if type(p) in plain else p for p in model.parameters()}
    return copy.deepcopy(model, shapes)


def _kinds(decoder: Decoder, slots: list[dict[str, ParameterSlot]]) -> tuple[LayerKind, ...]:
    """Group the layers, in the order of the first of each kind."""
    types = getattr(decoder.config, "layer_types", None) or [""] * len(decoder.layers)
    groups: dict[object, list[int]] = {}
    for index, (layer, attention) in enumerate(zip(decoder.layers, types, strict=True)):
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())
        groups.setdefault((type(layer), attention, shapes, tuple(slots[index])), []).append(index)
    kinds: list[LayerKind] = []
    for layers in groups.values():
        first = layers[0]
        attention = types[first]
        name = f"{type(decoder.layers[first]).__name__}{f' {attention}' if attention else ''}"
        name += f" from {first}" if any(kind.name == name for kind in kinds) else ""
        layer, path = decoder.layers[first], decoder.layer_names[first]
        full = LayerLayout.pack({n: ParameterLayout.like(s.parameter) for n, s in slots[first].items()})
        kinds.append(LayerKind(name, tuple(layers), attention, layer, slots[first], path, full))
    return tuple(kinds)
