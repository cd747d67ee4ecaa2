"""The layout of Marlin, word by word, and what its product is called with; without a device."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from elastic import BackendUnavailable, ConfigError
from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors, format_of
from elastic.quant.formats.integer import QuantizedMatrix, round_to_nearest
from elastic.quant.kernels.marlin import Marlin, MarlinFormat

CUDA = KernelTarget("cuda", "sm90")
CONFIGS = [
    Marlin(4, 128, symmetric=True),
    Marlin(4, 32),
    Marlin(4, -1),
    Marlin(4, -1, symmetric=True),
    Marlin(8, 64, symmetric=True),
    Marlin(8, -1, symmetric=True),
]


def code_in_words(packed: torch.Tensor, bits: int, output: int, input_: int) -> int:
    """Where a warp looks for a code."""
    column, row = output % 64, input_ % 16
    c, b, j = column % 8, column // 8 % 2, column // 16
    h, q, p = row // 8, row % 8 // 2, row % 2
    word = output // 64 * 16 * bits * 2 + ((c * 4 + q) * 4 + j) * (bits // 4) + (b if bits == 8 else 0)
    place = 4 * p + 2 * b + h if bits == 4 else 2 * p + h
    return int(packed[input_ // 16, word]) >> (bits * place) & (2**bits - 1)


def pack(config: Marlin, codes: QuantizedMatrix) -> PackedTensors:
    return MarlinFormat(config, MatrixShape(*codes.codes.shape), CUDA).pack(codes)


def original(config: Marlin, matrix: MatrixShape) -> QuantizedMatrix:
    return round_to_nearest(torch.randn(matrix.outputs, matrix.inputs), config)


@pytest.mark.parametrize("config", CONFIGS)
def test_codes_survive_packing_and_lie_where_a_warp_looks(config: Marlin) -> None:
    matrix = MatrixShape(128, 256)
    codes = original(config, matrix)
    parts = pack(config, codes)
    read = MarlinFormat(config, matrix, CUDA).unpack(parts)
    for mine, theirs in zip(vars(codes).values(), vars(read).values(), strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    for output in range(0, 128, 3):
        for input_ in range(0, 256, 5):
            assert code_in_words(parts["packed"], config.bits, output, input_) == int(codes.codes[output, input_])


def test_scales_and_zeros_lie_where_a_warp_looks() -> None:
    scales = torch.arange(128.0).repeat(2, 1)
    codes = QuantizedMatrix(torch.zeros(128, 256, dtype=torch.uint8), scales.t(), scales.t() % 16)
    parts = pack(Marlin(4, 128), codes)
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    assert parts["scales"][1, 64:].tolist() == [64 + place for place in grouped]
    nibbles = [int(word) >> (4 * i) & 15 for word in parts["zeros"][0, :8] for i in range(8)]
    interleaved = [grouped[8 * i + k] for i in range(8) for k in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert nibbles == [place % 16 for place in interleaved]
    whole = QuantizedMatrix(codes.codes, scales[:1].t(), torch.full((128, 1), 8.0))
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    assert pack(Marlin(4, -1, symmetric=True), whole)["scales"][0, :32].tolist() == single


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_product_is_vllms(config: Marlin, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, called = MatrixShape(64, 128), {}

    def marlin_gemm(a: torch.Tensor, a_scales: None = None, **rest: Any) -> torch.Tensor:
        called.update(rest)
        parts = {"packed": rest["b_q_weight"], "scales": rest["b_scales"], "zeros": rest["b_zeros"]}
        return (a.float() @ MarlinFormat(config, matrix, CUDA).unpack(parts).value().t()).to(a.dtype)

    vllm: Any = ModuleType("vllm")
    vllm._custom_ops = SimpleNamespace(marlin_gemm=marlin_gemm)
    types: Any = ModuleType("vllm.scalar_type")
    types.scalar_types = SimpleNamespace(uint4="uint4", uint4b8="uint4b8", uint8b128="uint8b128")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.scalar_type", types)
    codes = original(config, matrix)
    parts = pack(config, QuantizedMatrix(codes.codes, codes.scales, codes.zeros, torch.randperm(128)))
    parts = {name: part.to(device) for name, part in parts.items()}
    paths = MarlinFormat(config, matrix, CUDA).paths(parts)
    x = torch.randn(5, 128).to(device, dtype)
    y, exact = paths["marlin"](x, parts), paths["reference"](x, parts).float()
    assert y.dtype == dtype
    assert (y.float() - exact).norm() <= 0.01 * exact.norm()
    sizes = {name: called[name] for name in ("size_m", "size_n", "size_k")}
    assert sizes == {"size_m": 5, "size_n": 64, "size_k": 128}
    assert called["workspace"].device == torch.device(device)
    assert not called["workspace"].any()
    assert called["b_q_type"] == ("uint8b128" if config.bits == 8 else "uint4b8" if config.symmetric else "uint4")


def test_what_marlin_does_not_take_is_refused() -> None:
    for fields in ({"bits": 3}, {"bits": 8}, {"bits": 4, "group_size": 256}):
        with pytest.raises(ConfigError, match="Marlin"):
            Marlin(**fields)
    others: list[dict[str, Any]] = [{"bits": 4.0}, {"bits": 4, "group_size": 64.0}, {"bits": 8, "symmetric": 1}]
    for fields in others:
        with pytest.raises(ConfigError, match=r"=4\.0 is|=64\.0 is|=1 cannot be"):
            Marlin(**fields)
    config = Marlin(4, 128)
    assert format_of(config) is MarlinFormat
    assert MarlinFormat.supports(config, MatrixShape(96, 128)) is not None
    codes = round_to_nearest(torch.randn(64, 128), config)
    with pytest.raises(ConfigError, match="zero points"):
        pack(config, QuantizedMatrix(codes.codes, codes.scales, codes.zeros + 16))


def test_what_is_packed_for_marlin_stays_on_gpus() -> None:
    config, matrix = Marlin(4, 128), MatrixShape(64, 128)
    parts = pack(config, original(config, matrix))
    assert MarlinFormat(config, matrix, CUDA).repack(parts, KernelTarget("cuda", "sm80")) is parts
    with pytest.raises(ConfigError, match="cannot go to cpu; use Integers"):
        MarlinFormat(config, matrix, CUDA).repack(parts, KernelTarget("cpu", "AVX2"))


@pytest.mark.cuda
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
def test_what_is_packed_for_marlin_is_whole_on_another_gpu() -> None:
    config, matrix = Marlin(4, 128), MatrixShape(64, 128)
    devices = [torch.device("cuda", index) for index in range(2)]
    here, there = (KernelTarget.of(device) for device in devices)
    parts = {name: part.to(devices[0]) for name, part in pack(config, original(config, matrix)).items()}
    repacked = MarlinFormat(config, matrix, here).repack(parts, there)
    moved = {name: part.to(devices[1]) for name, part in repacked.items()}
    form = MarlinFormat(config, matrix, here)
    assert torch.equal(form.value(moved).cpu(), form.value(parts).cpu())


def test_a_gpu_without_marlins_instructions_is_refused() -> None:
    config, matrix, turing = Marlin(4, 128), MatrixShape(64, 128), KernelTarget("cuda", "sm75")
    parts = pack(config, original(config, matrix))
    with pytest.raises(BackendUnavailable, match=r"compute capability 8\.0, this GPU has 7\.5; use Integers"):
        MarlinFormat(config, matrix, turing).paths(parts)
    with pytest.raises(BackendUnavailable, match="use Integers"):
        MarlinFormat(config, matrix, CUDA).repack(parts, turing)


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    config, matrix = Marlin(4, 128), MatrixShape(64, 128)
    parts = pack(config, original(config, matrix))
    with pytest.raises(BackendUnavailable, match="pip install vllm"):
        MarlinFormat(config, matrix, CUDA).paths(parts)
