"""Fingerprints of the layers in a checkpoint's files, for an engine that has their weights in matrices of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.memory.checkpoint_file import Checkpoint
from elastic.model_files import read_config, reading, require_full_weights
from elastic.quant.sensitivity.profile_file import fingerprint_of
from elastic.weights.decoder import find_decoder
from elastic.weights.shards.stored import find_stored
from elastic.weights.shards.stored_names import blocks_of


def stored_fingerprints(path: str | Path) -> tuple[str, ...]:
    """Return the `fingerprint` that each decoder layer has where transformers loads the model of a directory.

    Weights are read in pieces of some MB. Raises `ConfigError` for files that lack some of them, or have them in a
    form that transformers computes them from.
    """
    from transformers import AutoModelForCausalLM

    what = f"model {path}"
    config = read_config(str(path), option="model")
    require_full_weights(config, what, "and a profile is of full ones")
    with torch.device("meta"), reading(what, "see that its config.json is whole"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    files = Checkpoint(path)
    files.blocks.update(blocks_of(model, files))
    decoder = find_decoder(model)
    return tuple(
        _stored_fingerprint(layer, name, files, what)
        for layer, name in zip(decoder.layers, decoder.layer_names, strict=True)
    )


def _stored_fingerprint(layer: nn.Module, prefix: str, files: Checkpoint, what: str) -> str:
    weights = []
    for name, parameter in layer.named_parameters():
        stored = find_stored(files, f"{prefix}.{name}", parameter.shape, torch.float32)
        if stored is None:
            raise ConfigError(
                f"{what}: its files have no {prefix}.{name} of shape {list(parameter.shape)}, by which to see whether "
                "a profile is of this model; save it anew with save_pretrained, or give an order by name"
            )
        weights.append((name, stored.shape, replace(stored, dtype=torch.bfloat16).digest()))
    return fingerprint_of(weights)
