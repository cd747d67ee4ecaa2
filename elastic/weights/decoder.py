"""The decoder of a model, found by its structure, with no list of class names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from elastic.errors import ConfigError

EARLIER_NAME = "past_key_values"
"""Of a KV cache, before transformers 5.24, whose models take it for the new one; and in code that others wrote."""
CACHE_NAMES = ("cache", EARLIER_NAME)
"""Of a KV cache, in what a model is given and in what it returns."""
PAGED_CACHE = "paged_cache"
"""Of an engine's KV cache, which no model knows: it is handed down with what is meant for the attention function."""
_BEFORE_LAYERS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "token_type_ids")


@dataclass(frozen=True)
class Decoder:
    """The parts of a causal language model that Elastic works on."""

    roots: tuple[nn.Module, ...]
    """The modules whose forward takes a KV cache, from the outside in: adapters, the model, its base model."""
    layers: tuple[nn.Module, ...]
    layer_names: tuple[str, ...]
    config: Any
    """The text config of the model."""


def find_decoder(model: nn.Module) -> Decoder:
    """Find the roots and decoder layers of a model. Raises `ConfigError` that says what was looked for."""
    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "get_text_config"):
        raise _unsupported(model, "a torch module with a Hugging Face config")
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        raise _unsupported(model, "a model that takes a DynamicCache; this one has a kind of cache of its own")
    text = config.get_text_config(decoder=True)
    if any(getattr(each, "is_encoder_decoder", False) for each in (config, text)):
        raise _unsupported(model, "a decoder-only model; this one has an encoder")
    if set(getattr(text, "layer_types", None) or ()) == {"linear_attention"}:
        raise _unsupported(model, "a KV cache; all layers of this model have a state instead")
    count = layer_count(text)
    names = {m: n for n, m in model.named_modules()}
    lists = [m for m in names if isinstance(m, nn.ModuleList) and len(m) == count != 0]
    lists = [m for m in lists if all(any(True for _ in layer.parameters()) for layer in m)]
    lists = [m for m in lists if type(_config_above(names, m)) is type(text)] or lists  # not a vision tower's
    if not lists:
        raise _unsupported(model, f"a ModuleList of {count} layers (config.num_hidden_layers) with parameters")
    layers = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    above = (module for module, name in names.items() if names[layers].startswith(name))
    roots = tuple(module for module in above if cache_argument(module) and _decides_on_cache(module))
    if not any(getattr(root, "can_generate", bool)() for root in roots):
        raise _unsupported(model, "a model that can generate, with a forward method that takes a KV cache")
    return Decoder(roots, tuple(layers), tuple(f"{names[layers]}.{i}" for i in range(len(layers))), text)


def _config_above(names: Mapping[nn.Module, str], module: nn.Module) -> Any:
    """Return the config of the innermost model that a module is in."""
    above = [
        m for m, name in names.items() if hasattr(m, "config") and f"{names[module]}.".startswith(name and f"{name}.")
    ]
    return max(above, key=lambda m: len(names[m])).config


def layer_count(config: Any) -> int | None:
    """Return the number of decoder layers by a text config; in those of encoders with decoders each has its own."""
    count: int | None = getattr(config, "decoder_layers", None)
    return count or getattr(config, "num_hidden_layers", None)


def layer_configs(config: Any) -> list[Any]:
    """Return the config of each decoder layer by a text config, which may have values of their own for some of them."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * (layer_count(config) or 0)


def context_length(config: Any) -> int | None:
    """Return the most tokens that a model was made for, by its text config; None: that does not say."""
    return getattr(config, "max_position_embeddings", None)


def batch_context_length(config: Any) -> int | None:
    """Return the most tokens that a sequence may have in a batch of any others, by a text config; None: any number.

    Behind its original context, longrope has other frequencies, for all sequences of a batch and for tokens long ago.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]  # of all layers, or of each type
    bounds = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(filter(None, [*bounds, context_length(config)]), default=None)


def parameter_names(module: nn.Module) -> list[str]:
    """Return the positional parameters of a module's forward method, in their order."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]


def between_layers(decoder: Decoder) -> tuple[str, ...]:
    """Return the arguments of the model that calls the layers which are not for them, nor for what is before them."""
    others = {*_BEFORE_LAYERS, *CACHE_NAMES}.union(*map(parameter_names, decoder.layers))
    return tuple(name for name in parameter_names(decoder.roots[-1]) if name not in others)


def cache_argument(module: nn.Module) -> str:
    """Return the name by which the forward method of a module takes a KV cache; empty: it takes none."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHE_NAMES if name in names), "")


def _decides_on_cache(module: nn.Module) -> bool:
    """Return whether a module takes `use_cache`, as models do and layers do not; or hands it on with what it is given.

    Layers take anything too, but only models can say whether they generate.
    """
    parameters = inspect.signature(type(module).forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "use_cache" in parameters or (takes_all and hasattr(module, "can_generate"))


def returned_cache(output: Any) -> Any:
    """Return the KV cache in what a model returned."""
    return output.cache if hasattr(output, "cache") else output.past_key_values


def _unsupported(model: object, wanted: str) -> ConfigError:
    return ConfigError(f"{type(model).__name__} cannot be made elastic: looked for {wanted}")
