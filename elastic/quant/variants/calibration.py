"""Samples of the inputs of a model's matrices, collected while calibration text passes through the model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.quant.formats.base import evenly
from elastic.weights.decoder import context_length

MOST_ROWS = 512
"""Rows kept for each matrix, evenly over the text."""
ROWS_FOR_HESSIAN = 2048
"""The same for SparseGPT, whose products of inputs need as many rows as a matrix has inputs, and more."""


def rows_for(config: Any) -> int:
    """Return how many rows of a matrix's inputs a config asks for."""
    return ROWS_FOR_HESSIAN if getattr(config, "by", None) == "sparsegpt" else MOST_ROWS


def fingerprint_of_tokens(ids: torch.Tensor) -> str:
    """Return the sha256 of token ids, int64 [sequences, tokens], and their shape."""
    shaped = f"{tuple(ids.shape)}\n".encode() + ids.cpu().to(torch.int64).contiguous().numpy().tobytes()
    return hashlib.sha256(shaped).hexdigest()


def check_ids(model: nn.Module, tokens: torch.Tensor) -> None:
    """Raise `ConfigError` for token ids, int64 [sequences, tokens], that a model does not know, or is too short for."""
    ids = range(getattr(model.get_input_embeddings(), "num_embeddings", 1 << 31))  # type: ignore[operator]
    least, most = map(int, tokens.aminmax())
    if least not in ids or most not in ids:
        raise ConfigError(
            f"calibration: there are token ids from {least} to {most}; the model has 0 to {ids.stop - 1}: use its own "
            "tokenizer"
        )
    context = most_tokens(model)
    if context is not None and tokens.shape[1] > context:
        raise ConfigError(
            f"calibration: there are sequences of {tokens.shape[1]} tokens; the model was made for {context} at the "
            "most: give more sequences, that are shorter"
        )


def most_tokens(model: nn.Module) -> int | None:
    """Return the most tokens of a sequence that a model was made for; None: its config does not say."""
    config: Any = model.config
    return context_length(config.get_text_config(decoder=True))


@contextmanager
def as_for_inference(model: nn.Module) -> Iterator[None]:
    """Turn off gradients and enter evaluation mode; each module's mode is put back."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def inputs_of(
    model: nn.Module, modules: Mapping[str, nn.Module], tokens: torch.Tensor, most_rows: int = MOST_ROWS
) -> dict[str, torch.Tensor]:
    """Collect up to so many rows of each module's inputs, [rows, inputs], by the same names, on the module's device.

    tokens: [sequences, tokens], int64; each sequence is one forward pass. Raises `ConfigError` for anything else.
    """
    if tokens.ndim != 2 or not tokens.numel() or tokens.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"calibration: token ids [sequences, tokens] are needed, not {tokens.dtype} {tokens.shape}")
    check_ids(model, tokens)
    rows = -(-most_rows // len(tokens))
    samples: dict[nn.Module, list[torch.Tensor]] = {module: [] for module in modules.values()}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x = next(iter((*args, *kwargs.values()))).detach()
        x = x.reshape(-1, x.shape[-1])
        if len(x):  # an expert's batch may be empty
            samples[module].append(evenly(x, rows))

    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in samples]
    try:
        with as_for_inference(model):
            for sequence in tokens[:most_rows]:
                model(sequence.unsqueeze(0).to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(samples[module]) for name, module in modules.items() if samples[module]}
