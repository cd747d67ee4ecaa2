"""The Triton kernel, compiled for GPUs that need not be there: what the interpreter accepts, the compiler may not.

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

for capability in (80, 90):
    for variant in VARIANTS:
        assert compile(capability, *variant)["cubin"], (capability, variant)
        print("compiled", capability, variant)
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
def test_the_kernel_compiles_for_ampere_and_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", f"VARIANTS = {VARIANTS!r}\n{CODE}"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    assert child.stdout.count("compiled") == 2 * len(VARIANTS)
