"""Products with few rows that are computed with four: which, and that nobody sees the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from elastic.weights.prepacked import padding
from elastic.weights.prepacked.joined import join
from elastic.weights.prepacked.onednn import OneDNNLayout, find_layout, multiply
from elastic.weights.prepacked.padding import multiply_padded, padded_rows, product_seconds
from elastic.weights.prepacked.source import ResidentSource


def layout_of(outputs: int, inputs: int) -> OneDNNLayout:
    layout = find_layout((outputs, inputs), torch.float32)
    assert layout is not None
    return layout


@pytest.fixture
def fresh() -> Iterator[None]:
    """No decision of another test, and none for others."""
    padded_rows.cache_clear()
    yield
    padded_rows.cache_clear()


@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (3,), (4,), (5,), (1, 2), (2, 1, 1), (3, 0)])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 256)])
def test_few_rows_are_those_of_a_product_with_four(shape: tuple[int, ...], bias: torch.Tensor | None) -> None:
    weight, x = torch.randn(256, 1024), torch.randn(*shape, 1024)
    layout = layout_of(256, 1024)
    matrix = layout.view(packed := layout.pack(weight))
    product = multiply_padded(x, matrix, bias, (4, 4, 3))
    assert product.shape == (*shape, 256)
    torch.testing.assert_close(product, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    rows = x.view(-1, 1024)
    if len(rows) in (1, 2):
        four = multiply(torch.cat([rows, torch.zeros(4 - len(rows), 1024)]), matrix, bias)
        assert torch.equal(product.view(-1, 256), four[: len(rows)])
    else:
        assert torch.equal(product, multiply(x, matrix, bias))
    assert packed.shape == weight.shape


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("seconds", "padded"),
    [([1.0, 1.2, 0.9, 0.85], (4, 4, 3)), ([1.0, 1.0, 1.1, 1.2], (1, 2, 3)), ([0.9, 1.2, 1.2, 0.85], (1, 4, 4))],
)
def test_rows_are_padded_where_that_is_faster(
    seconds: list[float], padded: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[OneDNNLayout] = []
    monkeypatch.setattr(padding, "product_seconds", lambda layout: timed.append(layout) or seconds)
    assert padded_rows(1024, torch.float32) == padded
    assert padded_rows(1024, torch.float32) == padded
    assert [layout.shape for layout in timed] == [(4096, 1024)], "once for all matrices with as many inputs"
    assert padded_rows(64, torch.float32) == (1, 2, 3)
    assert len(timed) == 1, "those are read from a cache"


@pytest.mark.usefixtures("fresh")
def test_a_matrix_that_comes_back_is_padded_as_before_whatever_thread_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads have numbers of threads of their own; nor is one timed in the middle of what is served."""
    times = iter([[1.0, 1.0, 1.0, 0.5]])
    monkeypatch.setattr(padding, "product_seconds", lambda layout: next(times))
    assert padded_rows(1024, torch.float32) == (4, 4, 4)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert padded_rows(1024, torch.float32) == (4, 4, 4)
    finally:
        torch.set_num_threads(before)


def test_products_are_timed_for_each_number_of_rows() -> None:
    state = torch.get_rng_state()
    seconds = product_seconds(layout_of(256, 512))
    assert torch.equal(torch.get_rng_state(), state), "random numbers of the program are its own"
    assert len(seconds) == 4
    assert min(seconds) > 0


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_matrices_that_are_multiplied_as_one_are_padded_alike(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "product_seconds", lambda layout: [1.0, 1.0, 1.0, 0.5])
    whole, outputs, x = torch.randn(384, 1024), (256, 128), torch.randn(rows, 1024)
    layouts = tuple(layout_of(count, 1024) for count in outputs)
    memory = torch.cat([layout.pack(w).view(-1) for layout, w in zip(layouts, whole.split(outputs), strict=True)])
    packed = tuple(part.view(-1, 1024) for part in memory.split([1024 * count for count in outputs]))
    together = join(layouts, packed)
    if together is None:
        pytest.skip("this CPU orders these, or adds them up, otherwise than one by one")
    for number, (layout, part) in enumerate(zip(layouts, packed, strict=True)):
        product = together.product(x, number)
        assert product is not None
        assert torch.equal(product, ResidentSource("layer", layout, part, lambda: None).product(x))
