"""Which weights of a matrix stay: by magnitude, or by Wanda's score; SparseGPT is in `sparsegpt`."""

from __future__ import annotations

import torch

from elastic.quant.formats.base import require_samples
from elastic.quant.formats.pruned import SemiStructured, Sparse
from elastic.quant.pruning.sparsegpt import sparsegpt


def prune(
    weight: torch.Tensor, config: Sparse, inputs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the weights of a matrix that stay.

    weight: [outputs, inputs], any float dtype. inputs: [tokens, inputs], any float dtype, samples of what the matrix is
    multiplied with; without them weights are chosen by magnitude, whatever the config says. Returns the matrix with the
    other weights zero, in its dtype, and where weights stay, bool; both [outputs, inputs]. How many stay depends on the
    shape and the config alone. Raises `ConfigError` for inputs that do not fit the matrix or are not finite.
    """
    weight = weight.detach()
    if inputs is None or not config.calibrated:
        mask = keep_largest(weight.float().abs(), config, per_output=False)
        return torch.where(mask, weight, 0), mask
    sample = inputs.detach()
    require_samples(sample, weight)
    if config.by == "sparsegpt":
        return sparsegpt(weight, sample, config)
    mask = keep_largest(wanda_score(weight, sample), config, per_output=True)
    return torch.where(mask, weight, 0), mask


def wanda_score(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return |weight| times the norm of its input, float32 [outputs, inputs] (Sun et al., 2023, equation 1).

    weight: [outputs, inputs]. inputs: [tokens, inputs].
    """
    norms: torch.Tensor = torch.linalg.vector_norm(inputs.float(), dim=0)
    return weight.float().abs() * norms


def keep_largest(scores: torch.Tensor, config: Sparse, *, per_output: bool) -> torch.Tensor:
    """Return where the highest scores are, bool [outputs, inputs]; of equal ones the first.

    scores: [outputs, inputs], not negative; what is no number counts as the highest, so that products show it.
    Unstructured sparsity: the highest of each output, or of the whole matrix.
    What `topk` chooses of equal ones depends on the device, and ranks on several are to have the same weights.
    """
    outputs, inputs = scores.shape
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf)
    if isinstance(config, SemiStructured):
        groups = scores.reshape(-1, config.of)
        kept = config.kept
    else:
        kept = inputs - config.removed(inputs)
        groups, kept = (scores, kept) if per_output else (scores.reshape(1, -1), kept * outputs)
    if not kept:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = groups.topk(kept, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = groups > least, groups == least
    left = kept - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1, dtype=torch.int32) <= left))).view(outputs, inputs)
