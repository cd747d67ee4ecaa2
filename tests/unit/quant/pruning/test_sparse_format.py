"""Sparse matrices as they are stored, and every path against the reference: the product with zeros included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from elastic import ConfigError
from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
from elastic.quant.formats.pruned import SemiStructured, Unstructured
from elastic.quant.pruning import sparse_cpu, sparse_cuda
from elastic.quant.pruning.criteria import Sparse, prune
from elastic.quant.pruning.sparse_layout import expand, pack, tiles
from support.pruned_matrices import DTYPES, configs_and_matrices, random_inputs, random_matrix

CPU = KernelTarget.of(torch.device("cpu"))
AMPERE, HOPPER = KernelTarget("cuda", "sm80"), KernelTarget("cuda", "sm90")


@given(configs_and_matrices(), DTYPES, st.integers(1, 3000), st.integers(0, 100))
@settings(max_examples=80)
def test_what_is_stored_is_read_back_whole_and_in_pieces(
    drawn: tuple[Sparse, MatrixShape], dtype: torch.dtype, piece: int, seed: int
) -> None:
    config, matrix = drawn
    weight = random_matrix(matrix, dtype, seed)
    pruned, mask = prune(weight, config, random_inputs(20, matrix.inputs, seed))
    parts = pack(config, pruned, mask)
    assert torch.equal(format_of(config)(config, matrix, CPU).value(parts), pruned.float())
    pieces = [expand(parts, rows).clone() for rows in tiles(parts, matrix, piece)]
    assert torch.equal(torch.cat(pieces), pruned)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float16, 0.5625), (torch.float32, 0.53125)])
@pytest.mark.parametrize("config", [SemiStructured(2, 4), SemiStructured(4, 8), Unstructured(0.5)])
def test_bytes_are_those_of_the_weights_that_stay_and_a_bit_for_each(
    config: Sparse, dtype: torch.dtype, share: float
) -> None:
    weight = torch.randn(256, 1024).to(dtype)
    parts = format_of(config)(config, MatrixShape(*weight.shape), CPU).quantize(weight, None)
    starts = 256 * 8 if isinstance(config, Unstructured) else 0
    assert sum(part.nbytes for part in parts.values()) == share * weight.nbytes + starts


@given(configs_and_matrices(), DTYPES, DTYPES, st.integers(1, 64))
@settings(max_examples=60)
def test_a_path_errs_no_more_than_twice_as_much_as_a_plain_product_in_bfloat16(
    drawn: tuple[Sparse, MatrixShape], stored: torch.dtype, dtype: torch.dtype, tokens: int
) -> None:
    config, matrix = drawn
    weight = random_matrix(matrix, stored, tokens)
    format_ = format_of(config)
    parts = format_(config, MatrixShape(*weight.shape), CPU).quantize(weight, random_inputs(16, matrix.inputs))
    dense = format_(config, matrix, CPU).value(parts).double()
    x = torch.randn(64, matrix.inputs, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    exact = x.double() @ dense.t()
    plain = (x.bfloat16() @ dense.bfloat16().t()).double()
    bound = 2 * (plain - exact).norm() + 1e-6 * exact.norm() + 1e-6  # few inputs may have no error at all
    paths = format_(config, matrix, CPU).paths(parts)
    assert paths.keys() == {"expanded", "expanded_float32", "reference"}
    for path in paths.values():
        y = torch.cat([path(piece, parts) for piece in x.split(tokens)])
        assert y.dtype == dtype
        assert (y.double() - exact).norm() <= bound


@pytest.mark.parametrize("config", [SemiStructured(2, 4), Unstructured(0.5)])
def test_a_matrix_of_several_pieces_gives_the_same(config: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_matrix(MatrixShape(40, 64)), torch.randn(3, 64)
    parts = format_of(config)(config, MatrixShape(*weight.shape), CPU).quantize(weight, None)
    dense = format_of(config)(config, MatrixShape(40, 64), CPU).value(parts)
    monkeypatch.setattr(sparse_cpu, "PIECE", 64 * 7)
    paths = format_of(config)(config, MatrixShape(40, 64), CPU).paths(parts)
    torch.testing.assert_close(paths["expanded_float32"](x, parts), x @ dense.t())
    assert paths["expanded"](x[:0], parts).shape == (0, 40)


def test_what_a_kernel_would_read_wrongly_is_refused() -> None:
    config, matrix = Unstructured(0.5), MatrixShape(32, 64)
    parts = format_of(config)(config, MatrixShape(32, 64), CPU).quantize(torch.randn(32, 64), None)
    path = format_of(config)(config, matrix, CPU).paths(parts)["expanded"]
    with pytest.raises(ConfigError, match="64"):
        path(torch.randn(2, 32), parts)
    for name, part in parts.items():
        with pytest.raises(ConfigError, match=f"part '{name}' is"):
            path(torch.randn(2, 64), {**parts, name: part[:-1]})


def test_shapes_that_cannot_be_are_refused_in_words() -> None:
    for config in (SemiStructured(2, 4), SemiStructured(4, 8), Unstructured(0.5)):
        with pytest.raises(ConfigError, match=r"cannot pack a matrix of shape \[16, 20\]: its 20 inputs are not"):
            format_of(config)(config, MatrixShape(16, 20), CPU).quantize(torch.randn(16, 20), None)
        with pytest.raises(ConfigError, match="no sparse kernels for device 'xpu'"):
            format_of(config)(config, MatrixShape(8, 8), KernelTarget("xpu", "")).paths({})


# -- the form that torch's kernel on CUDA takes, in host memory


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([torch.float16, torch.bfloat16]), st.integers(0, 100))
@settings(max_examples=20)
def test_metadata_is_what_torch_packs(outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> None:
    config, matrix = SemiStructured(2, 4), MatrixShape(32 * outputs, 64 * inputs)
    weight = torch.randn(matrix.outputs, matrix.inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight[weight == 0] = 1
    on_cpu = format_of(config)(config, MatrixShape(*weight.shape), CPU).quantize(weight, None)
    parts = format_of(config)(config, MatrixShape(*weight.shape), AMPERE).quantize(weight, None)
    pruned = prune(weight, config)[0]
    values, metadata = sparse_semi_structured_from_dense_cutlass(pruned)
    assert torch.equal(parts["packed"], values)
    assert torch.equal(parts["metadata"], metadata)
    assert torch.equal(sparse_semi_structured_to_dense_cutlass(parts["packed"], parts["metadata"]), pruned)
    assert torch.equal(format_of(config)(config, matrix, AMPERE).value(parts), pruned.float())
    assert sum(p.nbytes for p in parts.values()) == sum(p.nbytes for p in on_cpu.values())
    for packed, packed_for, target, expected in ((on_cpu, CPU, AMPERE, parts), (parts, AMPERE, CPU, on_cpu)):
        again = format_of(config)(config, matrix, packed_for).repack(packed, target)
        assert again.keys() == expected.keys()
        assert all(torch.equal(again[name], part) for name, part in expected.items())


def test_the_kernel_is_for_what_it_is_right_for() -> None:
    matrix, half = MatrixShape(64, 128), torch.float16
    assert sparse_cuda.takes(SemiStructured(2, 4), matrix, AMPERE, half)
    assert sparse_cuda.takes(SemiStructured(2, 4), matrix, KernelTarget("cuda", "sm89"), torch.bfloat16)
    assert not sparse_cuda.takes(SemiStructured(4, 8), matrix, AMPERE, half)
    assert not sparse_cuda.takes(SemiStructured(2, 4), matrix, HOPPER, half), "torch's CUTLASS kernel refuses it"
    assert not sparse_cuda.takes(SemiStructured(2, 4), matrix, CPU, half)
    assert not sparse_cuda.takes(SemiStructured(2, 4), matrix, AMPERE, torch.float32)
    assert not sparse_cuda.takes(SemiStructured(2, 4), MatrixShape(48, 128), AMPERE, half)
    assert not sparse_cuda.takes(SemiStructured(2, 4), MatrixShape(64, 96), AMPERE, half)
    for config, target in ((SemiStructured(4, 8), AMPERE), (SemiStructured(2, 4), HOPPER), (Unstructured(0.5), AMPERE)):
        parts = format_of(config)(config, MatrixShape(64, 128), target).quantize(torch.randn(64, 128).half(), None)
        assert "mask" in parts
        assert format_of(config)(config, matrix, target).paths(parts).keys() == {"expanded", "reference"}


@pytest.mark.parametrize("config", [SemiStructured(2, 4), SemiStructured(4, 8), Unstructured(0.7)])
def test_expansion_as_on_cuda_gives_the_product(config: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations on tensors in host memory; the sparse kernel itself has no body there."""
    monkeypatch.setattr(sparse_cuda, "_kernel_agrees", lambda dtype: False)
    monkeypatch.setattr(sparse_cuda, "PIECE", 128 * 32)
    weight, x = torch.randn(96, 128).bfloat16(), torch.randn(5, 128).bfloat16()
    parts = format_of(config)(config, MatrixShape(*weight.shape), AMPERE).quantize(weight, None)
    dense = format_of(config)(config, MatrixShape(96, 128), AMPERE).value(parts)
    path = format_of(config)(config, MatrixShape(96, 128), AMPERE).paths(parts)["expanded"]
    torch.testing.assert_close(path(x, parts), x @ dense.bfloat16().t())


def test_tokens_are_given_to_the_sparse_kernel_by_eights(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_torch_does(packed: torch.Tensor, metadata: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] % 8 == 0
        return sparse_semi_structured_to_dense_cutlass(packed, metadata) @ x

    monkeypatch.setattr(torch, "_sparse_semi_structured_mm", as_torch_does)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    config, matrix = SemiStructured(2, 4), MatrixShape(64, 128)
    sparse_cuda._kernel_agrees.cache_clear()
    try:
        parts = format_of(config)(config, MatrixShape(64, 128), AMPERE).quantize(torch.randn(64, 128).bfloat16(), None)
        paths = format_of(config)(config, matrix, AMPERE).paths(parts)
        for tokens in (1, 8, 13):
            x = torch.randn(tokens, 128).bfloat16()
            torch.testing.assert_close(paths["sparse"](x, parts), paths["expanded"](x, parts), rtol=0.02, atol=0.1)
    finally:
        sparse_cuda._kernel_agrees.cache_clear()


@pytest.mark.cuda
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
def test_the_kernel_is_tried_on_the_gpu_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(sparse_cuda, "_kernel_agrees", lambda dtype: tried.append(torch.cuda.current_device()))
    config = SemiStructured(2, 4)
    parts = format_of(config)(config, MatrixShape(64, 128), AMPERE).quantize(torch.randn(64, 128).half(), None)
    parts = {name: part.to("cuda:1") for name, part in parts.items()}
    format_of(config)(config, MatrixShape(64, 128), AMPERE).paths(parts)
    assert tried == [1]
    assert torch.cuda.current_device() == 0


def test_a_kernel_that_reads_another_order_or_is_not_there_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    sparse_cuda._kernel_agrees.cache_clear()
    try:
        assert not sparse_cuda._kernel_agrees(torch.float16), "this build of torch has no such kernel on CPUs"
        monkeypatch.setattr(torch, "_sparse_semi_structured_mm", lambda packed, metadata, x: torch.zeros(64, 8).half())
        assert not sparse_cuda._kernel_agrees(torch.bfloat16)
    finally:
        sparse_cuda._kernel_agrees.cache_clear()
    assert "is not used" in caplog.text
    assert "unknown order" in caplog.text


@pytest.mark.cuda
@pytest.mark.parametrize("config", [SemiStructured(2, 4), SemiStructured(4, 8), Unstructured(0.5)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_paths_on_cuda_agree_with_the_reference(config: Sparse, dtype: torch.dtype, tokens: int) -> None:
    matrix, device = MatrixShape(128, 256), torch.device("cuda:0")
    target = KernelTarget.of(device)
    form = format_of(config)(config, matrix, target)
    parts = form.quantize(torch.randn(128, 256, device=device, dtype=dtype), None)
    paths = form.paths(parts)
    x = torch.randn(tokens, 256, device=device, dtype=dtype)
    exact = x.double() @ form.value(parts).double().t()
    for name, path in paths.items():
        assert (path(x, parts).double() - exact).norm() <= 0.01 * exact.norm(), name
