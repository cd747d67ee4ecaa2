"""Codes that lose less than the nearest ones, found on samples of a matrix's inputs.

Inputs that are large get finer steps: s = mean |x| ** alpha, alpha by grid search (Lin et al., "AWQ: Activation-aware
Weight Quantization", section 3.2). Groups with few extreme weights are clipped, by a grid search too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from elastic.quant.formats.base import evenly, require_samples
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest

_STEPS = 20
_CLIPS = (0.9, 0.8, 0.7, 0.6)
"""Fractions of a group's extremes that weights are clipped to."""
_MOST_TOKENS = 512
_MOST_ROWS = 512
"""The outputs on which alpha is searched; the best codes are compared on all."""
_CHUNK_BYTES = 1 << 19
_LEAST = 0.1
"""Of the mean magnitude of inputs, what smaller ones are taken to have: other text may show more of them."""


def search_scales(weight: torch.Tensor, inputs: torch.Tensor, config: Integers) -> QuantizedMatrix:
    """Quantize a matrix with the smallest output error that the search finds.

    weight: [outputs, inputs], any float dtype. inputs: [tokens, inputs], any float dtype, samples of what the matrix is
    multiplied with; of more than 512 tokens, 512 are taken, evenly spaced. On them the error, the norm of
    x @ (codes.value() - weight).T in float32, is never larger than that of `round_to_nearest`, which is the result
    where nothing is better or all inputs are zero. Deterministic.
    Raises `ConfigError` for inputs that do not fit the matrix or are not finite.
    """
    require_samples(inputs, weight)
    weight = weight.detach().float()
    sample = evenly(inputs.detach(), _MOST_TOKENS).float()
    plain = round_to_nearest(weight, config)
    if not bool(sample.any()):
        return plain
    candidates = [plain, _clipped(weight, None, sample, config)]
    scale = _best_scale(evenly(weight, _MOST_ROWS), sample, config)
    if scale is not None:
        candidates += [_scaled(weight, scale, config), _clipped(weight, scale, sample, config)]
    return min(candidates, key=lambda codes: _error(weight, codes, sample))


def _best_scale(weight: torch.Tensor, sample: torch.Tensor, config: Integers) -> torch.Tensor | None:
    """Search the input scale, float32 [inputs]; None: no scale is better than one of ones."""
    best, least = None, _error(weight, round_to_nearest(weight, config), sample)
    magnitude = sample.abs().mean(0)
    relative = (magnitude / magnitude.mean()).clamp(min=_LEAST)  # an input that is always zero has a scale too
    for step in range(1, _STEPS + 1):
        scale = relative ** (step / _STEPS)
        scale /= (scale.max() * scale.min()).sqrt()
        error = _error(weight, _scaled(weight, scale, config), sample)
        if error < least:
            best, least = scale, error
    return best


def _scaled(weight: torch.Tensor, scale: torch.Tensor, config: Integers) -> QuantizedMatrix:
    """Round a matrix with its columns multiplied by an input scale, [inputs]."""
    return replace(round_to_nearest(weight * scale, config), input_scale=scale)


def _clipped(
    weight: torch.Tensor, scale: torch.Tensor | None, sample: torch.Tensor, config: Integers
) -> QuantizedMatrix:
    """Round a matrix whose groups are clipped first.

    The error is taken as if inputs were uncorrelated: that of a group is then the sum of those of its weights.
    """
    energy = sample.square().mean(0)
    if scale is not None:
        weight, energy = weight * scale, energy / scale.square()
    rows = max(1, _CHUNK_BYTES // (4 * weight.shape[1]))  # what fits a cache is several times faster
    clipped = torch.cat([_clip_rows(chunk, energy, config) for chunk in torch.split(weight, rows)])
    return replace(round_to_nearest(clipped, config), input_scale=scale)


def _clip_rows(weight: torch.Tensor, energy: torch.Tensor, config: Integers) -> torch.Tensor:
    """Clip each group of weights to the fraction of its extremes where the error is smallest.

    weight: float32 [rows, inputs]. energy: float32 [inputs], the mean squares of the inputs.
    """
    grouped = weight.view(len(weight), -1, config.inputs_per_group(weight.shape[1]))
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)

    best, least = grouped, torch.full_like(low, torch.inf)
    for fraction in (1.0, *_CLIPS):
        clipped = grouped if fraction == 1 else grouped.clamp(low * fraction, high * fraction)
        lost = round_to_nearest(clipped.view_as(weight), config).value() - weight
        error = (lost.square() * energy).view_as(grouped).sum(2, keepdim=True)
        best, least = torch.where(error < least, clipped, best), torch.minimum(error, least)
    return best.view_as(weight)


def _error(weight: torch.Tensor, codes: QuantizedMatrix, sample: torch.Tensor) -> float:
    """Return the squared norm of the output error on a sample, float32 [tokens, inputs]."""
    return float((sample @ (codes.value() - weight).t()).square().sum())
