"""Products in C++: how far off they may be, the same bits in any batch, and numbers that are none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engines.executor.graphs.graph_memory import GraphMemory
from elastic.engines.executor.graphs.operator_graph import OperatorGraph
from elastic.quant.formats.base import Kernel, KernelTarget, MatrixShape, PackedTensors, format_of
from elastic.quant.formats.integer import Integers, QuantizedMatrix
from elastic.quant.kernels.compiled.integer_matmul import multiplies_nibbles
from elastic.quant.kernels.cpu_layout import CpuLayout
from support.child_process import in_fork
from support.integer_matrices import codes, configs_and_matrices, pack

pytestmark = pytest.mark.skipif(
    not multiplies_nibbles("AVX2", 32), reason="there is no C++ compiler, or its processor lacks AVX2"
)
TARGETS = [KernelTarget("cpu", "AVX512"), KernelTarget("cpu", "AVX2")]
"""Either order of bytes is read on any processor."""


def compiled(
    config: Integers, original: QuantizedMatrix, target: KernelTarget = TARGETS[0]
) -> tuple[PackedTensors, Kernel]:
    parts = pack(config, original, target)
    return parts, format_of(config)(config, MatrixShape(*original.codes.shape), target).paths(parts)["compiled"]


def drawn(config: Integers, outputs: int, inputs: int) -> QuantizedMatrix:
    """Codes from one end to the other, and zero points of all rows alike."""
    generator = torch.Generator().manual_seed(outputs)
    groups = inputs // config.inputs_per_group(inputs)
    original = torch.randint(0, 2**config.bits, (outputs, inputs), dtype=torch.uint8, generator=generator)
    return QuantizedMatrix(original, torch.full((outputs, groups), 0.125), torch.full((outputs, groups), 3.0))


@given(st.data(), configs_and_matrices(), st.integers(1, 9), st.sampled_from(TARGETS), st.floats(0, 40))
@settings(max_examples=100, deadline=None)
def test_the_error_is_at_most_half_a_step_of_each_group(
    data: st.DataObject,
    config_and_matrix: tuple[Integers, MatrixShape],
    tokens: int,
    target: KernelTarget,
    outlier: float,
) -> None:
    config, matrix = config_and_matrix
    original = data.draw(codes(config, matrix))
    group = min(CpuLayout(config, matrix, target).group, 256)
    parts, kernel = compiled(config, original, target)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, matrix.inputs, generator=generator) * torch.rand(tokens, 1, generator=generator)
    x[0, tokens % matrix.inputs] = outlier
    y = kernel(x, parts).double()
    weights, largest = stored_weights(config, original, parts, matrix)
    values = x.float() / original.input_scale if original.input_scale is not None else x
    if original.order is not None:
        values = values[:, original.order.long()]
    values = values.double()
    pieces = zip(values.abs().split(group, 1), weights.abs().split(group, 1), strict=True)
    rounded = sum(x.amax(1, keepdim=True) / 32767 / 2 * w.sum(1) for x, w in pieces)
    summed = 2**-20 * largest * values.abs().sum(1, keepdim=True)  # in float32
    assert ((y - values @ weights.t()).abs() <= 1.001 * rounded + summed).all()


def stored_weights(
    config: Integers, original: QuantizedMatrix, parts: PackedTensors, matrix: MatrixShape
) -> tuple[torch.Tensor, float]:
    """The weights as scales in bfloat16 and zero points have them, and the largest number that makes them up."""
    encoding = CpuLayout(config, matrix, TARGETS[0]).encoding
    size = config.inputs_per_group(matrix.inputs)
    pairs = [original.scales.bfloat16(), original.zeros]
    scales, zeros = (each.double().repeat_interleave(size, 1) for each in pairs)
    offsets = scales * (encoding.middle - zeros)
    largest = (scales * 2**config.bits).amax() + offsets.abs().amax()
    return scales * (original.codes.double() - zeros), float(largest)


@pytest.mark.parametrize("target", TARGETS, ids=["AVX512", "AVX2"])
@pytest.mark.parametrize("config", [Integers(4, 256), Integers(8, 256), Integers(3, 64), Integers(8, -1)], ids=str)
def test_sums_of_the_largest_codes_fit_and_each_code_is_in_its_place(config: Integers, target: KernelTarget) -> None:
    """Whole groups of the largest code times the largest activation; and every seventh input alone."""
    original = drawn(config, 64 + 64 + 16, 512)
    original.codes[5] = 2**config.bits - 1
    parts, kernel = compiled(config, original, target)
    weights, _ = stored_weights(config, original, parts, MatrixShape(144, 512))
    for x in (torch.full((2, 512), 2.0), -torch.full((2, 512), 2.0), torch.eye(512)[::7]):
        torch.testing.assert_close(kernel(x, parts).double(), x.double() @ weights.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", [Integers(4, 64), Integers(8, 64), Integers(3, 64), Integers(8, -1)], ids=str)
def test_a_token_has_the_same_bits_in_any_batch_and_with_any_threads(config: Integers) -> None:
    parts, kernel = compiled(config, drawn(config, 64 * 5 + 32, 256))
    x = torch.randn(203, 256, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = torch.cat([kernel(row, parts) for row in x.split(1)])
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(kernel(x, parts), single)
            assert torch.equal(kernel(x[7:12], parts), single[7:12])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("config", [Integers(4, 64), Integers(8, -1)], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_spoils_its_own_token_alone(value: float, config: Integers) -> None:
    parts, kernel = compiled(config, drawn(config, 128, 256))
    x = torch.randn(6, 256)
    expected = kernel(x, parts)
    for place in (0, 63, 64, 255):
        spoilt = x.clone()
        spoilt[3, place] = value
        y = kernel(spoilt, parts)
        assert y[3].isnan().all()
        others = [0, 1, 2, 4, 5]
        assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("config", [Integers(4, 64), Integers(8, -1)], ids=str)
def test_nothing_and_next_to_nothing_give_nothing(config: Integers) -> None:
    parts, kernel = compiled(config, drawn(config, 128, 256))
    assert torch.equal(kernel(torch.zeros(2, 256), parts), torch.zeros(2, 128))
    for tiny in (1e-45, 1e-38, 1e-36):
        y = kernel(torch.full((2, 256), tiny), parts)
        assert y.isfinite().all()
        assert (y.abs() <= 1.001 * tiny * 256 * 32).all()


@pytest.mark.parametrize("config", [Integers(4, 64), Integers(8, 64), Integers(3, 64), Integers(8, -1)], ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=["AVX512", "AVX2"])
def test_nothing_beside_the_parts_is_read(config: Integers, target: KernelTarget) -> None:
    """As in pages, where what lies before and behind a part is another's, or poison."""
    parts, kernel = compiled(config, drawn(config, 64 * 2 + 16, 256 + 64), target)
    lying = {}
    for name, part in parts.items():
        size = part.nbytes
        around = torch.full((size + 2 * 4096,), 0xFF, dtype=torch.uint8)  # NaN as bfloat16
        lying[name] = around[4096 : 4096 + size].view(part.dtype).view(part.shape).copy_(part)
    x = torch.full((7 + 2, 256 + 64), torch.nan)
    x[1:8] = torch.randn(7, 256 + 64)
    assert torch.equal(kernel(x[1:8], lying), kernel(x[1:8].clone(), parts))


@pytest.mark.parametrize("config", [Integers(4, 64), Integers(8, 64), Integers(8, -1)], ids=str)
def test_a_captured_product_is_of_the_activations_of_its_replay(config: Integers) -> None:
    parts, kernel = compiled(config, drawn(config, 128, 256))
    x, graph = torch.randn(5, 256), OperatorGraph()
    graph.capture(lambda: kernel(x * 2, parts) + 1, GraphMemory())
    x.copy_(torch.randn(5, 256))
    assert torch.equal(graph.replay(), kernel(x * 2, parts) + 1)


@pytest.mark.slow
def test_without_a_compiler_torchs_kernels_multiply_whatever_a_table_says() -> None:
    code = """
import torch
from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
from elastic.quant.formats.integer import Integers
from elastic.quant.formats.kernel_table import KernelTable, MatmulSpec
import elastic.quant.kernels.integer_format
config, matrix, target = Integers(4, 64), MatrixShape(64, 128), KernelTarget.of(torch.device("cpu"))
parts = format_of(config)(config, MatrixShape(64, 128), target).quantize(torch.randn(64, 128), None)
paths = format_of(config)(config, matrix, target).paths(parts)
table, spec = KernelTable(), MatmulSpec.of(config, parts, matrix, target, torch.float32)
table.add(spec, {1: "compiled", 512: "compiled"})
print("compiled" in paths, table.path(spec, 1, paths) in paths.values(), table.path(spec, 512, paths) in paths.values())
"""
    assert in_fork(code, ELASTIC_DISABLE_COMPILE="1").strip() == "False True True"
