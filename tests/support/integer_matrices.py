"""Matrices in integers, drawn by hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors
from elastic.quant.formats.integer import Integers, QuantizedMatrix
from elastic.quant.kernels.integer_format import IntegerFormat


@st.composite
def configs_and_matrices(draw: st.DrawFn) -> tuple[Integers, MatrixShape]:
    group = draw(st.sampled_from([-1, 16, 32, 64, 96, 128]))
    inputs = draw(st.integers(1, 6)) * (16 if group == -1 else group)
    config = Integers(draw(st.sampled_from([8, 4, 3])), group, symmetric=draw(st.booleans()))
    return config, MatrixShape(16 * draw(st.integers(1, 13)), inputs)


@st.composite
def codes(draw: st.DrawFn, config: Integers, matrix: MatrixShape) -> QuantizedMatrix:
    """Any codes, as a checkpoint may have them: zero points outside of the codes' range, act-order, input scales."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = 1 if config.group_size == -1 else matrix.inputs // config.group_size
    shape, top = (matrix.outputs, groups), 2**config.bits
    middle = torch.full(shape, top // 2)
    zeros = middle if config.symmetric else torch.randint(0, top + 1, shape, generator=generator)
    order = torch.randperm(matrix.inputs, generator=generator) if draw(st.booleans()) else None
    scale = torch.rand(matrix.inputs, generator=generator) + 0.5 if draw(st.booleans()) else None
    return QuantizedMatrix(
        torch.randint(0, top, (matrix.outputs, matrix.inputs), dtype=torch.uint8, generator=generator),
        (torch.rand(shape, generator=generator) * 0.1 + 1e-3).to(torch.bfloat16).float(),
        zeros.float(),
        order,
        scale,
    )


def pack(config: Integers, codes: QuantizedMatrix, target: KernelTarget) -> PackedTensors:
    """Lay codes, [outputs, inputs], out for a target."""
    return IntegerFormat(config, MatrixShape(*codes.codes.shape), target).pack(codes)


def unpack(config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> QuantizedMatrix:
    """Read the codes, [outputs, inputs], that were packed for a target."""
    return IntegerFormat(config, matrix, target).layout.unpack(parts)
