"""What a rank says of its model, so that a fleet can tell whether two ranks give the same answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from elastic.cluster.control.messages import ModelFacts
from elastic.engines.stopping import end_tokens
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.checksum import digest
from elastic.weights.decoder import Decoder, batch_context_length, find_decoder
from elastic.weights.shards.stored import find_stored


def stored_facts(model: Any, files: Checkpoint) -> ModelFacts:
    """Return the facts of a model of which the decoder layers have no data: as its files have them, piece by piece.

    They are those of `model_facts` where the same files are loaded as a whole.
    """
    decoder, state = find_decoder(model), model.state_dict()
    digests = []
    for name in decoder.layer_names:
        lines = {}
        for key in (key for key in state if key.startswith(f"{name}.")):
            like = state[key]
            stored = find_stored(files, key, like.shape, like.dtype) if like.device.type == "meta" else None
            lines[key] = digest(like) if stored is None else stored.digest()
        digests.append(_combined(state, lines, f"{name}."))
    fixed = [name for name in state if not name.startswith(tuple(f"{name}." for name in decoder.layer_names))]
    return _facts(model, decoder, tuple(digests), _digest(state, fixed, ""), ())


def model_facts(model: Any, variants: Sequence[str] = ()) -> ModelFacts:
    """Return the facts of a model: of its full parameters and persistent buffers, whatever form its layers have now.

    Raises `ConfigError` for a model that has no decoder layers.
    """
    decoder = find_decoder(model)
    state = model.state_dict()  # of a wrapped model too it has the full weights
    prefixes = tuple(f"{name}." for name in decoder.layer_names)
    fixed = [name for name in state if not name.startswith(prefixes)]
    digests = tuple(_digest(state, (n for n in state if n.startswith(prefix)), prefix) for prefix in prefixes)
    return _facts(model, decoder, digests, _digest(state, fixed, ""), tuple(variants))


def _facts(
    model: Any, decoder: Decoder, digests: tuple[int, ...], fixed_digest: int, variants: tuple[str, ...]
) -> ModelFacts:
    return ModelFacts(
        digests=digests,
        fixed_digest=fixed_digest,
        vocabulary=decoder.config.vocab_size,
        longest=batch_context_length(decoder.config),
        end_tokens=end_tokens(model),
        variants=variants,
    )


def _digest(state: Mapping[str, torch.Tensor], names: Iterable[str], prefix: str) -> int:
    """Return a checksum of some tensors and their names, shapes and dtypes."""
    return _combined(state, {name: digest(state[name]) for name in names}, prefix)


def _combined(state: Mapping[str, torch.Tensor], digests: Mapping[str, int], prefix: str) -> int:
    text = blake2b(digest_size=8)
    for name, value in sorted(digests.items()):
        tensor = state[name]
        text.update(f"{name.removeprefix(prefix)} {tensor.dtype} {tuple(tensor.shape)} {value}\n".encode())
    return int.from_bytes(text.digest(), "big")
