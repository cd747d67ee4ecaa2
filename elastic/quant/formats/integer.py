"""Matrices in small integers, not packed for a kernel yet: made by quantizers, and read from checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic.errors import ConfigError, is_integer, require_flag


@dataclass(frozen=True)
class Integers:
    """Weight-only quantization to integers of `bits` bits, each group of inputs with a scale of its own.

    w[n, k] = scale[n, group of k] * (code[n, k] - zero[n, group of k])
    """

    bits: int
    """8, 4 or 3."""
    group_size: int = 128
    """Inputs that share a scale; -1: all of a row."""
    symmetric: bool = False
    """The zero point is the middle of the codes, 2 ** (bits - 1), everywhere."""
    dynamic: bool = False
    """Products may also round activations, to int8 with one scale per token, where that is faster: prefill on CPUs.
    The error of a product is then about 1 %; outliers among the activations make it larger."""

    def __post_init__(self) -> None:
        for name in ("symmetric", "dynamic"):
            require_flag(getattr(self, name), name)
        if not is_integer(self.bits) or self.bits not in (8, 4, 3):
            raise ConfigError(f"bits={self.bits!r} is not supported; use 8, 4 or 3")
        whole = is_integer(self.group_size)
        if not whole or (self.group_size != -1 and (self.group_size < 16 or self.group_size % 16)):
            raise ConfigError(f"group_size={self.group_size!r} is not supported; use -1 or a multiple of 16")

    def inputs_per_group(self, inputs: int) -> int:
        """Return how many of a matrix's inputs share a scale."""
        return inputs if self.group_size == -1 else self.group_size


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix in integers.

    Column k of the codes belongs to input `order[k]`, or to input k without an order. The columns of a group are side
    by side: column k is in group `k // (inputs / groups)`. With an input scale, the codes give the matrix for inputs
    that were divided by it.
    """

    codes: torch.Tensor
    """uint8 [outputs, inputs]."""
    scales: torch.Tensor
    """float32 [outputs, groups]."""
    zeros: torch.Tensor
    """float32 [outputs, groups]; whole numbers, which a checkpoint may have outside the codes' range."""
    order: torch.Tensor | None = None
    """int64 [inputs], a permutation (GPTQ's act-order)."""
    input_scale: torch.Tensor | None = None
    """float32 [inputs], in the order of the inputs, not of the columns (AWQ's scale search)."""

    @property
    def groups(self) -> int:
        """The number of groups that the inputs are divided into."""
        return self.scales.shape[1]

    def to(self, device: torch.device) -> QuantizedMatrix:
        """Copy all tensors to a device."""
        order, input_scale = (t if t is None else t.to(device) for t in (self.order, self.input_scale))
        return QuantizedMatrix(self.codes.to(device), self.scales.to(device), self.zeros.to(device), order, input_scale)

    def value(self) -> torch.Tensor:
        """Return the matrix that the codes stand for, float32 [outputs, inputs], for the inputs as they are."""
        outputs, inputs = self.codes.shape
        grouped = self.codes.view(outputs, self.groups, -1).float()
        value = ((grouped - self.zeros.unsqueeze(2)) * self.scales.unsqueeze(2)).view(outputs, inputs)
        if self.order is not None:
            value = torch.empty_like(value).index_copy_(1, self.order, value)
        return value if self.input_scale is None else value / self.input_scale


def round_to_nearest(weight: torch.Tensor, config: Integers) -> QuantizedMatrix:
    """Round a matrix to the nearest codes, with scales from the extremes of each group.

    weight: [outputs, inputs], any float dtype. Scales are rounded to values of bfloat16, in which kernels take them.
    Raises `ConfigError` where the groups do not divide the inputs.
    """
    outputs, inputs = weight.shape
    size = config.inputs_per_group(inputs)
    if inputs % size:
        raise ConfigError(f"group_size={size} does not divide the {inputs} inputs of a matrix")
    grouped = weight.detach().float().view(outputs, inputs // size, size)
    last = 2**config.bits - 1
    middle = 2 ** (config.bits - 1)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    exact = grouped.abs().amax(2) / (middle - 1) if config.symmetric else (high - low) / last
    scales = exact.clamp(min=1e-10).to(torch.bfloat16).float()  # above zero: for a group of zeros any will do
    zeros = torch.full_like(scales, middle) if config.symmetric else (-low / scales).round().clamp(0, last)
    codes = (grouped / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, last)
    return QuantizedMatrix(codes.to(torch.uint8).view(outputs, inputs), scales, zeros)
