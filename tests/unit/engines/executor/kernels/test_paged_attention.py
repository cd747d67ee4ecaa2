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

from elastic.compiler import compiled_library
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.executor.block_layout import LAYOUTS, BlockLayout, CacheParts, layout_of, quantize
from elastic.engines.executor.kernels.paged_attention import SOURCE, NewTokens, PagedAttention, compiled_attention
from elastic.kvcache.score_terms import ScoreTerms

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(compiled_library(SOURCE, "no tests") is None, reason="there is no C++ compiler")


@dataclass
class Case:
    """Sequences in blocks of a cache in two parts, whose slots that no token is in are NaN."""

    layout: BlockLayout
    kernel: PagedAttention
    cache: torch.Tensor
    new: NewTokens
    query: torch.Tensor
    """[heads, tokens, dim]"""
    keys: list[torch.Tensor]
    """Of each sequence, [kv_heads, tokens, dim], as they are kept."""
    values: list[torch.Tensor]

    @classmethod
    def make(
        cls,
        lengths: list[int],
        counts: list[int] | None = None,
        *,
        kv_heads: int = 2,
        each: int = 3,
        dim: int = 16,
        block: int = 4,
        order: str = "head_centric",
        kept: str = "float32",
        dtype: torch.dtype = torch.float32,
    ) -> Case:
        """`counts`: new tokens of each, of its length; None: one."""
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
        new, tokens = NewTokens(tables, torch.tensor(lengths)), len(lengths)
        if counts is not None:
            several, tokens = torch.tensor(counts), sum(counts)
            new = NewTokens(tables, new.seen, several.cumsum(0) - several, several)
        case = cls(layout, kernel, cache, new, torch.empty(0), [], [])
        case.query = torch.randn(tokens, 2 * kv_heads * each, dim).to(dtype).transpose(0, 1)
        for row, length in enumerate(lengths):
            kept_states = [torch.randn(2 * kv_heads, length, dim).to(dtype) for _ in range(2)]
            places = torch.arange(length)
            index = layout.write_index(tables[row, places // block], places % block, case.parts.places)
            layout.write(cache, index, *kept_states)
            for states, of_all in zip(kept_states, (case.keys, case.values), strict=True):
                values, scales = quantize(states) if layout.stored is not None else (states, torch.ones(()))
                of_all.append(values.double() * scales.double()[..., None])
        return case

    @property
    def parts(self) -> CacheParts:
        return self.layout.parts(torch.tensor([0, self.new.tables.numel()]))

    def attend(
        self, terms: ScoreTerms | None = None, scaling: float | None = None, new: NewTokens | None = None
    ) -> torch.Tensor:
        """Return the outputs, [tokens, heads, dim]; with `new`, of some tokens, and 7 for the others."""
        heads, tokens, dim = self.query.shape
        out = self.query.new_full((tokens, heads, dim), 7)
        self.kernel.attend(self.query, self.cache, self.parts, new or self.new, scaling, terms, out)
        return out

    def expected(self, terms: ScoreTerms | None = None, scaling: float | None = None) -> torch.Tensor:
        """Return the outputs in float64, [tokens, heads, dim]."""
        outs = []
        counts = [1] * len(self.keys) if self.new.counts is None else self.new.counts.tolist()
        queries = self.query.double().split(counts, 1)
        for query, keys, values in zip(queries, self.keys, self.values, strict=True):
            (kv_heads, length, dim), count = keys.shape, query.shape[1]
            asked = query.view(kv_heads, -1, count, dim)
            scores = asked @ keys.double().mT[:, None] * (scaling or dim**-0.5)
            if terms is not None and terms.softcap is not None:
                scores = torch.tanh(scores / terms.softcap) * terms.softcap
            scores = scores.masked_fill(torch.ones(count, length).triu(length - count + 1).bool(), -torch.inf)
            if terms is not None and terms.sinks is not None:
                sinks = terms.sinks.double().view(*scores.shape[:2], 1, 1).expand(-1, -1, count, 1)
                scores = torch.cat([scores, sinks], -1)
            weights = scores.softmax(-1)[..., :length]
            outs.append((weights @ values.double()[:, None]).flatten(0, 1).transpose(0, 1))
        return torch.cat(outs)


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 89), st.integers(1, 90)), min_size=1, max_size=4),
    alone=st.booleans(),
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
    counts: list[tuple[int, int]],
    alone: bool,
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
    """By one new token of each sequence, or several; of any shape, in either order, in 8 bits too, with caps and sinks;
    slots beyond the last token are not read."""
    lengths, several = [past + new for past, new in counts], [new for _, new in counts]
    case = Case.make(
        lengths,
        None if alone else several,
        kv_heads=kv_heads,
        each=each,
        dim=dim,
        block=block,
        order=order,
        kept=kept,
        dtype=dtype,
    )
    terms = ScoreTerms(softcap, torch.linspace(-3, 3, 2 * kv_heads * each, dtype=dtype) if sinks else None)
    out = case.attend(terms if softcap or sinks else None, scaling)
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
@pytest.mark.parametrize("each", [1, 3, 5, 40])
def test_a_token_has_the_same_bits_in_any_batch_with_any_threads(kept: str, each: int) -> None:
    """Of one of several new tokens, too: it matters not how a prompt is cut."""
    case = Case.make([70, 3, 33, 64, 1], [50, 3, 1, 20, 1], kept=kept, each=each, block=16)
    new = case.new
    assert new.first is not None
    assert new.counts is not None
    with threads(1):
        together = case.attend()
    with threads(3):
        assert torch.equal(case.attend(), together)
    for row, (first, count, seen) in enumerate(zip(new.first.tolist(), new.counts.tolist(), new.seen, strict=True)):
        for i in range(count):
            one = NewTokens(
                new.tables[row : row + 1], (seen - count + 1 + i)[None], torch.tensor([first + i]), torch.tensor([1])
            )
            alone = case.attend(new=one)
            assert torch.equal(alone[first + i], together[first + i])
            alone[first + i] = 7
            assert (alone == 7).all(), "and no other token's row is written"


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
    before = case.attend()
    change(case)
    after = case.attend()
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
    before, heads = case.attend(), case.layout.shape.heads
    block = case.new.tables[0, token // 4] * heads + 1  # of the second KV head, in the first part
    slots = case.cache.view(-1, 2, 4, 16)  # [block and head, K/V, token, dim]
    slots[block, int(values), token % 4, 5] = torch.nan
    after = case.attend()
    seen = torch.zeros_like(after, dtype=torch.bool)
    seen[0, 3:6, 5 if values else slice(None)] = True
    assert torch.equal(after.isnan(), seen)
    assert torch.equal(after[~seen], before[~seen])


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("each", [1, 3])
def test_what_is_no_number_is_not_seen_by_tokens_before_it(values: bool, each: int) -> None:
    case = Case.make([11], [9], kv_heads=1, each=each)
    before, token = case.attend(), 6  # the fifth new one, of nine
    slots = case.cache.view(-1, 2, 4, 16)
    slots[case.new.tables[0, token // 4], int(values), token % 4, 5] = torch.nan
    after = case.attend()
    assert torch.equal(after[:4], before[:4])
    assert after[4:, :each, 5].isnan().all()
    assert torch.equal(after[:, each:], before[:, each:]), "nor by other heads"


def test_scores_of_any_size_weigh_what_they_should() -> None:
    """Weights that underflow are 0, and one that is far above the others is all there is."""
    case = Case.make([40], kv_heads=1, each=1, dim=8)
    case.query.mul_(1000)
    torch.testing.assert_close(case.attend().double(), case.expected(), rtol=1e-4, atol=1e-5)
    low = case.attend(ScoreTerms(None, torch.full((2,), 5000.0)))
    assert torch.equal(low, torch.zeros_like(low)), "a sink takes all"
    assert math.isclose(case.attend(ScoreTerms(None, torch.full((2,), -9e9))).sum(), case.attend().sum(), rel_tol=1e-6)


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
