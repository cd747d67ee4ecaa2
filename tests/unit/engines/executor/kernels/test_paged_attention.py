"""The compiled kernel: any blocks are attended to as by plain attention, and nothing else is touched or looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engines.core.kv_state import KVFormat
from elastic.engines.executor.block_layout import LAYOUTS, BlockLayout, CacheParts, layout_of, quantize
from elastic.engines.executor.kernels.compiler import compiled_library
from elastic.engines.executor.kernels.paged_attention import SOURCE, PagedAttention, compiled_attention
from elastic.kvcache.score_terms import ScoreTerms

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(compiled_library(SOURCE, "no tests") is None, reason="there is no C++ compiler")


@dataclass
class Case:
    """Sequences in blocks of a cache in two parts, whose slots that no token is in are NaN."""

    layout: BlockLayout
    kernel: PagedAttention
    cache: torch.Tensor
    tables: torch.Tensor
    seen: torch.Tensor
    query: torch.Tensor
    """[heads, sequences, dim]"""
    keys: list[torch.Tensor]
    """Of each sequence, [kv_heads, tokens, dim], as they are kept."""
    values: list[torch.Tensor]

    @classmethod
    def make(
        cls,
        lengths: list[int],
        *,
        kv_heads: int = 2,
        each: int = 3,
        dim: int = 16,
        block: int = 4,
        order: str = "head_centric",
        kept: str = "float32",
        dtype: torch.dtype = torch.float32,
    ) -> Case:
        layout = layout_of(KVFormat(block, order, kept, kv_heads, dim, (), 2), dtype)
        kernel = compiled_attention(layout, dtype, CPU)
        assert kernel is not None
        blocks = -(-max(lengths) // block)
        part_blocks = len(lengths) * blocks
        stored = layout.stored or dtype
        cache = torch.full((2 * part_blocks * layout.block_elements,), -128, dtype=torch.int8).to(stored)
        if stored is not torch.int8:
            cache.fill_(torch.nan)
        tables = torch.randperm(part_blocks).view(len(lengths), blocks)
        case = cls(layout, kernel, cache, tables, torch.tensor(lengths), torch.empty(0), [], [])
        case.query = torch.randn(len(lengths), 2 * kv_heads * each, dim).to(dtype).transpose(0, 1)
        for row, length in enumerate(lengths):
            new = [torch.randn(2 * kv_heads, length, dim).to(dtype) for _ in range(2)]
            places = torch.arange(length)
            index = layout.write_index(tables[row, places // block], places % block, case.parts.places)
            layout.write(cache, index, *new)
            for states, of_all in zip(new, (case.keys, case.values), strict=True):
                values, scales = quantize(states) if layout.stored is not None else (states, torch.ones(()))
                of_all.append(values.double() * scales.double()[..., None])
        return case

    @property
    def parts(self) -> CacheParts:
        return self.layout.parts(torch.tensor([0, self.tables.numel()]))

    def decode(self, terms: ScoreTerms | None = None, scaling: float | None = None) -> torch.Tensor:
        return self.kernel.decode(self.query, self.cache, self.parts, self.tables, self.seen, scaling, terms)

    def expected(self, terms: ScoreTerms | None = None, scaling: float | None = None) -> torch.Tensor:
        """Return the outputs in float64, [sequences, heads, dim]."""
        outs = []
        for row, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            query = self.query[:, row].double().view(len(keys), -1, keys.shape[-1])
            scores = query @ keys.double().mT * (scaling or keys.shape[-1] ** -0.5)
            if terms is not None and terms.softcap is not None:
                scores = torch.tanh(scores / terms.softcap) * terms.softcap
            if terms is not None and terms.sinks is not None:
                scores = torch.cat([scores, terms.sinks.double().view(*scores.shape[:2], 1)], -1)
            weights = scores.softmax(-1)[..., : keys.shape[1]]
            outs.append((weights @ values.double()).flatten(0, 1))
        return torch.stack(outs)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    each=st.integers(1, 9),
    dim=st.sampled_from([8, 24, 40, 64, 72]),
    block=st.integers(1, 33),
    order=st.sampled_from(sorted(LAYOUTS)),
    kept=st.sampled_from(["float32", "int8"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    softcap=st.sampled_from([None, 0.5, 20.0]),
    sinks=st.booleans(),
    scaling=st.sampled_from([None, 0.3]),
)
def test_any_blocks_are_attended_to_as_by_plain_attention(
    lengths: list[int],
    kv_heads: int,
    each: int,
    dim: int,
    block: int,
    order: str,
    kept: str,
    dtype: torch.dtype,
    softcap: float | None,
    sinks: bool,
    scaling: float | None,
) -> None:
    """Of any shape, in either order, in 8 bits too, with caps and sinks; slots beyond the last token are not read."""
    case = Case.make(lengths, kv_heads=kv_heads, each=each, dim=dim, block=block, order=order, kept=kept, dtype=dtype)
    terms = ScoreTerms(softcap, torch.linspace(-3, 3, 2 * kv_heads * each, dtype=dtype) if sinks else None)
    out = case.decode(terms if softcap or sinks else None, scaling)
    assert out.dtype is dtype
    near = {"rtol": 2e-5, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 2**-8, "atol": 1e-4}
    torch.testing.assert_close(out.double(), case.expected(terms, scaling), **near)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kept", ["float32", "int8"])
def test_a_sequence_has_the_same_bits_in_any_batch_with_any_threads(kept: str) -> None:
    case = Case.make([70, 3, 33, 64, 1], kept=kept)
    with threads(1):
        together = case.decode()
    with threads(3):
        assert torch.equal(case.decode(), together)
    for row in range(5):
        own = case.query[:, row : row + 1].contiguous()
        alone = case.kernel.decode(
            own, case.cache, case.parts, case.tables[row : row + 1], case.seen[row : row + 1], None
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    "change",
    [
        lambda case: case.query.__setitem__((0, 0, 0), torch.nan),
        lambda case: case.query.__setitem__((0, 0, 0), torch.inf),
        lambda case: case.cache.fill_(torch.nan),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_is_not_hidden(change: Callable[[Case], object], dtype: torch.dtype) -> None:
    case = Case.make([9, 5], dtype=dtype)
    before = case.decode()
    change(case)
    after = case.decode()
    assert after[0, 0].isnan().all()
    assert not before.isnan().any()


@pytest.mark.parametrize("token", [0, 3, 8])
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_key_or_value_that_is_no_number_is_seen_by_the_heads_that_see_it(
    token: int, values: bool, dtype: torch.dtype
) -> None:
    """In any lane of a vector, in any block; a weight of NaN is not taken for one of 0."""
    case = Case.make([9, 5], dtype=dtype)
    before, heads = case.decode(), case.layout.shape.heads
    block = case.tables[0, token // 4] * heads + 1  # of the second KV head, in the first part
    slots = case.cache.view(-1, 2, 4, 16)  # [block and head, K/V, token, dim]
    slots[block, int(values), token % 4, 5] = torch.nan
    after = case.decode()
    seen = torch.zeros_like(after, dtype=torch.bool)
    seen[0, 3:6, 5 if values else slice(None)] = True
    assert torch.equal(after.isnan(), seen)
    assert torch.equal(after[~seen], before[~seen])


def test_scores_of_any_size_weigh_what_they_should() -> None:
    """Weights that underflow are 0, and one that is far above the others is all there is."""
    case = Case.make([40], kv_heads=1, each=1, dim=8)
    case.query.mul_(1000)
    torch.testing.assert_close(case.decode().double(), case.expected(), rtol=1e-4, atol=1e-5)
    low = case.decode(ScoreTerms(None, torch.full((2,), 5000.0)))
    assert torch.equal(low, torch.zeros_like(low)), "a sink takes all"
    assert math.isclose(case.decode(ScoreTerms(None, torch.full((2,), -9e9))).sum(), case.decode().sum(), rel_tol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    places=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=20, unique=True),
    heads=st.integers(1, 3),
    token_major=st.booleans(),
)
def test_new_tokens_are_written_where_the_layout_writes_them(
    order: str, dtype: torch.dtype, places: list[tuple[int, int]], heads: int, token_major: bool
) -> None:
    """Into the slots of theirs alone; whatever the strides of what the layer made are."""
    layout = layout_of(KVFormat(7, order, "float32", heads, 8, (), 2), dtype)
    kernel = compiled_attention(layout, dtype, CPU)
    assert kernel is not None
    assert kernel.writes
    parts = layout.parts(torch.tensor([0, 6]))
    blocks, slots = torch.tensor(places).T.contiguous()
    shape = (len(places), 2 * heads, 8) if token_major else (2 * heads, len(places), 8)
    new = [torch.randn(shape).to(dtype) for _ in range(2)]
    new = [states.transpose(0, 1) if token_major else states for states in new]
    expected = torch.randn(12 * layout.block_elements).to(dtype)
    cache = expected.clone()
    layout.write(expected, layout.write_index(blocks, slots, parts.places), *new)
    kernel.write(cache, parts, blocks, slots, *new)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("dtype", "dim", "device"),
    [(torch.float16, 64, "cpu"), (torch.float64, 64, "cpu"), (torch.float32, 12, "cpu"), (torch.float32, 64, "meta")],
)
def test_of_what_it_does_not_compute_there_is_no_kernel(dtype: torch.dtype, dim: int, device: str) -> None:
    layout = layout_of(KVFormat(4, "head_centric", "float32", 2, dim, (), 1), dtype)
    assert compiled_attention(layout, dtype, torch.device(device)) is None
