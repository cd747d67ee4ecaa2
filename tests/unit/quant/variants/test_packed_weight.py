"""Weights in Parameter slots whose products are computed from packed parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from elastic.errors import StateError
from elastic.quant.formats.base import KernelTarget
from elastic.quant.formats.integer import Integers
from elastic.quant.formats.kernel_table import KernelTable
from elastic.quant.variants.packed_weight import PackedMatrix, PackedSource, paths
from elastic.quant.variants.variant import pack_parameter
from elastic.weights import batch_context
from elastic.weights.proxy.tensor import WeightProxy
from support.architectures import build
from support.static_quant import pack_static

CPU = KernelTarget.of(torch.device("cpu"))


class Full:
    """The full weight, somewhere."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def value(self) -> torch.Tensor:
        return self.tensor

    copy = stored = value

    def write(self, value: torch.Tensor) -> None:
        raise StateError("not written")

    def describe(self) -> str:
        return "somewhere"


def weight(*shape: int, transposed: bool = False) -> tuple[Any, torch.Tensor]:
    """A packed weight, and its value."""
    full = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    packed = pack_parameter(full, Integers(4, 32), CPU, transposed)
    assert packed.shape == shape
    return WeightProxy(full, PackedSource(Full(full), packed)), packed.value()


CALLS = {
    "linear": lambda x, w, v, b: (F.linear(x, w, b), F.linear(x, v, b)),
    "linear, named": lambda x, w, v, b: (F.linear(input=x, weight=w, bias=b), F.linear(x, v, b)),
    "matmul": lambda x, w, v, b: (x @ w.transpose(-1, -2), x @ v.T),
}


@pytest.mark.parametrize("name", [*CALLS, "addmm"])
def test_products_under_autocast_have_its_dtype(name: str) -> None:
    packed, value = weight(48, 64)
    x, bias = torch.randn(5, 64), torch.randn(48)
    call = CALLS.get(name, lambda x, w, v, b: (torch.addmm(b, x, w.T), torch.addmm(b, x, v.T)))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            ours, plain = call(x, packed, value, bias)
        assert ours.dtype == plain.dtype == dtype
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("name", CALLS)
def test_products_are_those_of_the_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, value = weight(48, 64)
    monkeypatch.setattr(PackedMatrix, "value", None)
    for shape in ((64,), (1, 64), (2, 5, 64), (0, 64)):
        x = torch.randn(*shape)
        with paths.forced("reference"):
            ours, plain = CALLS[name](x, packed, value, torch.ones(48))
        torch.testing.assert_close(ours, plain)


def test_transposed_matrices_as_conv1d_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, value = weight(64, 48, transposed=True)
    monkeypatch.setattr(PackedMatrix, "value", None)
    x, bias = torch.randn(3, 64), torch.randn(48)
    with paths.forced("reference"):
        torch.testing.assert_close(torch.addmm(bias, x, packed), torch.addmm(bias, x, value))
        torch.testing.assert_close(x @ packed, x @ value)


def test_experts_one_at_a_time_several_and_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, value = weight(3, 48, 64)
    chosen = torch.tensor([2, 0, 2, 1])
    torch.testing.assert_close(packed[chosen], value[chosen])
    x, offs = torch.randn(7, 64), torch.tensor([2, 2, 7], dtype=torch.int32)
    expected = torch.cat([x[:2] @ value[0].T, x[2:] @ value[2].T])
    with paths.forced("reference"):
        for index in (1, -1, torch.tensor(2)):
            one = packed[index]
            assert isinstance(one, WeightProxy)
            torch.testing.assert_close(F.linear(x, one), x @ value[index].T)
        monkeypatch.setattr(PackedMatrix, "value", None)
        torch.testing.assert_close(F.grouped_mm(x, packed.transpose(-2, -1), offs=offs), expected)


@pytest.mark.parametrize(
    "index", [torch.tensor([], dtype=torch.int64), torch.tensor([-1, 0]), torch.tensor(True), torch.tensor([True] * 3)]
)
def test_experts_are_chosen_as_torch_does(index: torch.Tensor) -> None:
    packed, value = weight(3, 48, 64)
    assert torch.equal(packed[index], value[index])


@pytest.mark.parametrize("first", [0, 1])
def test_parts_of_experts_do_not_depend_on_their_weights(first: int) -> None:
    """The zero points of one are the middle of the codes everywhere, those of others are not."""
    full = torch.rand(2, 48, 64, generator=torch.Generator().manual_seed(0))
    full[first] = full[first] * 2 - 1
    full[first, :, 0], full[first, :, 1] = -128 / 127.5, 127 / 127.5
    packed = pack_parameter(full, Integers(8, -1), CPU, False)
    torch.testing.assert_close(packed.value(), full, rtol=0, atol=0.005)


def test_inputs_of_a_wrong_size_have_torchs_error() -> None:
    packed, _ = weight(48, 64)
    for x in (torch.randn(2, 128), torch.randn(1, 32)):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            F.linear(x, packed)


def test_what_no_kernel_knows_sees_the_value() -> None:
    packed, value = weight(48, 64)
    assert torch.equal(packed.abs().sum(0), value.abs().sum(0))
    assert torch.equal(torch.relu(packed), torch.relu(value))
    assert torch.equal(packed[3:5], value[3:5])
    assert torch.equal(packed.t().contiguous(), value.T)


def test_a_static_layer_is_read_as_what_it_computes_with() -> None:
    layer = pack_static(build("llama-gqa").model.layers[0], "int4")
    up = layer.mlp.up_proj.weight  # type: ignore[union-attr]
    assert torch.equal(up.detach(), up.source.value())  # type: ignore[union-attr]
    with pytest.raises(StateError, match="statically quantized weight is not written"):
        up.copy_(torch.zeros(48, 32))  # type: ignore[union-attr,operator]


def test_a_transposed_view_stays_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, value = weight(48, 64)
    monkeypatch.setattr(PackedMatrix, "value", None)
    x = torch.randn(3, 64)
    with paths.forced("reference"):
        for flipped in (packed.T, packed.t(), packed.mT, torch.t(packed), packed.transpose(0, 1)):
            assert flipped.shape == (64, 48)
            torch.testing.assert_close(x @ flipped, x @ value.T)
        torch.testing.assert_close(F.linear(x, packed.T.T), x @ value.T)


def test_a_part_of_a_batch_goes_by_the_path_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = weight(48, 64)
    asked: list[int] = []
    known = KernelTable.path

    def path(self: KernelTable, product: Any, tokens: int, among: Any) -> Any:
        asked.append(tokens)
        return known(self, product, tokens, among)

    monkeypatch.setattr(KernelTable, "path", path)
    x = torch.randn(2, 100, 64)
    whole = F.linear(x, packed)
    batch_context.thread.share = batch_context.BatchShare(1, 2)
    try:
        half = F.linear(x[:1], packed)
    finally:
        batch_context.thread.share = None
    assert torch.allclose(half, whole[:1], atol=1e-5)
    F.linear(x[:1], packed)
    assert asked == [200, 100], "the half went by what was bound for all, and 100 by themselves by another"
