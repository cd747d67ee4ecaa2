"""What a rank says of its model, so that a fleet can tell whether two ranks give the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from elastic.cluster.control.messages import ModelFacts
from elastic.engines.stopping import end_tokens
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.checksum import digest
from elastic.weights.decoder import batch_context_length, find_decoder
from elastic.weights.shards.stored import find_stored


def model_facts(model: Any, variants: Sequence[str] = (), files: Checkpoint | None = None) -> ModelFacts:
    """Return the facts of a model: of its full parameters and persistent buffers, whatever form its layers have now.

    What has no data is read of `files`, piece by piece: the facts are those of a model that has all of them. Raises
    `ConfigError` for a model that has no decoder layers.
    """
    decoder, state = find_decoder(model), model.state_dict()  # of a wrapped model too it has the full weights
    prefixes = tuple(f"{name}." for name in decoder.layer_names)
    layers = [{name: state[name] for name in state if name.startswith(prefix)} for prefix in prefixes]
    fixed = {name: state[name] for name in state if not name.startswith(prefixes)}
    return ModelFacts(
        digests=tuple(_digest(layer, prefix, files) for layer, prefix in zip(layers, prefixes, strict=True)),
        fixed_digest=_digest(fixed, "", files),
        vocabulary=decoder.config.vocab_size,
        longest=batch_context_length(decoder.config),
        end_tokens=end_tokens(model),
        variants=tuple(variants),
    )


def _digest(tensors: Mapping[str, torch.Tensor], prefix: str, files: Checkpoint | None) -> int:
    """Return a checksum of some tensors and their names, shapes and dtypes."""
    text = blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        has_data = files is None or tensor.device.type != "meta"
        stored = None if has_data else find_stored(files, name, tensor.shape, tensor.dtype)
        value = digest(tensor) if stored is None else stored.digest()
        text.update(f"{name.removeprefix(prefix)} {tensor.dtype} {tuple(tensor.shape)} {value}\n".encode())
    return int.from_bytes(text.digest(), "big")
