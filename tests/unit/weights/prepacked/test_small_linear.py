"""Products with small matrices by the kernel: how far off they may be, what they depend on, when they are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.weights.prepacked import onednn
from elastic.weights.prepacked import small_linear as module
from elastic.weights.prepacked.small_linear import MOST_TOKENS, is_small, small_linear

needs_kernel = pytest.mark.skipif(
    module._library() is None, reason="there is no C++ compiler, or its processor lacks AVX2 or FMA"
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each product by the kernel."""
    tokens: list[int] = []
    library = module._library()

    class Noted:
        def multiply(self, *arguments: Any) -> None:
            tokens.append(arguments[4])
            library.multiply(*arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

    monkeypatch.setattr(module, "_library", Noted)
    return tokens


@needs_kernel
@given(
    st.integers(1, 20).map(lambda n: 16 * n),
    st.integers(1, 40).map(lambda n: 4 * n),
    st.integers(1, MOST_TOKENS),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_error_is_that_of_sums_in_float32(inputs: int, outputs: int, tokens: int, has_bias: bool) -> None:
    weight, x = drawn(outputs, inputs), drawn(tokens, inputs, seed=1)
    bias = drawn(outputs, seed=2) if has_bias else None
    with torch.no_grad():
        y = small_linear(x, weight, bias).double()
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = F.linear(x.double().abs(), weight.double().abs()) + (0 if bias is None else bias.double().abs())
    assert y.shape == (tokens, outputs)
    assert ((y - exact).abs() <= (inputs + 1) * 2**-23 * terms).all()


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_is_computed_alike_in_each_batch_and_by_any_number_of_threads(threads: int, calls: list[int]) -> None:
    weight, x = drawn(768, 128), drawn(MOST_TOKENS, 128, seed=1)
    before = torch.get_num_threads()
    with torch.no_grad():
        alone = torch.cat([small_linear(row, weight) for row in x.split(1)])
        torch.set_num_threads(threads)
        try:
            assert torch.equal(small_linear(x, weight), alone)
        finally:
            torch.set_num_threads(before)
    assert calls == [1] * MOST_TOKENS + [MOST_TOKENS]


@needs_kernel
def test_what_lies_around_is_neither_read_nor_written(calls: list[int]) -> None:
    around = torch.full((6, 32), torch.nan)
    around[1:5] = drawn(4, 32)
    x = torch.full((5, 32), torch.nan)
    x[1:4] = drawn(3, 32, seed=1)
    with torch.no_grad():
        y = small_linear(x[1:4], around[1:5])
    torch.testing.assert_close(y, F.linear(x[1:4], around[1:5]))
    assert calls == [3]


@needs_kernel
@pytest.mark.skipif(not onednn.has_product(), reason="this build of torch has no product by oneDNN")
def test_many_tokens_are_computed_by_the_faster_library(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = drawn(64, 128), drawn(64, seed=2), drawn(MOST_TOKENS + 1, 128, seed=1)
    for by_onednn, product in ((False, F.linear), (True, onednn.multiply)):
        monkeypatch.setattr(module, "_is_faster_by_onednn", lambda *_, by_onednn=by_onednn: by_onednn)
        with torch.no_grad():
            y = small_linear(x, weight, bias)
            assert torch.equal(y, product(x, weight, bias))
        torch.testing.assert_close(y, F.linear(x, weight, bias))
    assert not calls


@needs_kernel
def test_which_library_is_faster_is_timed_once_for_a_shape() -> None:
    module._is_faster_by_onednn.cache_clear()
    with torch.no_grad():
        for _ in range(2):
            small_linear(drawn(MOST_TOKENS + 1, 128), drawn(64, 128))
    assert module._is_faster_by_onednn.cache_info().misses == 1


@needs_kernel
def test_other_products_are_those_of_torch(calls: list[int]) -> None:
    weight = drawn(64, 128)
    with torch.no_grad():
        x = drawn(128, 4).T
        assert torch.equal(small_linear(x, weight), F.linear(x, weight))
        halves = drawn(4, 128).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(small_linear(halves, weight), F.linear(halves, weight))
        spread = drawn(64, 256)[:, ::2]
        assert torch.equal(small_linear(drawn(4, 128), spread), F.linear(drawn(4, 128), spread))
        x, one = drawn(4, 128), torch.ones(1)
        assert torch.equal(small_linear(x, weight, one), F.linear(x, weight, one))
        for x, bias in ((drawn(4, 64), None), (drawn(4, 256), None), (drawn(4, 128), drawn(64).bfloat16())):
            with pytest.raises(RuntimeError):
                small_linear(x, weight, bias)
    recorded = drawn(4, 128).requires_grad_()
    small_linear(recorded, weight).sum().backward()
    torch.testing.assert_close(recorded.grad, weight.sum(0).expand(4, -1))
    assert not calls


@needs_kernel
def test_no_tokens_are_no_sums() -> None:
    with torch.no_grad():
        assert small_linear(drawn(0, 128), drawn(64, 128)).shape == (0, 64)
        assert small_linear(drawn(2, 3, 128), drawn(64, 128)).shape == (2, 3, 64)


@needs_kernel
def test_a_matrix_is_small_below_what_is_packed_and_in_whole_vectors() -> None:
    assert is_small(drawn(768, 128))
    for weight in (drawn(1024, 128), drawn(66, 128), drawn(64, 12), drawn(64), drawn(64, 128).bfloat16(), drawn(0, 16)):
        assert not is_small(weight)


def test_without_a_compiler_no_matrix_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_library", lambda: None)
    assert not is_small(drawn(768, 128))
