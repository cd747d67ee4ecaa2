"""Operators on elements, as instructions: to the bit what torch computes, for any shapes, strides and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engines.executor.kernels.elementwise import ElementwiseProgram, elementwise_library, translate

aten = torch.ops.aten
LIBRARY = elementwise_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no C++ compiler")
BINARY = {aten.add.out: torch.add, aten.sub.out: torch.sub, aten.mul.out: torch.mul, aten.div.out: torch.div}
IN_PLACE = {aten.add_.Tensor: torch.add, aten.sub_.Tensor: torch.sub, aten.mul_.Tensor: torch.mul}
DTYPES = [torch.float32, torch.bfloat16]
SHAPES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "whole": (lambda x: x, (2, 3, 4, 40)),
    "heads": (lambda x: x.transpose(1, 2), (2, 4, 3, 40)),
    "half": (lambda x: x[..., 40:], (2, 3, 4, 80)),
    "a row's number": (lambda x: x, (2, 3, 4, 1)),
    "one for all rows": (lambda x: x, (40,)),
    "of a sequence": (lambda x: x[:, None], (2, 4, 40)),
    "of a token": (lambda x: x.transpose(1, 2), (2, 1, 3, 40)),
}
special = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, 2**-126])


def tensor(shape: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that can be expanded to [2, 3, 4, 40], with numbers of all sizes, and what is none."""
    view, size = SHAPES[shape]
    numbers = torch.randn(size) * 10.0 ** torch.randint(-6, 6, size)
    chosen = torch.rand(size) < 0.05
    return view(torch.where(chosen, special[torch.randint(len(special), size)], numbers).to(dtype))


def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[torch.Tensor, ...] = ()) -> bool:
    instructions = translate(function, args, kwargs, results)
    if instructions is None:
        return False
    assert LIBRARY is not None
    ElementwiseProgram(LIBRARY, instructions, [])()
    return True


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bits are equal; which NaN it is, is nobody's promise."""
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[expected.dtype]
    either = found.isnan() & expected.isnan()
    return found.dtype is expected.dtype and bool((either | (found.view(bits) == expected.view(bits))).all())


@settings(max_examples=300, deadline=None)
@given(
    function=st.sampled_from(list(BINARY)),
    left=st.sampled_from(sorted(SHAPES)),
    right=st.one_of(st.sampled_from(sorted(SHAPES)), st.sampled_from([2, 0.1, -1e-6, 3e38, 1])),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    out=st.sampled_from(["whole", "heads"]),
    seed=st.integers(0, 999),
)
def test_two_operands(
    function: Any, left: str, right: Any, dtypes: tuple[torch.dtype, torch.dtype], out: str, seed: int
) -> None:
    torch.manual_seed(seed)
    operands = tensor(left, dtypes[0]), tensor(right, dtypes[1]) if isinstance(right, str) else right
    full = torch.zeros(2, 3, 4, 40)
    expected = BINARY[function](operands[0].expand_as(full), operands[1])
    result = SHAPES[out][0](torch.empty(SHAPES[out][1], dtype=expected.dtype))
    rounded_first = dtypes[0] is torch.bfloat16 and not isinstance(right, str)
    assert run(function, operands, {"out": result}) != rounded_first
    assert rounded_first or same(result, expected)


@settings(max_examples=60, deadline=None)
@given(
    function=st.sampled_from(list(IN_PLACE)),
    right=st.one_of(st.sampled_from(sorted(SHAPES)), st.just(0.3)),
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from(["whole", "heads", "half"]),
)
def test_in_place(function: Any, right: Any, dtype: torch.dtype, shape: str) -> None:
    own = tensor(shape, dtype)
    operand = tensor(right, dtype) if isinstance(right, str) else right
    expected = IN_PLACE[function](own, operand)
    rounded_first = dtype is torch.bfloat16 and not isinstance(right, str)
    assert run(function, (own, operand), {}) != rounded_first
    assert rounded_first or same(own, expected)


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(sorted(SHAPES)), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 999))
def test_one_operand(shape: str, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x = tensor(shape, dtype)
    for function, args, expected in (
        (aten.neg.out, (x,), -x),
        (aten.rsqrt.out, (x,), x.rsqrt()),
        (aten.pow.Tensor_Scalar_out, (x, 2), x.pow(2)),
    ):
        result = torch.empty_strided(x.shape, x.stride(), dtype=dtype)
        rounded_between = dtype is torch.bfloat16 and function is aten.rsqrt.out
        assert run(function, args, {"out": result}) != rounded_between
        assert rounded_between or same(result, expected), function


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 999),
)
def test_copies(shape: str, dtypes: tuple[torch.dtype, torch.dtype], seed: int) -> None:
    torch.manual_seed(seed)
    x, result = tensor(shape, dtypes[0]), torch.empty(2, 3, 4, 40, dtype=dtypes[1])
    assert run(aten.copy_.default, (result, x), {})
    assert same(result, x.to(dtypes[1]).expand(2, 3, 4, 40))
    whole = tensor("whole", dtypes[0])
    assert run(aten._to_copy.default, (whole,), {"dtype": dtypes[1]}, (result,))
    assert same(result, whole.to(dtypes[1]))


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.sampled_from(["whole", "heads", "half"]), min_size=1, max_size=3),
    dim=st.integers(-4, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_tensors_that_are_joined(shapes: list[str], dim: int, dtype: torch.dtype) -> None:
    parts = [tensor(shape, dtype) for shape in shapes]
    expected = torch.cat(parts, dim)
    result = torch.empty_like(expected, memory_format=torch.contiguous_format)
    assert run(aten.cat.out, (parts, dim), {"out": result})
    assert same(result, expected)


def test_many_elements_are_shared_by_threads() -> None:
    x, y = torch.randn(300, 500), torch.randn(500)
    result = torch.empty_like(x)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert run(aten.mul.out, (x, y), {"out": result})
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result, x * y)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (aten.add.out, (torch.ones(4), torch.ones(4)), {"alpha": 2, "out": torch.empty(4)}),
        (aten.add.out, (torch.ones(4).double(), 1.0), {"out": torch.empty(4).double()}),
        (aten.add.out, (torch.ones(4).bfloat16(), torch.ones(())), {"out": torch.empty(4).bfloat16()}),
        (aten.mul.out, (torch.ones(4), 1j), {"out": torch.empty(4)}),
        (aten.neg.out, (torch.ones(4, 2).T,), {"out": torch.empty(2, 4)}),
        (aten.pow.Tensor_Scalar_out, (torch.ones(4), 3), {"out": torch.empty(4)}),
        (aten.copy_.default, (torch.ones(4), torch.ones(4).long()), {}),
        (aten._to_copy.default, (torch.ones(4),), {"dtype": torch.float32, "device": "meta"}),
        (aten.cat.out, ([torch.ones(2), torch.ones(2).long()],), {"out": torch.empty(4)}),
        (aten.silu.out, (torch.ones(4),), {"out": torch.empty(4)}),
        (aten.mean.out, (torch.ones(4, 4), [-1]), {"out": torch.empty(4)}),
        (sum, (), {}),
    ],
)
def test_what_is_not_torchs_to_the_bit_is_left_to_torch(function: Any, args: Any, kwargs: Any) -> None:
    results = (torch.empty(4),) if function is aten._to_copy.default else ()
    assert translate(function, args, kwargs, results) is None
