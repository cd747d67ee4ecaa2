"""Products with a matrix whose inputs lie outermost: how far off they may be, and when they are torch's."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import elastic
from elastic.compiler import CompileError, load_compiled
from elastic.engines.executor.graphs.graph_memory import GraphMemory
from elastic.engines.executor.graphs.operator_graph import OperatorGraph
from elastic.hooks.forward_override import dispatches
from elastic.weights.shards import transposed_linear as module
from elastic.weights.shards.transposed_linear import MOST_TOKENS, SOURCE, transposed_linear
from support.weights.sharded import SHARDS, place, wide
from support.wrapped_model import layers


def has_kernel() -> bool:
    try:
        return bool(load_compiled(SOURCE).is_supported())
    except CompileError:
        return False


needs_kernel = pytest.mark.skipif(not has_kernel(), reason="there is no C++ compiler, or its processor lacks AVX2")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each product by the kernel."""
    tokens: list[int] = []
    kernel = module.transposed_matmul

    def noted(x: torch.Tensor, *rest: Any) -> None:
        tokens.append(len(x))
        kernel(x, *rest)

    monkeypatch.setattr(module, "transposed_matmul", noted)
    return tokens


def lying(inputs: int, outputs: int, beside: int = 0) -> torch.Tensor:
    """A matrix, [outputs, inputs], whose inputs lie outermost; NaN beside it, before and behind."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    around = torch.full((inputs + 2, outputs + beside), torch.nan, dtype=torch.bfloat16)
    around[1:-1, :outputs] = torch.randn(inputs, outputs, generator=generator)
    return around[1:-1, :outputs].T


@needs_kernel
@given(
    st.integers(1, 70),
    st.integers(1, 40).map(lambda n: 32 * n),
    st.integers(1, MOST_TOKENS),
    st.sampled_from([0, 7, 64]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_error_is_that_of_sums_in_float32_rounded_once(
    inputs: int, outputs: int, tokens: int, beside: int, has_bias: bool
) -> None:
    weight = lying(inputs, outputs, beside)
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).bfloat16() if has_bias else None
    with torch.no_grad():
        y = transposed_linear(x, weight, bias).double()
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = F.linear(x.double().abs(), weight.double().abs()) + (0 if bias is None else bias.double().abs())
    summed = (inputs + 1) * 2**-23 * terms
    assert ((y - exact).abs() <= 2**-8 * (exact.abs() + summed) + summed).all()


@needs_kernel
def test_a_token_has_the_same_bits_in_any_batch_and_with_any_threads(calls: list[int]) -> None:
    weight, x = lying(301, 32 * 37), torch.randn(MOST_TOKENS, 301).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with torch.no_grad():
            single = torch.cat([transposed_linear(row, weight) for row in x.split(1)])
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                for tokens in (2, 3, 7, 8, 15, MOST_TOKENS):
                    assert torch.equal(transposed_linear(x[-tokens:], weight), single[-tokens:])
    finally:
        torch.set_num_threads(threads)
    assert calls == MOST_TOKENS * [1] + 3 * [2, 3, 7, 8, 15, MOST_TOKENS]


@needs_kernel
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_is_no_number_spoils_its_own_token_alone(value: float) -> None:
    weight, x = lying(65, 64), torch.randn(5, 65).bfloat16()
    with torch.no_grad():
        expected = transposed_linear(x, weight)
        for at in (0, 1, 64):
            spoilt = x.clone()
            spoilt[2, at] = value
            y = transposed_linear(spoilt, weight)
            assert torch.equal(y[2].isfinite(), F.linear(spoilt, weight.contiguous())[2].isfinite())
            assert torch.equal(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@needs_kernel
def test_a_captured_product_is_of_the_activations_of_its_replay() -> None:
    weight, x, graph = lying(64, 128), torch.randn(5, 64).bfloat16(), OperatorGraph()
    with torch.no_grad():
        graph.capture(lambda: transposed_linear(x * 2, weight) + 1, GraphMemory())
        x.copy_(torch.randn(5, 64))
        assert torch.equal(graph.replay(), transposed_linear(x * 2, weight) + 1)


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.ones(2, 64), lying(64, 32).float(), None),
        (torch.ones(2, 64).bfloat16(), lying(64, 32).contiguous(), None),
        (torch.ones(2, 64).bfloat16(), lying(64, 33), None),
        (torch.ones(MOST_TOKENS + 1, 64).bfloat16(), lying(64, 32), None),
        (torch.ones(0, 64).bfloat16(), lying(64, 32), None),
        (torch.ones(2, 64).bfloat16(), lying(64, 32), torch.ones(64).bfloat16()[::2]),
    ],
    ids=["float32", "other order", "outputs", "many tokens", "no token", "bias apart"],
)
def test_any_other_product_is_torchs(
    calls: list[int], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    with torch.no_grad():
        assert torch.equal(transposed_linear(x, weight, bias), F.linear(x, weight, bias))
    assert not calls


def test_inputs_of_another_size_or_dtype_are_refused_as_torch_does(calls: list[int]) -> None:
    for x in (torch.ones(2, 63).bfloat16(), torch.ones(2, 64)):
        with torch.no_grad(), pytest.raises(RuntimeError):
            transposed_linear(x, lying(64, 32))
    assert not calls


def test_gradients_flow(calls: list[int]) -> None:
    weight = lying(64, 32).detach().requires_grad_()
    transposed_linear(torch.ones(2, 64).bfloat16(), weight).sum().backward()
    assert weight.grad is not None
    assert not calls


def test_without_a_compiler_products_are_torchs(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setattr(module, "_library", lambda: None)
    x, weight = torch.ones(2, 64).bfloat16(), lying(64, 32)
    with torch.no_grad():
        assert torch.equal(transposed_linear(x, weight), F.linear(x, weight))
    assert not calls


@needs_kernel
@torch.no_grad()
def test_a_model_in_parts_uses_it_and_its_copies_and_the_unwrapped_one_do_not(calls: list[int]) -> None:
    model, ids = wide().to(torch.bfloat16), torch.arange(1, 6)[None]
    expected = model(ids).logits
    elastic.wrap(model, places=[place()], shards=SHARDS)
    last = [layer.mlp.down_proj for layer in layers(model)]
    torch.testing.assert_close(model(ids).logits, expected, rtol=0.05, atol=0.05)
    assert calls == len(last) * [5]
    assert all(map(dispatches, last))

    saved = io.BytesIO()
    torch.save(copy.deepcopy(model), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(loaded(ids).logits, expected)
    elastic.unwrap(model)
    assert torch.equal(model(ids).logits, expected)
    assert calls == len(last) * [5]
    assert not any(map(dispatches, last))
