"""The Triton kernels, compiled for GPUs that need not be there: what the interpreter accepts, the compiler may not.

Marked `cuda` because triton comes with torch's CUDA build.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from elastic.quant.kernels import triton as kernels

def compile(capability, dtype, bits, tokens, group):
    sizes = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), kernels.block_sizes(tokens, group)))
    constants = {"BITS": bits, **sizes}
    types = {"x": dtype, "packed": "*u8", "scales": "*bf16", "y": dtype}
    types |= dict.fromkeys(("tokens", "outputs", "inputs", "group"), "i32") | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(fn=kernels._kernel, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm

def compile_expansion(capability, dtype, kernel, constants, others):
    types = {**others, "y": dtype} | dict.fromkeys(constants, "constexpr")
    order = kernel.arg_names
    source = ASTSource(fn=kernel, signature={name: types.get(name, "i32") for name in order}, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm

for capability in (80, 90):
    for variant in VARIANTS:
        assert compile(capability, *variant)["cubin"], (capability, variant)
        print("compiled", capability, variant)
    for dtype in ("*bf16", "*fp16", "*fp32"):
        for bits, pairs in ((8, 0), (4, 0), (4, 1), (4, 4), (3, 0)):
            constants = {"BITS": bits, "PAIRS": pairs, "BLOCK_N": 8, "BLOCK_K": 256}
            parts = {"packed": "*i32" if pairs else "*u8", "scales": "*bf16"}
            assert compile_expansion(capability, dtype, kernels._codes_kernel, constants, parts)["cubin"]
        for even in (False, True):
            parts = {"packed": dtype, "mask": "*u8", "starts": "*u8" if even else "*i64"}
            constants = {"EVEN": even, "BLOCK_N": 8, "BLOCK_K": 256}
            assert compile_expansion(capability, dtype, kernels._sparse_kernel, constants, parts)["cubin"]
        print("expanded", capability, dtype)
"""
VARIANTS = [
    ("*bf16", 8, 1, 128),
    ("*bf16", 8, 70, 128),
    ("*fp16", 4, 1, 48),
    ("*fp16", 3, 70, 128),
    ("*fp32", 3, 1, 32),
    ("*fp32", 8, 70, 16),
]
"""Dtype of the activations, bits, tokens and group: all dtypes, both sizes of blocks, all depths of them."""


@pytest.mark.cuda
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_compile_for_ampere_and_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", f"VARIANTS = {VARIANTS!r}\n{CODE}"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    assert child.stdout.count("compiled") == 2 * len(VARIANTS)
    assert child.stdout.count("expanded") == 2 * 3


WITHOUT_A_COMPILER = """
import torch
from elastic.quant.formats.base import KernelTarget, MatrixShape
from elastic.quant.formats.integer import Integers
from elastic.quant.kernels.integer_format import IntegerFormat

config, matrix, target = Integers(8, 32), MatrixShape(32, 64), KernelTarget.of(torch.device("cuda:0"))
form = IntegerFormat(config, matrix, target)
parts = {name: part.cuda() for name, part in form.quantize(torch.randn(32, 64), None).items()}
paths = form.paths(parts)
assert paths.keys() == {"expanded", "reference"}, paths
x = torch.randn(4, 64, device="cuda")
torch.testing.assert_close(paths["expanded"](x, parts), paths["reference"](x, parts))
"""


@pytest.mark.cuda
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_where_nothing_can_be_compiled_products_do_without(tmp_path: Path) -> None:
    left_out = ("TRITON_INTERPRET", "CC")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PATH": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_A_COMPILER]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    assert "install gcc" in child.stderr
