"""What CUDA's paths are made of, on a CPU as far as that goes: layouts, expanded weights, the kernel interpreted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
from elastic.quant.formats.integer import Integers, round_to_nearest
from elastic.quant.kernels.cuda_layout import CudaLayout, to_tiles
from support.integer_matrices import codes, configs_and_matrices, pack

CUDA, TURING = KernelTarget("cuda", "sm90"), KernelTarget("cuda", "sm75")


@given(
    st.data(),
    configs_and_matrices(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([CUDA, TURING]),
)
@settings(max_examples=100, deadline=None)
def test_expanded_weights_are_those_of_the_reference(
    data: st.DataObject, drawn: tuple[Integers, MatrixShape], dtype: torch.dtype, target: KernelTarget
) -> None:
    config, matrix = drawn
    original = data.draw(codes(config, matrix))
    parts = pack(config, original, target)
    paths = format_of(config)(config, matrix, target).paths(parts)
    assert ("packed" in paths) == CudaLayout(config, matrix, target).tiled
    x = torch.randn(64, matrix.inputs).to(dtype)
    exact = x.double() @ original.value().double().t()
    plain = (x.bfloat16() @ original.value().bfloat16().t()).double()
    for name in ("expanded", "reference"):
        assert (paths[name](x, parts).double() - exact).norm() <= 2 * (plain - exact).norm()
        assert paths[name](x[:0], parts).shape == (0, matrix.outputs)


@pytest.mark.parametrize("config", [Integers(8, -1), Integers(8, 64), Integers(4, 64), Integers(3, 64)], ids=str)
@pytest.mark.parametrize("target", [CUDA, TURING], ids=["sm90", "sm75"])
def test_zero_points_far_from_the_middle_lose_nothing(config: Integers, target: KernelTarget) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[:, 7::64] = 1.0
    original = round_to_nearest(weight, config)
    parts = pack(config, original, target)
    path = format_of(config)(config, MatrixShape(48, 128), target).paths(parts)["expanded"]
    assert torch.equal(path(torch.eye(128), parts), original.value().t())


@pytest.mark.parametrize(
    ("instructions", "int4", "int8"),
    [
        ("sm70", set(), set()),
        ("sm75", {"triton"}, {"triton"}),
        ("sm80", {"packed"}, {"triton"}),
        ("sm120", {"packed"}, {"triton"}),
    ],
)
def test_a_gpu_is_offered_the_kernels_that_were_compiled_for_it(
    instructions: str, int4: set[str], int8: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.quant.kernels.cuda._has_triton", lambda: True)
    matrix, target = MatrixShape(32, 64), KernelTarget("cuda", instructions)
    for config, kernels in ((Integers(4, 32), int4), (Integers(8, 32), int8)):
        parts = pack(config, round_to_nearest(torch.randn(32, 64), config), target)
        assert format_of(config)(config, matrix, target).paths(parts).keys() == {"expanded", "reference"} | kernels


def test_codes_go_between_gpus_of_all_ages() -> None:
    config, matrix = Integers(4, 32), MatrixShape(32, 64)
    old = pack(config, round_to_nearest(torch.randn(32, 64), config), TURING)
    new = format_of(config)(config, matrix, TURING).repack(old, CUDA)
    assert (old["packed"].dtype, new["packed"].dtype) == (torch.uint8, torch.int32)
    back = format_of(config)(config, matrix, CUDA).repack(new, TURING)
    assert all(torch.equal(back[name], part) for name, part in old.items())


def test_words_are_filled_as_a_warp_reads_them() -> None:
    """Thread by thread, as torch's packing kernel does it."""
    inputs = 192
    codes = torch.randint(0, 16, (24, inputs), dtype=torch.uint8)
    packed = to_tiles(codes)
    assert packed.shape == (3, 3, 32, 2)
    for tile in range(3):
        for block in range(3):
            for thread in range(32):
                for pair in range(2):
                    base, lane = block * 64 + pair * 32, thread % 4 * 2
                    first = [base + 8 * i + lane for i in range(4)]
                    columns = [*first, *(column + 1 for column in first)]
                    row = codes[tile * 8 + thread // 4]
                    word = sum(int(row[column]) << (4 * i) for i, column in enumerate(columns))
                    assert int(packed[tile, block, thread, pair]) & 0xFFFFFFFF == word


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernel_computes_the_product() -> None:
    code = """
import torch
from elastic.quant.formats.integer import Integers, round_to_nearest
from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
target = KernelTarget("cuda", "sm90")
for bits in (8, 4, 3):
    for group, inputs in ((-1, 80), (16, 48), (48, 96), (64, 128), (128, 256)):
        config, matrix = Integers(bits, group), MatrixShape(48, inputs)
        codes = round_to_nearest(torch.randn(48, inputs), config)
        form = format_of(config)(config, matrix, target)
        parts = form.pack(codes)
        paths = form.paths(parts)
        if "triton" not in paths:
            continue
        for tokens in (1, 5, 70):
            for dtype in (torch.float32, torch.float16):  # the interpreter cannot multiply bfloat16
                x = torch.randn(tokens, inputs).to(dtype)
                y = paths["triton"](x, parts)
                exact = x.double() @ codes.value().double().t()
                plain = (x.bfloat16() @ codes.value().bfloat16().t()).double()
                assert y.dtype == dtype and (y.double() - exact).norm() <= 2 * (plain - exact).norm(), (config, tokens)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_expand_what_was_packed() -> None:
    code = """
import torch
from elastic.quant.formats.base import KernelTarget, MatrixShape
from elastic.quant.formats.integer import Integers, round_to_nearest
from elastic.quant.formats.pruned import SemiStructured, Unstructured
from elastic.quant.kernels.cuda_layout import CudaLayout
from elastic.quant.kernels.triton import expand_codes, expand_sparse
from elastic.quant.pruning.criteria import prune
from elastic.quant.pruning.sparse_layout import pack as pack_sparse
seen, rows = set(), (16, 40)
for sm in ("sm75", "sm90"):
    for bits, group, inputs in ((8, -1, 80), (4, 16, 48), (4, 32, 96), (4, 32, 64), (4, 128, 640), (3, 128, 384)):
        config, matrix, target = Integers(bits, group), MatrixShape(48, inputs), KernelTarget("cuda", sm)
        weight = torch.randn(48, inputs)
        weight[:, ::32] = 8.0  # zero points far from the middle
        codes = round_to_nearest(weight, config)
        layout = CudaLayout(config, matrix, target)
        parts = layout.pack(codes)
        weights = expand_codes(parts["packed"], parts["scales"], bits, layout.group, rows, torch.float32)
        expected = codes.value()[slice(*rows)]
        assert (weights - expected).norm() <= 0.01 * expected.norm(), (config, inputs, sm)  # scales are in bfloat16
        assert torch.equal(weights, expected), (config, inputs, sm)  # and offsets whole numbers of them
        seen.add(parts["packed"].shape[3:])
for config in (SemiStructured(2, 4), SemiStructured(4, 8), Unstructured(0.3), Unstructured(0.9)):
    for inputs in (64, 2072):
        pruned, mask = prune(torch.randn(48, inputs), config)
        parts = pack_sparse(config, pruned, mask)
        weights = expand_sparse(parts["packed"], parts["mask"], parts.get("starts"), rows, torch.float32)
        assert torch.equal(weights, pruned[slice(*rows)]), (config, inputs)
assert seen == {(), (1,), (2,), (4,)}, seen
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.cuda
def test_words_are_those_of_torchs_packing_kernel() -> None:
    for outputs, inputs in ((16, 32), (64, 192), (4096, 4096)):
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
        tiles = to_tiles(codes)
        pairs = (codes[:, 0::2] << 4 | codes[:, 1::2]).contiguous()
        assert torch.equal(torch.ops.aten._convert_weight_to_int4pack(pairs, tiles.shape[3] * 2), tiles)


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("group", [-1, 48, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_paths_on_cuda(bits: int, group: int, dtype: torch.dtype) -> None:
    config, matrix, target = Integers(bits, group), MatrixShape(80, 768), KernelTarget.of(torch.device("cuda"))
    original = round_to_nearest(torch.randn(80, 768), config)
    parts = {name: part.cuda() for name, part in pack(config, original, target).items()}
    paths = format_of(config)(config, matrix, target).paths(parts)
    for tokens in (0, 1, 7, 130):
        x = torch.randn(tokens, 768, dtype=dtype, device="cuda")
        exact = x.double() @ original.value().double().t().cuda()
        plain = (x.bfloat16() @ original.value().bfloat16().t().cuda()).double()
        for path in paths.values():
            assert (path(x, parts).double() - exact).norm() <= 2 * (plain - exact).norm()
