"""Codes survive packing, for every instruction set; and the bytes are those that torch's own packer makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic import ConfigError
from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest
from support.child_process import in_fork
from support.integer_matrices import codes, configs_and_matrices, pack, unpack

INSTRUCTIONS = st.sampled_from(["AVX512", "AVX2", "DEFAULT"])
TARGETS = st.builds(KernelTarget, st.just("cpu"), INSTRUCTIONS) | st.builds(
    KernelTarget, st.just("cuda"), st.sampled_from(["sm75", "sm80", "sm90"])
)


def same(a: QuantizedMatrix, b: QuantizedMatrix) -> bool:
    return all(
        x is y is None or (x is not None and y is not None and x.dtype == y.dtype and torch.equal(x, y))
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


@given(st.data(), configs_and_matrices(), TARGETS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_codes_survive_packing(
    data: st.DataObject, drawn: tuple[Integers, MatrixShape], target: KernelTarget, transposed: bool
) -> None:
    config, matrix = drawn
    original = data.draw(codes(config, matrix))
    if transposed:
        original = replace(original, codes=original.codes.t().contiguous().t())
    parts = pack(config, original, target)
    assert all(part.is_contiguous() for part in parts.values())
    assert same(unpack(config, parts, matrix, target), original)


@given(st.data(), configs_and_matrices(), INSTRUCTIONS, INSTRUCTIONS)
@settings(max_examples=50, deadline=None)
def test_bytes_for_other_instructions_are_repacked(
    data: st.DataObject, drawn: tuple[Integers, MatrixShape], here: str, there: str
) -> None:
    config, matrix = drawn
    original = data.draw(codes(config, matrix))
    home, other = KernelTarget("cpu", here), KernelTarget("cpu", there)
    repacked = format_of(config)(config, matrix, other).repack(pack(config, original, other), home)
    expected = pack(config, original, home)
    assert repacked.keys() == expected.keys()
    assert all(torch.equal(repacked[name], expected[name]) for name in expected)


@pytest.mark.parametrize("scale", [0.0, torch.nan], ids=str)
@pytest.mark.parametrize("config", [Integers(8, 32, True), Integers(8, -1, True), Integers(4, 32, True)], ids=str)
def test_symmetric_codes_are_repacked_whatever_their_scales(config: Integers, scale: float) -> None:
    matrix, home, other = MatrixShape(32, 64), KernelTarget("cpu", "AVX2"), KernelTarget("cuda", "sm90")
    original = round_to_nearest(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), config)
    original.scales[::3, 0] = scale
    parts = pack(config, original, home)
    there = format_of(config)(config, matrix, home).repack(parts, other)
    back = format_of(config)(config, matrix, other).repack(there, home)
    assert torch.equal(unpack(config, back, matrix, home).codes, original.codes)
    value = format_of(config)(config, matrix, other).value(there)
    assert torch.allclose(value, original.value(), rtol=2**-8, equal_nan=True)


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
@pytest.mark.slow
def test_nibbles_lie_as_the_kernel_of_each_instruction_set_wants_them(capability: str) -> None:
    code = """
import torch
from elastic.quant.kernels.int4_layout import pack_nibbles
for outputs in (16, 32, 48, 64, 80, 96, 112, 128, 240):
    for inputs in (32, 96):
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        assert torch.equal(packed.view(-1), pack_nibbles(codes, torch.backends.cpu.get_cpu_capability()))
print(torch.backends.cpu.get_cpu_capability())
"""
    here = torch.backends.cpu.get_cpu_capability()
    assert in_fork(code, ATEN_CPU_CAPABILITY=capability).strip() in (capability.upper(), here)


def test_memory_is_what_the_bits_say() -> None:
    weight, target = torch.randn(512, 1024), KernelTarget("cpu", "AVX512")
    share = {}
    for config in (Integers(8, -1, symmetric=True), Integers(4), Integers(3)):
        parts = format_of(config)(config, MatrixShape(*weight.shape), target).quantize(weight, None)
        share[config.bits] = sum(part.nbytes for part in parts.values()) / (2 * weight.numel())
    assert 0.26 <= share[4] <= 0.30
    assert 1 + sum(share.values()) <= 2


@given(configs_and_matrices())
@settings(max_examples=20, deadline=None)
def test_a_matrix_is_worth_what_its_codes_are(drawn: tuple[Integers, MatrixShape]) -> None:
    config, matrix = drawn
    weight, target = torch.randn(matrix.outputs, matrix.inputs), KernelTarget("cpu", "AVX512")
    parts = format_of(config)(config, MatrixShape(*weight.shape), target).quantize(weight, None)
    value = format_of(config)(config, matrix, target).value(parts)
    assert torch.equal(value, round_to_nearest(weight, config).value())


@pytest.mark.parametrize("shape", [(15, 32), (16, 40), (16, 96)])
def test_shapes_that_kernels_cannot_take_are_refused(shape: tuple[int, int]) -> None:
    config = Integers(4, 64)
    assert format_of(config).supports(config, MatrixShape(*shape)) is not None
    with pytest.raises(ConfigError, match=r"multiples of 16|does not divide"):
        format_of(config)(config, MatrixShape(*shape), KernelTarget("cpu", "AVX512"))


def test_codes_that_are_not_of_the_config_are_refused() -> None:
    codes = round_to_nearest(torch.randn(16, 128), Integers(4, 64))
    with pytest.raises(ConfigError, match="groups"):
        pack(Integers(4, 128), codes, KernelTarget("cpu", "AVX512"))
    with pytest.raises(ConfigError, match="3 bits"):
        pack(Integers(3, 64), codes, KernelTarget("cpu", "AVX512"))
    with pytest.raises(ConfigError, match="xpu"):
        pack(Integers(4, 64), codes, KernelTarget("xpu", ""))
