"""SparseGPT: weights are removed one input after another, and those of later inputs make up for them.

Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", 2023, algorithm 1.
"""

from __future__ import annotations

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.pruned import SemiStructured, Sparse, Unstructured

BLOCK = 128
"""Inputs among which unstructured weights are chosen at once, and whose updates are gathered (the paper's B and Bs)."""
DAMPING = 0.01
"""Added to the diagonal of the Hessian, as a share of its mean (section 4)."""


def sparsegpt(weight: torch.Tensor, inputs: torch.Tensor, config: Sparse) -> tuple[torch.Tensor, torch.Tensor]:
    """Prune a matrix, [outputs, inputs], any float dtype, so that its products with samples change little.

    inputs: [tokens, inputs], any float dtype, finite. Returns the pruned matrix in its dtype, and where weights stay,
    bool; both [outputs, inputs]. Takes float32 copies of the matrix and of [inputs, inputs].
    """
    pruned = weight.float().clone()
    factor = _inverse_factor(inputs.float(), pruned)
    mask = torch.zeros(weight.shape, dtype=torch.bool, device=weight.device)
    for start in range(0, weight.shape[1], BLOCK):
        stop = min(start + BLOCK, weight.shape[1])
        block, kept, inner = pruned[:, start:stop], mask[:, start:stop], factor[start:stop, start:stop]
        if isinstance(config, Unstructured):
            removed = config.removed(stop) - config.removed(start)
            _keep_all_but(block, inner, kept, removed * len(block))
        errors = _remove_in_turn(block, inner, kept, config)
        pruned[:, stop:] -= errors @ factor[start:stop, stop:]
    return torch.where(mask, pruned, 0).to(weight.dtype), mask


def _inverse_factor(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse Hessian, float32 [inputs, inputs].

    Weights of inputs that are always zero do nothing: they are set to zero in `weight`, [outputs, inputs].
    """
    hessian = inputs.t() @ inputs * (2 / len(inputs))
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    weight[:, dead] = 0
    diagonal += DAMPING * diagonal.mean()
    lower, _ = torch.linalg.cholesky_ex(hessian)
    factor: torch.Tensor
    factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if failed or not factor.isfinite().all():
        raise ConfigError(
            f"by='sparsegpt': the products of {len(inputs)} samples of {inputs.shape[1]} inputs have no inverse; give "
            "more calibration text, or use by='wanda'"
        )
    return factor


def _keep_all_but(block: torch.Tensor, factor: torch.Tensor, kept: torch.Tensor, removed: int) -> None:
    """Mark in `kept` all weights of a block but the `removed` with the smallest error; all [outputs, block]."""
    lowest = (block / factor.diagonal()).square().flatten().topk(removed, largest=False, sorted=False).indices
    chosen = torch.ones(block.numel(), dtype=torch.bool, device=block.device)
    chosen[lowest] = False
    kept.copy_(chosen.view(block.shape))


def _remove_in_turn(block: torch.Tensor, factor: torch.Tensor, kept: torch.Tensor, config: Sparse) -> torch.Tensor:
    """Remove the weights of a block, [outputs, block], an input at a time; those after it in the block make up for it.

    Returns the errors that later blocks are to make up for, [outputs, block]. N:M patterns are chosen, into `kept`, as
    the first of their inputs comes.
    """
    scale = factor.diagonal()
    errors = torch.empty_like(block)
    for i in range(block.shape[1]):
        if isinstance(config, SemiStructured) and i % config.of == 0:
            group = slice(i, i + config.of)
            best = (block[:, group] / scale[group]).square().topk(config.kept, dim=1).indices
            kept[:, group] = kept[:, group].scatter(1, best, True)
        removed = torch.where(kept[:, i], 0, block[:, i])
        errors[:, i] = removed / scale[i]
        block[:, i:] -= errors[:, i : i + 1] * factor[i, i:]
    return errors
