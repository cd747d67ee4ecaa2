"""The decoder of a model as vLLM builds it: found by structure, since vLLM's models say nothing about themselves."""

from __future__ import annotations

from torch import nn

from elastic.errors import ConfigError
from elastic.weights.decoder import Decoder


def find_decoder(model: nn.Module) -> Decoder:
    """Return the decoder layers that this rank has. Raises `ConfigError` where there are none.

    They are the `ModuleList` with the most parameters. Layers without any stand for those of other pipeline stages.
    """
    names = {module: name for name, module in model.named_modules()}
    lists = [module for module in names if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())]
    if not lists:
        raise ConfigError(f"{type(model).__name__} cannot be made elastic: looked for a ModuleList of decoder layers")
    layers = max(lists, key=lambda module: sum(parameter.numel() for parameter in module.parameters()))
    own = [(number, layer) for number, layer in enumerate(layers) if any(True for _ in layer.parameters())]
    root = next(module for module in names if any(child is layers for child in module.children()))
    layer_names = tuple(f"{names[layers]}.{number}" for number, _ in own)
    return Decoder((root,), tuple(layer for _, layer in own), layer_names, getattr(model, "config", None))
