"""Codes that lose less than the nearest ones, found on a sample of what the matrix is used on.

Inputs that are large get finer steps: s = mean |x| ** alpha, alpha by grid search (Lin et al., "AWQ: Activation-aware
Weight Quantization", section 3.2). Groups with few extreme weights are clipped, by a grid search too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest

_STEPS = 20
_CLIPS = (0.9, 0.8, 0.7, 0.6)
"""Parts of a group's extremes."""
_MOST_TOKENS = 512
_MOST_ROWS = 512
"""Outputs that alpha is searched on; the best codes are compared on all."""
_CHUNK_BYTES = 1 << 19


def search_scales(weight: torch.Tensor, inputs: torch.Tensor, config: Integers) -> QuantizedMatrix:
    """The codes of a matrix, [outputs, inputs] in any float dtype, with the smallest output error that was found.

    `inputs` [tokens, inputs], any float dtype, are samples of what the matrix is used on; of more than 512 tokens, 512
    are taken, evenly spaced. The error, ||x @ (codes.value() - weight).T|| in float32, is there never larger than that
    of `round_to_nearest`, which is the answer where nothing is better or no input is known. Deterministic.
    Raises `ConfigError` for inputs that do not fit the matrix or are not finite.
    """
    if inputs.dim() != 2 or inputs.shape[1] != weight.shape[1]:
        raise ConfigError(
            f"inputs are {list(inputs.shape)}; the matrix, {list(weight.shape)}, needs [tokens, {weight.shape[1]}]"
        )
    weight = weight.detach().float()
    sample = _evenly(inputs.detach(), _MOST_TOKENS).float()
    if not bool(sample.isfinite().all()):
        raise ConfigError("inputs hold values that are not finite; collect them from a forward pass without")
    plain = round_to_nearest(weight, config)
    if not bool(sample.any()):
        return plain
    found = [plain, _clipped(weight, None, sample, config)]
    scale = _best_scale(_evenly(weight, _MOST_ROWS), sample, config)
    if scale is not None:
        found += [_scaled(weight, scale, config), _clipped(weight, scale, sample, config)]
    return min(found, key=lambda codes: _error(weight, codes, sample))


def _best_scale(weight: torch.Tensor, sample: torch.Tensor, config: Integers) -> torch.Tensor | None:
    """float32 [inputs]; None: leave the inputs as they are."""
    best, least = None, _error(weight, round_to_nearest(weight, config), sample)
    magnitude = sample.abs().mean(0)
    relative = (magnitude / magnitude.mean()).clamp(min=1e-4)  # an input that is always zero has a scale too
    for step in range(1, _STEPS + 1):
        scale = relative ** (step / _STEPS)
        scale /= (scale.max() * scale.min()).sqrt()
        error = _error(weight, _scaled(weight, scale, config), sample)
        if error < least:
            best, least = scale, error
    return best


def _scaled(weight: torch.Tensor, scale: torch.Tensor, config: Integers) -> QuantizedMatrix:
    return replace(round_to_nearest(weight * scale, config), input_scale=scale)


def _clipped(
    weight: torch.Tensor, scale: torch.Tensor | None, sample: torch.Tensor, config: Integers
) -> QuantizedMatrix:
    """As if inputs did not go together: the error of a group is then the sum of those of its weights."""
    energy = sample.square().mean(0)
    if scale is not None:
        weight, energy = weight * scale, energy / scale.square()
    size = weight.shape[1] if config.group_size == -1 else config.group_size
    rows = max(1, _CHUNK_BYTES // (4 * weight.shape[1]))  # what fits a cache is several times faster
    clipped = torch.cat([_clip_rows(chunk, energy, size, config) for chunk in torch.split(weight, rows)])
    return replace(round_to_nearest(clipped, config), input_scale=scale)


def _clip_rows(weight: torch.Tensor, energy: torch.Tensor, size: int, config: Integers) -> torch.Tensor:
    """Each group of weights within that part of its extremes where the error is smallest."""
    grouped = weight.view(len(weight), -1, size)
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)

    def error(clipped: torch.Tensor) -> torch.Tensor:
        lost = round_to_nearest(clipped.view_as(weight), config).value() - weight
        return (lost.square() * energy).view_as(grouped).sum(2, keepdim=True)

    best, least = grouped, error(grouped)
    for part in _CLIPS:
        clipped = grouped.clamp(low * part, high * part)
        lost = error(clipped)
        best, least = torch.where(lost < least, clipped, best), torch.minimum(lost, least)
    return best.view_as(weight)


def _error(weight: torch.Tensor, codes: QuantizedMatrix, sample: torch.Tensor) -> float:
    return float((sample @ (codes.value() - weight).t()).square().sum())


def _evenly(rows: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many of the rows, evenly spaced."""
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]
