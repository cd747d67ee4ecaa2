"""Choosing kernels by timing them on a GPU: nothing but the work that is timed is waited for."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from elastic.kvcache.decode_kernels import KERNELS
from elastic.kvcache.decode_timing import DEFAULT, DecodeShape, fastest, processor
from elastic.quant.formats.autotune import measure
from elastic.quant.formats.base import KernelTarget, MatrixShape
from elastic.quant.formats.integer import Integers
from elastic.quant.formats.kernel_table import KernelTable
from elastic.quant.kernels.integer_format import IntegerFormat


def choose_kernels(device: torch.device) -> None:
    """Measure two products and one attention."""
    config, matrix, target = Integers(4, 32), MatrixShape(512, 1024), KernelTarget.of(device)
    packed = IntegerFormat(config, matrix, target).quantize(torch.randn(512, 1024), None)
    parts = {name: part.to(device) for name, part in packed.items()}
    chosen = measure(KernelTable(), config, parts, matrix, target, torch.bfloat16, buckets=(1, 64))
    assert chosen.keys() == {1, 64}
    shape = DecodeShape(processor(device), torch.float32, 2, 64, 64, "token_major")
    assert fastest(shape, 128, device, kv_heads=2) in KERNELS


@pytest.mark.cuda
def test_kernels_are_timed_without_stopping_the_device(simulator: ModuleType) -> None:
    before = simulator.count("device_sync")
    choose_kernels(torch.device("cuda", 0))
    assert simulator.count("device_sync") == before


@pytest.mark.cuda
def test_kernels_of_another_gpu_are_timed_on_it() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    choose_kernels(torch.device("cuda", 1))
    assert torch.cuda.current_device() == 0


@pytest.mark.cuda
def test_a_kernel_that_there_is_no_memory_to_measure_is_the_stock_one() -> None:
    device = torch.device("cuda", 0)
    shape = DecodeShape(processor(device), torch.float32, 2, 64, 64, "token_major")
    assert fastest(shape, 8192, device, kv_heads=1 << 26) == DEFAULT
    assert fastest(shape, 128, device, kv_heads=2) in KERNELS
