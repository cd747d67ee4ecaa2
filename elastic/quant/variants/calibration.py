"""What the matrices of a model are used on: the rows that they see while some text passes through the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import nn

from elastic.errors import ConfigError

MOST_ROWS = 512
"""Kept for each matrix, evenly over the text."""


@torch.no_grad()
def inputs_of(model: nn.Module, modules: Mapping[str, nn.Module], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """For each module, by the same names, up to 512 rows of its inputs: [rows, inputs], on the device where it is.

    `tokens` are token ids, int64 [sequences, tokens]; each sequence is one forward pass. Others are a `ConfigError`.
    """
    if tokens.ndim != 2 or not tokens.numel() or tokens.is_floating_point():
        raise ConfigError(f"calibration: token ids [sequences, tokens] are needed, not {tokens.dtype} {tokens.shape}")
    rows = -(-MOST_ROWS // len(tokens))
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in modules}
    handles = [m.register_forward_pre_hook(partial(_keep, seen[name], rows)) for name, m in modules.items()]
    try:
        for sequence in tokens[:MOST_ROWS]:
            model(sequence.unsqueeze(0).to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(found) for name, found in seen.items() if found}


def _keep(seen: list[torch.Tensor], rows: int, module: nn.Module, args: Iterable[torch.Tensor]) -> None:
    x = next(iter(args)).detach()
    x = x.reshape(-1, x.shape[-1])
    chosen = torch.linspace(0, len(x) - 1, min(rows, len(x)), device=x.device).long()
    seen.append(x[chosen])
