"""What a rank says of its model, so that a fleet can tell whether two ranks give the same answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch

from elastic.cluster.control.messages import ModelFacts
from elastic.engines.stopping import end_tokens
from elastic.memory.checksum import digest
from elastic.weights.decoder import find_decoder


def model_facts(model: Any, variants: Sequence[str] = ()) -> ModelFacts:
    """Return the facts of a model: of its full parameters and persistent buffers, whatever form its layers have now.

    Raises `ConfigError` for a model that has no decoder layers.
    """
    decoder = find_decoder(model)
    state = model.state_dict()  # of a wrapped model too it has the full weights
    prefixes = tuple(f"{name}." for name in decoder.layer_names)
    fixed = [name for name in state if not name.startswith(prefixes)]
    return ModelFacts(
        digests=tuple(_digest(state, (n for n in state if n.startswith(prefix)), prefix) for prefix in prefixes),
        fixed_digest=_digest(state, fixed, ""),
        vocabulary=decoder.config.vocab_size,
        longest=getattr(decoder.config, "max_position_embeddings", None),
        end_tokens=end_tokens(model),
        variants=tuple(variants),
    )


def _digest(state: dict[str, torch.Tensor], names: Iterable[str], prefix: str) -> int:
    """Return a checksum of some tensors and their names, shapes and dtypes."""
    text = blake2b(digest_size=8)
    for name in sorted(names):
        tensor = state[name]
        text.update(f"{name.removeprefix(prefix)} {tensor.dtype} {tuple(tensor.shape)} {digest(tensor)}\n".encode())
    return int.from_bytes(text.digest(), "big")
