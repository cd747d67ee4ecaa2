"""Attention over a cache in parts: whoever has which, the outputs of all shards are those of plain attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engines.core.kv_state import KVFormat
from elastic.engines.core.step import ScheduledChunk
from elastic.engines.executor import attention_metadata, paged_cache
from elastic.engines.executor.attention_metadata import MetadataBuilder
from elastic.engines.executor.batch_runner import BatchRunner
from elastic.engines.executor.block_layout import LAYOUTS, BlockLayout, BlockShape
from elastic.engines.executor.input_batch import BatchBlockTable, BatchTokens
from elastic.engines.executor.layer_groups import LayerGroup, block_groups
from elastic.errors import ConfigError, StateError
from elastic.kvcache.score_terms import ScoreTerms
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.sector_space import GroupRanges
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.page_pool import PagePool
from elastic.planning.sharding.heads import heads_of, kv_parts, kv_shards
from elastic.planning.sharding.numbers import of_layers

PAGE, BLOCK, DIM, WINDOW = 4096, 4, 8, 7
GROUPS = (LayerGroup((0, 2), None), LayerGroup((1,), WINDOW))
MODEL = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
Shards = tuple[int, ...]
Kept = Callable[[torch.Tensor], torch.Tensor]
"""What is left of keys or values, [heads, tokens, dim], in a cache."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Rank:
    """A runner, over a memory that has the parts of every layer which some shards need."""

    def __init__(
        self,
        stack: ExitStack,
        layout: str,
        kv_heads: int,
        of: int,
        shards: Shards | None = None,
        *,
        dtype: str = "float32",
        dim: int = DIM,
        compiled: bool = True,
    ) -> None:
        """`compiled`: sequences that decode attend by the compiled kernel, where there is one."""
        self.parts = kv_shards(of, kv_heads)
        groups = tuple((of_layers(group.layers, self.parts), group.window) for group in GROUPS)
        form = KVFormat(BLOCK, layout, dtype, kv_heads // self.parts, dim, groups, self.parts)
        pool = PagePool("cpu#test", MemfdBackend(PAGE), 2000 * PAGE, ready_pages=0)
        kv = KVPool(pool, 2000 * PAGE, ready_share=0)
        self.memory = BlockMemory(kv, block_groups(form))
        stack.callback(pool.close)
        stack.callback(kv.close)
        stack.callback(self.memory.close)
        needed = range(self.parts) if shards is None else kv_parts(shards, of, self.parts)
        self.memory.remove_layers(n for n in range(3 * self.parts) if n % self.parts not in needed)
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr(paged_cache, "compiled_attention", lambda *of: None)
            self.runner = BatchRunner(MODEL, self.memory, form)
        stack.callback(self.runner.cache.close)
        self.shards, self.of = shards, of
        self._free: list[list[int]] = [[], []]
        self._held: dict[str, list[int]] = {}

    def chunk(self, sequence: str, start: int, count: int) -> ScheduledChunk:
        """New tokens of a sequence, with blocks for them; whose numbers are as at any other rank."""
        if sequence not in self._held:
            self.runner.add(sequence)
        held, blocks = self._held.setdefault(sequence, [0, 0]), []
        for group, kind in enumerate(GROUPS):
            needed = -(-min(start + count, kind.window or start + count) // BLOCK)
            blocks.append(tuple(self._take(group) for _ in range(needed - held[group])))
            held[group] = max(needed, held[group])
        return ScheduledChunk(sequence, start, (0,) * count, True, tuple(blocks))

    def begin(self, chunks: Sequence[tuple[str, int, int]], *, eager: bool = False) -> Any:
        return self.runner.inputs([self.chunk(*chunk) for chunk in chunks], eager=eager)["paged_cache"]

    def attend(
        self, cache: Any, layer: int, states: Sequence[torch.Tensor], terms: ScoreTerms | None = None
    ) -> torch.Tensor:
        out: torch.Tensor = cache.attend(layer, *states, None, self.shards, self.of, terms)
        return out

    def _take(self, group: int) -> int:
        free = self._free[group]
        if not free:
            size = self.memory.blocks_per_sector(group)
            sector = self.memory.allocate(group)
            free += range(sector * size, (sector + 1) * size)
        return free.pop()


class Text:
    """The queries, keys and values of a sequence in one layer, and what attention gives for them."""

    def __init__(self, query_heads: int, kv_heads: int, kept: Kept, dim: int) -> None:
        self.query = torch.empty(query_heads, 0, dim)
        self.keys = self.values = torch.empty(kv_heads, 0, dim)
        self.kept = kept

    def add(self, count: int) -> list[torch.Tensor]:
        """Return the new queries, keys and values, [heads, count, dim] each."""
        sizes = torch.tensor(10.0) ** torch.empty(count, 1).uniform_(-3.5, 0.5)  # a scale is of one token
        heads = (self.query, self.keys, self.values)
        new = [torch.randn(len(each), count, each.shape[2]) * (1 if each is self.query else sizes) for each in heads]
        both = zip((self.query, self.keys, self.values), new, strict=True)
        self.query, self.keys, self.values = (torch.cat(pair, 1) for pair in both)
        return new

    def attended(self, count: int, window: int | None, terms: ScoreTerms | None) -> torch.Tensor:
        """Return the outputs of the last tokens, [count, heads, dim]."""
        total, each = self.query.shape[1], len(self.query) // len(self.keys)
        both = (self.kept(states.double()) for states in (self.keys, self.values))
        keys, values = (states.repeat_interleave(each, 0) for states in both)
        scores = self.query[:, total - count :].double() @ keys.mT / math.sqrt(self.query.shape[2])
        ago = torch.arange(total - count, total)[:, None] - torch.arange(total)
        hidden = (ago < 0) | (ago >= (window or total))
        if terms is not None and terms.softcap is not None:
            scores = torch.tanh(scores / terms.softcap) * terms.softcap
        weights = scores.masked_fill(hidden, -math.inf).exp()
        total_weight = weights.sum(-1, keepdim=True)
        if terms is not None and terms.sinks is not None:
            total_weight += terms.sinks.double()[:, None, None].exp()
        return (weights / total_weight @ values).transpose(0, 1)


class Steps:
    """The same steps at all ranks, compared with plain attention."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        query_heads: int,
        kv_heads: int,
        kept: Kept = lambda states: states,
        dim: int = DIM,
        terms: ScoreTerms | None = None,
    ) -> None:
        self.ranks, self.query_heads, self.kv_heads, self.kept, self.dim = ranks, query_heads, kv_heads, kept, dim
        self.terms = terms
        self.texts: dict[tuple[str, int], Text] = {}
        self.lengths: dict[str, int] = {}

    def run(self, counts: dict[str, int]) -> None:
        """Compute so many more tokens of each sequence in all layers."""
        chunks = [(name, self.lengths.get(name, 0), count) for name, count in counts.items()]
        caches = [rank.begin(chunks) for rank in self.ranks]
        self.lengths |= {name: start + count for name, start, count in chunks}
        for layer, window in ((0, None), (1, WINDOW), (2, None)):
            states, expected = self._new(counts, layer, window)
            found = torch.empty_like(expected)
            for rank, cache in zip(self.ranks, caches, strict=True):
                out = rank.attend(cache, layer, states, self.terms)[0]
                if rank.shards is None:
                    found = out
                else:
                    found[:, heads_of(rank.shards, rank.of, self.query_heads)] = out.to(found.dtype)
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)

    def _new(self, counts: dict[str, int], layer: int, window: int | None) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return queries, keys and values [1, heads, new, dim] of the batch, and what is to come out [new, …]."""
        new, expected = [], []
        for name, count in counts.items():
            text = self.texts.setdefault((name, layer), Text(self.query_heads, self.kv_heads, self.kept, self.dim))
            new.append(text.add(count))
            expected.append(text.attended(count, window, self.terms))
        return [torch.cat(states, 1)[None] for states in zip(*new, strict=True)], torch.cat(expected)


SOME_STEPS = ({"x": 9}, {"x": 1, "y": 3}, {"x": 1, "y": 1}, {"z": 20, "x": 5, "y": 1}, {"x": 1, "y": 1, "z": 1})


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize(
    "split", [(None,), ((0,),), ((0,), (1,)), ((0, 1), (2, 3)), ((0, 3), (1, 2)), ((0,), (1,), (2,), (3,))]
)
def test_the_heads_of_all_shards_are_those_of_plain_attention(
    split: tuple[Shards | None, ...], kv_heads: int, layout: str, compiled: bool, stack: ExitStack
) -> None:
    torch.manual_seed(0)
    of = 4 if split == (None,) else sum(map(len, split))  # type: ignore[arg-type]
    steps = Steps([Rank(stack, layout, kv_heads, of, shards, compiled=compiled) for shards in split], 8, kv_heads)
    for counts in SOME_STEPS:
        steps.run(counts)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_behind_those_of_the_batch_are_nobodys(compiled: bool, dtype: str, stack: ExitStack) -> None:
    """Nothing of them is written or seen, and zeros come out; in prompts, parts of prompts and decode steps."""
    torch.manual_seed(0)
    ranks = [Rank(stack, "head_centric", 2, 1, compiled=compiled, dtype=dtype) for _ in range(2)]
    lengths = dict.fromkeys("xyz", 0)
    for counts in SOME_STEPS:
        plain, padded = (rank.begin([(name, lengths[name], count) for name, count in counts.items()]) for rank in ranks)
        for name, count in counts.items():
            lengths[name] += count
        total = sum(counts.values())
        for layer in range(3):
            states = [torch.randn(1, heads, total, DIM) for heads in (4, 2, 2)]
            nobodys = [
                torch.cat([each, torch.full_like(each[:, :, :1], torch.nan).expand(-1, -1, 3, -1)], 2)
                for each in states
            ]
            out = ranks[1].attend(padded, layer, nobodys)
            assert torch.equal(out[:, :total], ranks[0].attend(plain, layer, states))
            assert torch.equal(out[:, total:], torch.zeros(1, 3, 4, DIM))


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    kv_heads=st.integers(1, 6),
    each=st.integers(1, 4),
    owners=st.sampled_from([1, 2, 4]).flatmap(lambda of: st.lists(st.integers(0, 2), min_size=of, max_size=of)),
    counts=st.lists(st.dictionaries(st.sampled_from("xyz"), st.integers(1, 12), min_size=1), min_size=1, max_size=5),
    read_bytes=st.sampled_from([1, 4096, attention_metadata.MOST_READ_BYTES]),
    compiled=st.booleans(),
)
def test_any_split_of_any_heads_attends_for_each_once(
    layout: str,
    kv_heads: int,
    each: int,
    owners: list[int],
    counts: list[dict[str, int]],
    read_bytes: int,
    compiled: bool,
) -> None:
    splits = [tuple(shard for shard, owner in enumerate(owners) if owner == rank) for rank in range(3)]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(attention_metadata, "MOST_READ_BYTES", read_bytes)
        ranks = [Rank(stack, layout, kv_heads, len(owners), s, compiled=compiled) for s in splits if s]
        steps = Steps(ranks, kv_heads * each, kv_heads)
        for each_step in counts:
            steps.run(each_step)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=12),
    before=st.lists(st.integers(0, 200), min_size=12, max_size=12),
    window=st.sampled_from([None, WINDOW]),
    read_bytes=st.sampled_from([1, 20_000, attention_metadata.MOST_READ_BYTES]),
)
def test_on_a_cpu_no_more_is_read_at_once_than_the_caches_hold(
    counts: list[int], before: list[int], window: int | None, read_bytes: int
) -> None:
    """Or than one sequence has; and each token of a sequence that decodes is in one run."""
    table = BatchBlockTable(BLOCK, window)
    starts = np.array(before[: len(counts)])
    for row, (start, count) in enumerate(zip(starts.tolist(), counts, strict=True)):
        table.begin(row)
        table.extend(row, np.arange(-(-min(start + count, window or start + count) // BLOCK)))
    shape = BlockShape(BLOCK, 2, DIM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_metadata, "MOST_READ_BYTES", read_bytes)
        layout = BlockLayout(shape, "head_centric")
        builder = MetadataBuilder(layout, table, MODEL.device, torch.float32, 3)
        batch = BatchTokens(np.arange(len(counts)), starts, np.array(counts))
        runs = builder.build(batch).decodes
    for run in runs:
        sequences, _, _, slots = run.mask.shape
        assert sequences == 1 or sequences * slots // BLOCK * 3 * layout.block_elements * 4 <= read_bytes
    tokens = torch.arange(sum(counts))
    decoded = [tokens[slice(None) if run.at is None else run.at] for run in runs]
    assert [len(each) for each in decoded] == [len(run.mask) for run in runs]
    assert sorted(torch.cat(decoded).tolist() if runs else []) == batch.first[batch.counts == 1].tolist()


@settings(max_examples=40, deadline=None)
@given(
    kv_heads=st.integers(1, 4),
    each=st.integers(1, 3),
    softcap=st.sampled_from([None, 0.5, 4.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from(["float32", "int8"]),
    owners=st.sampled_from([1, 2, 4]).flatmap(lambda of: st.lists(st.integers(0, 1), min_size=of, max_size=of)),
    counts=st.lists(st.dictionaries(st.sampled_from("xyz"), st.integers(1, 12), min_size=1), min_size=1, max_size=5),
    read_bytes=st.sampled_from([1, 1024, attention_metadata.MOST_READ_BYTES]),
    compiled=st.booleans(),
)
def test_scores_are_capped_and_each_head_has_its_own_sink(
    kv_heads: int,
    each: int,
    softcap: float | None,
    sinks: bool,
    dtype: str,
    owners: list[int],
    counts: list[dict[str, int]],
    read_bytes: int,
    compiled: bool,
) -> None:
    terms = ScoreTerms(softcap, torch.linspace(-4, 4, kv_heads * each) if sinks else None)
    splits = [tuple(shard for shard, owner in enumerate(owners) if owner == rank) for rank in range(2)]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(attention_metadata, "MOST_READ_BYTES", read_bytes)
        form = {"dtype": dtype, "compiled": compiled}
        ranks = [Rank(stack, "head_centric", kv_heads, len(owners), s, **form) for s in splits if s]  # type: ignore[arg-type]
        kept = in_8_bits if dtype == "int8" else lambda states: states
        steps = Steps(ranks, kv_heads * each, kv_heads, kept, terms=terms)
        for each_step in counts:
            steps.run(each_step)


def in_8_bits(states: torch.Tensor) -> torch.Tensor:
    """Round each vector to 255 values, of which the largest is its own, in steps of a bfloat16."""
    states = states.float()
    steps = (states.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
    return (states / steps).round().clamp(-127, 127).double() * steps


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    kv_heads=st.integers(1, 4),
    each=st.integers(1, 3),
    dim=st.sampled_from([2, 6, 8, 64]),
    owners=st.sampled_from([1, 2, 4]).flatmap(lambda of: st.lists(st.integers(0, 1), min_size=of, max_size=of)),
    counts=st.lists(st.dictionaries(st.sampled_from("xyz"), st.integers(1, 12), min_size=1), min_size=1, max_size=5),
    compiled=st.booleans(),
)
def test_in_8_bits_each_vector_is_rounded_once_by_a_scale_of_its_own(
    layout: str,
    kv_heads: int,
    each: int,
    dim: int,
    owners: list[int],
    counts: list[dict[str, int]],
    compiled: bool,
) -> None:
    """Whatever the shape, however a prompt is cut, whoever has which heads; nothing else is lost."""
    splits = [tuple(shard for shard, owner in enumerate(owners) if owner == rank) for rank in range(2)]
    with ExitStack() as stack:
        form = {"dtype": "int8", "dim": dim, "compiled": compiled}
        ranks = [Rank(stack, layout, kv_heads, len(owners), s, **form) for s in splits if s]  # type: ignore[arg-type]
        steps = Steps(ranks, kv_heads * each, kv_heads, in_8_bits, dim)
        for each_step in counts:
            steps.run(each_step)


def test_a_rank_that_has_more_parts_writes_those_alone_that_its_shards_need(stack: ExitStack) -> None:
    rank = Rank(stack, "head_centric", 4, 4)
    cache = rank.begin([("x", 0, BLOCK)])
    before = [rank.memory.groups[0].view(part, torch.float32)[: 4 * PAGE].clone() for part in range(4)]
    rank.shards = (1, 2)
    states = [torch.ones(1, 4, BLOCK, DIM)] * 3
    assert rank.attend(cache, 0, states).shape == (1, BLOCK, 2, DIM)
    views = [rank.memory.groups[0].view(part, torch.float32)[: 4 * PAGE] for part in range(4)]
    changed = [not torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(before, views, strict=True)]
    assert changed == [False, True, True, False]


def test_parts_that_are_elsewhere_are_refused(stack: ExitStack) -> None:
    rank = Rank(stack, "head_centric", 2, 4, (0, 1))
    cache = rank.begin([("x", 0, 3)])
    states = [torch.ones(1, 2, 3, DIM)] * 3
    assert rank.attend(cache, 0, states).shape == (1, 3, 1, DIM)
    for shards in (None, (2,), (1, 3)):
        with pytest.raises(StateError, match=r"parts \[1\] of the KV of layer 0 are not here"):
            cache.attend(0, *states, None, shards, 4)
    with pytest.raises(ConfigError, match="of=3"):
        cache.attend(0, *states, None, (0,), 3)


def test_layers_that_stay_are_there_while_others_come(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, seen = Rank(stack, "head_centric", 2, 2, (1,)), []
    cache, view_parts = rank.runner.cache, GroupRanges.view_parts

    def looked_at(*given: Any) -> torch.Tensor:
        seen.append({layer: cached.parts for layer, cached in cache.layers.items()})
        return view_parts(*given)

    monkeypatch.setattr(GroupRanges, "view_parts", looked_at)
    rank.memory.add_layers((0, 4))
    cache.refresh()
    assert seen == [dict.fromkeys(range(3), (1,))] * 3
    assert {layer: cached.parts for layer, cached in cache.layers.items()} == {0: (0, 1), 1: (1,), 2: (0, 1)}


@pytest.mark.parametrize("shards", [(0,), (0, 1), None])
def test_a_step_that_is_prepared_does_not_see_how_tables_change(shards: Shards | None, stack: ExitStack) -> None:
    ranks, caches = [Rank(stack, "head_centric", 2, 2) for _ in range(2)], []
    for rank in ranks:
        rank.attend(rank.begin([("x", 0, 6)]), 0, [torch.ones(1, 2, 6, DIM)] * 3)
        caches.append(rank.begin([("x", 6, 3)], eager=True))
        rank.shards = shards
    ranks[1].runner.remove(["x"])
    ranks[1].begin([("y", 0, 30)])  # in the row that x had
    states = [torch.randn(1, 2, 3, DIM) for _ in range(3)]
    first, second = (rank.attend(cache, 0, states) for rank, cache in zip(ranks, caches, strict=True))
    assert torch.equal(first, second)
