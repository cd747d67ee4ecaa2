"""Fingerprints: a model with a few of its decoder layers, real weights, and everything else as it is. (section 5.1)

The files are read by mmap, and of the other layers nothing is. Layers are made by the whole model's config, so they
keep what depends on their numbers; then they are numbered anew, as caches want it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.estimation.model_layout import meta_model
from elastic.model_files import quiet, read_config, reading
from elastic.weights.decoder import find_decoder


def fingerprint(path: str | Path, layers: Sequence[int], dtype: torch.dtype | None = None) -> Any:
    """Read a model with only these of its decoder layers, in their order, in evaluation mode, on the CPU.

    dtype: None is the checkpoint's. One layer may be named more than once. Raises `ConfigError` for layers that the
    model has not, and for files that lack weights.
    """
    whole = meta_model(path)
    count = len(find_decoder(whole).layers)
    if not layers or not all(0 <= layer < count for layer in layers):
        raise ConfigError(f"layers={list(layers)}: the model has layers 0 to {count - 1}; name some of these")
    what = f"MODEL {path}"
    with quiet(), reading(what, "see that its files are whole, and that config.json is theirs"):
        model, report = _holed(type(whole), set(layers)).from_pretrained(
            path,
            config=read_config(str(path), option="MODEL"),
            dtype=dtype or "auto",
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"{what}: its files lack {len(missing)} weights (such as {missing[0]}); copy them again")
    return _compact(model, layers).eval().requires_grad_(False)


def take_layers(model: Any, layers: Sequence[int]) -> Any:
    """Return a copy of a loaded model with only these of its decoder layers; weights are shared with the model."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return _compact(copy.deepcopy(model, memo), layers)


def _holed(kind: type[Any], layers: set[int]) -> type[Any]:
    """Return a class of model whose other layers have no parameters, so that none are read for them."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        own = _layer_list(self)
        for index in range(len(own)):
            if index not in layers:
                own[index] = nn.Identity()

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def _layer_list(model: nn.Module) -> nn.ModuleList:
    """Return the list of decoder layers, in whichever module it is."""
    parent, _, name = find_decoder(model).layer_names[0].rpartition(".")[0].rpartition(".")
    layers = getattr(model.get_submodule(parent), name)
    assert isinstance(layers, nn.ModuleList)
    return layers


def _compact(model: Any, layers: Sequence[int]) -> Any:
    """Leave only these layers in a model, numbered from 0; its config says so."""
    text = model.config.get_text_config(decoder=True)
    count = text.num_hidden_layers
    stack = max(
        (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count),
        key=lambda m: sum(p.numel() for p in m.parameters()),
    )
    kept = [stack[layer] for layer in layers]
    configs = {id(config): config for config in (model.config, text)}  # one for all, as whoever changes it expects
    kept = [copy.deepcopy(each, dict(configs)) if each in kept[:i] else each for i, each in enumerate(kept)]
    for number, layer in enumerate(kept):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, "layer_idx", number)  # noqa: B010  (to mypy, an attribute of a module is a tensor)
    for name, value in vars(text).items():
        if isinstance(value, list | tuple) and len(value) == count:  # one value for each layer, such as layer_types
            setattr(text, name, type(value)(value[layer] for layer in layers))
    text.num_hidden_layers = len(kept)
    del stack[:]
    stack.extend(kept)
    return model
