"""Every path on a CPU against the reference: the product with the matrix that the parts stand for, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from elastic import ConfigError
from elastic.quant.formats.base import Kernel, KernelTarget, MatrixShape, PackedTensors, format_of
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest
from elastic.quant.formats.pruned import SemiStructured, Unstructured
from support.child_process import in_fork
from support.integer_matrices import codes, configs_and_matrices, pack, unpack

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ROWS = 64


def packed(config: Integers, codes: QuantizedMatrix) -> tuple[PackedTensors, Mapping[str, Kernel]]:
    target = KernelTarget.of(CPU)
    parts = pack(config, codes, target)
    return parts, format_of(config)(config, MatrixShape(*codes.codes.shape), target).paths(parts)


def product(path: Kernel, x: torch.Tensor, parts: PackedTensors, tokens: int) -> torch.Tensor:
    """In double precision, computed for so many tokens at a time."""
    pieces = [path(piece, parts) for piece in x.split(tokens)]
    assert all(piece.dtype == x.dtype and piece.is_contiguous() for piece in pieces)
    return torch.cat(pieces).double()


@given(st.data(), configs_and_matrices(), DTYPES, st.integers(1, ROWS))
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_a_path_errs_no_more_than_twice_as_much_as_a_plain_product_in_bfloat16(
    data: st.DataObject, drawn: tuple[Integers, MatrixShape], dtype: torch.dtype, tokens: int
) -> None:
    config, matrix = drawn
    original = data.draw(codes(config, matrix))
    parts, paths = packed(config, original)
    name = data.draw(st.sampled_from(sorted(paths.keys() - {"dynamic"})))
    x = torch.randn(ROWS, matrix.inputs, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    value = original.value()
    exact = x.double() @ value.double().t()
    plain = (x.bfloat16() @ value.bfloat16().t()).double()
    assert (product(paths[name], x, parts, tokens) - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_activations_on_another_device_are_refused(bits: int) -> None:
    config = Integers(bits, -1 if bits == 8 else 64)
    parts, paths = packed(config, round_to_nearest(torch.randn(64, 128), config))
    for name in paths.keys() - {"reference"}:
        with pytest.raises(ConfigError, match="x is on meta, the matrix on cpu"):
            paths[name](torch.zeros(2, 128, device="meta"), parts)


def lopsided(config: Integers, outputs: int = 48, inputs: int = 1024) -> QuantizedMatrix:
    """A weight of each output is far above the others: zero points are far from the middle of the codes."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[:, 7::128] = 1.0
    return round_to_nearest(weight, config)


LOPSIDED = [Integers(8, -1), Integers(8, 128), Integers(4, 128), Integers(3, 128)]


@pytest.mark.parametrize("config", LOPSIDED, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_zero_points_far_from_the_middle_lose_nothing(config: Integers, mean: float) -> None:
    """An offset that is rounded is off for all weights of a group alike: the error grows with the mean input."""
    original = lopsided(config)
    parts, paths = packed(config, original)
    x = (torch.randn(16, 1024, generator=torch.Generator().manual_seed(2)) + mean).bfloat16().float()
    exact = x.double() @ original.value().double().t()
    plain = (x.bfloat16() @ original.value().bfloat16().t()).double()
    for name in paths.keys() - {"dynamic"}:
        assert (paths[name](x, parts) - exact).norm() <= 2 * (plain - exact).norm(), name


@pytest.mark.parametrize("config", LOPSIDED, ids=str)
def test_expanded_weights_are_the_value_to_the_bit(config: Integers) -> None:
    original = lopsided(config)
    parts, paths = packed(config, original)
    value = original.value()
    assert torch.equal(unpack(config, parts, MatrixShape(*value.shape), KernelTarget.of(CPU)).value(), value)
    assert torch.equal(paths["expanded_float32"](torch.eye(1024), parts), value.t())
    assert torch.equal(paths["expanded"](torch.eye(1024), parts), value.t().bfloat16().float())


def test_a_kernel_that_rounds_before_zero_points_are_taken_off_is_for_symmetric_codes_alone() -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    for symmetric in (True, False):
        config = Integers(8, -1, symmetric=symmetric)
        assert ("packed" in packed(config, round_to_nearest(weight, config))[1]) == symmetric


def test_offsets_of_earlier_files_are_read_as_the_whole_numbers_that_they_were() -> None:
    config = Integers(8, -1)
    original = lopsided(config)
    parts, paths = packed(config, original)
    assert parts["offsets"].dtype == torch.float32
    earlier = {**parts, "offsets": parts["offsets"].bfloat16()}
    x = torch.randn(5, 1024)
    for path in paths.values():
        torch.testing.assert_close(path(x, earlier), path(x, parts))


@given(st.data(), configs_and_matrices(), DTYPES, st.integers(1, ROWS))
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_dynamic_int8_errs_no_more_than_it_says(
    data: st.DataObject, drawn: tuple[Integers, MatrixShape], dtype: torch.dtype, tokens: int
) -> None:
    config, matrix = drawn
    original = data.draw(codes(config, matrix))
    parts, paths = packed(config, original)
    x = torch.randn(ROWS, matrix.inputs, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    y = product(paths["dynamic"], x, parts, tokens)
    values, weights = x.double(), original.value().double()
    exact = values @ weights.t()
    if original.input_scale is not None:
        values, weights = values / original.input_scale, weights * original.input_scale
    step = values.abs().amax(1, keepdim=True) / 127
    last = 2**config.bits - 1
    largest = (original.scales * torch.maximum(original.zeros.abs(), (last - original.zeros).abs())).amax(1)
    bound = step / 2 * weights.abs().sum(1) + largest / 254 * (values.abs() + step / 2).sum(1, keepdim=True)
    rounded = 2**-8 * (values.abs().sum(1, keepdim=True) * largest + exact.abs())  # offsets, inputs and outputs
    assert ((y - exact).abs() <= bound + rounded).all()


@pytest.mark.parametrize("config", [Integers(8, -1, symmetric=True), Integers(8, 64), Integers(4, 64), Integers(3, 64)])
def test_no_tokens_give_no_outputs(config: Integers) -> None:
    parts, paths = packed(config, round_to_nearest(torch.randn(48, 128), config))
    assert {"packed", "expanded", "expanded_float32", "dynamic", "reference"} == paths.keys() - {"compiled"}
    for path in paths.values():
        assert path(torch.randn(0, 128), parts).shape == (0, 48)


@pytest.mark.parametrize("config", [Integers(8, -1, symmetric=True), Integers(8, 64), Integers(4, 64), Integers(3, 64)])
def test_a_matrix_of_several_pieces_is_the_same_as_one(config: Integers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, a narrower last block, several slabs of int3, several pieces."""
    monkeypatch.setattr("elastic.quant.kernels.int4_layout.SLAB", 2**14)
    monkeypatch.setattr("elastic.quant.kernels.cpu_dequant.PIECE", 2**14)
    original = round_to_nearest(torch.randn(64 * 9 + 48, 128), config)
    parts, paths = packed(config, original)
    x = torch.randn(4, 128)
    exact = x @ original.value().t()
    plain = (x.bfloat16() @ original.value().bfloat16().t()).float()
    for name in paths.keys() - {"dynamic"}:
        assert (paths[name](x, parts) - exact).norm() <= 2 * (plain - exact).norm(), name
    assert (paths["dynamic"](x, parts) - exact).norm() <= 0.03 * exact.norm()


def test_what_a_kernel_would_read_beyond_the_end_of_is_refused() -> None:
    config = Integers(4, 64)
    parts, paths = packed(config, round_to_nearest(torch.randn(32, 128), config))
    for name in paths.keys() - {"reference"}:
        with pytest.raises(ConfigError, match="128"):
            paths[name](torch.randn(2, 64), parts)
        with pytest.raises(ConfigError, match="scales"):
            paths[name](torch.randn(2, 128), {**parts, "scales": parts["scales"][:1]})
        with pytest.raises(ConfigError, match="packed"):
            paths[name](torch.randn(2, 128), {**parts, "packed": parts["packed"][:-64]})
        with pytest.raises(ConfigError, match="order"):
            paths[name](torch.randn(2, 128), {**parts, "order": torch.arange(64, dtype=torch.int32)})


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 64])
def test_activations_may_have_any_strides(tokens: int) -> None:
    """Every path makes them contiguous first: a BLAS may round products with other strides otherwise."""
    config = Integers(4, 64)
    parts, paths = packed(config, round_to_nearest(torch.randn(32, 128), config))
    x = torch.randn(128, tokens).t()
    for name, path in paths.items():
        assert torch.equal(path(x, parts), path(x.contiguous(), parts)), name


@pytest.mark.parametrize("config", [Integers(8, -1, symmetric=True), Integers(8, 64), Integers(4, 64), Integers(3, 64)])
def test_inputs_divided_by_their_scale_may_be_beyond_float16(config: Integers) -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    codes = replace(round_to_nearest(weight * 1e-4, config), input_scale=torch.full((128,), 1e-4))
    parts, paths = packed(config, codes)
    x = torch.full((2, 128), 100.0, dtype=torch.float16)
    exact = x.double() @ codes.value().double().t()
    for name, path in paths.items():
        y = path(x, parts)
        assert y.dtype == torch.float16
        assert (y.double() - exact).norm() <= 0.05 * exact.norm(), name


def test_bytes_for_other_instructions_are_not_given_to_the_kernel() -> None:
    generator = torch.Generator().manual_seed(0)
    config, matrix = Integers(4, 64), MatrixShape(64, 128)
    here = KernelTarget.of(CPU).instructions
    other = KernelTarget("cpu", next(name for name in ("AVX2", "DEFAULT") if name != here))
    original = round_to_nearest(torch.randn(64, 128, generator=generator), config)
    parts = pack(config, original, other)
    paths = format_of(config)(config, matrix, other).paths(parts)
    assert "packed" not in paths
    x = torch.randn(3, 128, generator=generator)
    torch.testing.assert_close(paths["expanded_float32"](x, parts), x @ original.value().t(), rtol=0.01, atol=0.05)
    assert torch.equal(unpack(config, parts, matrix, other).codes, original.codes)


def test_groups_that_the_kernel_does_not_know_are_expanded() -> None:
    config = Integers(4, 48)
    _, paths = packed(config, round_to_nearest(torch.randn(32, 96), config))
    assert "packed" not in paths
    assert "expanded" in paths


@pytest.mark.parametrize("instructions", ["AVX512_CORE_VNNI", "AVX2"])
@pytest.mark.slow
def test_integer_products_are_exact_on_cpus_with_and_without_vnni(instructions: str) -> None:
    code = """
        import torch
        from elastic.quant.kernels.cpu import int_product
        numbers = torch.arange(-128, 128).to(torch.int8)
        x, weights = numbers[torch.randint(256, (9, 256))], numbers[torch.randint(256, (256, 48))]
        for x, weights in ((x, weights), (x, weights.t().contiguous().t()), (x * 0 + 127, weights * 0 - 128)):
            assert torch.equal(int_product(x, weights).long(), x.long() @ weights.long())
    """
    in_fork(code, ONEDNN_MAX_CPU_ISA=instructions)


@pytest.mark.parametrize("capability", ["default", "avx2"])
@pytest.mark.slow
def test_paths_of_other_instruction_sets_compute_the_same(capability: str) -> None:
    code = """
import torch
from elastic.quant.formats.integer import Integers, round_to_nearest
from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
import elastic.quant.kernels.integer_format
target, matrix = KernelTarget.of(torch.device("cpu")), MatrixShape(176, 128)
for config in (Integers(8, -1, symmetric=True), Integers(8, 64), Integers(4, 64), Integers(3, 64)):
    weight = torch.randn(176, 128)
    parts = format_of(config)(config, MatrixShape(*weight.shape), target).quantize(weight, None)
    paths = format_of(config)(config, matrix, target).paths(parts)
    x, value = torch.randn(9, 128), format_of(config)(config, matrix, target).value(parts)
    assert torch.equal(value, round_to_nearest(weight, config).value())
    exact, plain = x @ value.t(), (x.bfloat16() @ value.bfloat16().t()).float()
    for name in ("packed", "expanded", "expanded_float32"):
        assert (paths[name](x, parts) - exact).norm() <= 2 * (plain - exact).norm(), (config, name)
    assert (paths["dynamic"](x, parts) - exact).norm() <= 0.03 * exact.norm()
"""
    in_fork(code, ATEN_CPU_CAPABILITY=capability)


@pytest.mark.parametrize("config", [Integers(8, -1, symmetric=True), Integers(8, 32), SemiStructured(2, 4)], ids=str)
def test_products_in_bfloat16_have_few_numbers_of_rows(config: Any) -> None:
    """As oneDNN makes a kernel for each, and keeps it."""
    matrix, target, seen = MatrixShape(48, 64), KernelTarget.of(CPU), set[int]()
    parts = format_of(config)(config, MatrixShape(48, 64), target).quantize(torch.randn(48, 64), None)
    path = format_of(config)(config, matrix, target).paths(parts)["expanded"]

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.Tensor.matmul, torch.Tensor.__matmul__):
                seen.add(args[0].shape[0])
            return function(*args, **(kwargs or {}))

    with Watch():
        products = {rows: path(torch.ones(rows, 64), parts) for rows in range(1, 41)}
    assert seen == {*range(1, 9), 16, 24, 32, 40}
    for rows, y in products.items():
        torch.testing.assert_close(y, products[40][:rows], rtol=0.02, atol=0.05)


@pytest.mark.parametrize("config", [*LOPSIDED, SemiStructured(2, 4), Unstructured(0.5)], ids=str)
def test_nothing_depends_on_torchs_default_dtype(config: Any) -> None:
    """Kernels in C++ write float32 where they are told to, whatever lies there."""
    matrix, target = MatrixShape(48, 256), KernelTarget.of(CPU)
    x, weight = (torch.randn(size, 256, generator=torch.Generator().manual_seed(size)) for size in (5, 48))
    parts = format_of(config)(config, MatrixShape(*weight.shape), target).quantize(weight, None)
    before = {name: path(x, parts) for name, path in format_of(config)(config, matrix, target).paths(parts).items()}
    torch.set_default_dtype(torch.float64)  # with a smaller one, a wrong product would write beyond its end
    try:
        paths = format_of(config)(config, matrix, target).paths(parts)
        after = {name: path(x, parts) for name, path in paths.items()}
        assert format_of(config)(config, matrix, target).value(parts).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert before.keys() == after.keys()
    for name, y in before.items():
        assert torch.equal(after[name], y), name


def test_codes_that_a_config_does_not_have_are_refused() -> None:
    original = round_to_nearest(torch.randn(16, 64), Integers(4, 32))
    with pytest.raises(ConfigError, match=r"2 groups of inputs, .* has 1"):
        packed(Integers(4, 64), original)
    with pytest.raises(ConfigError, match="codes up to 15 do not fit 3 bits"):
        packed(Integers(3, 32), original)
    with pytest.raises(ConfigError, match=r"zero points from .* has 8 alone; use symmetric=False"):
        packed(Integers(4, 32, symmetric=True), original)
