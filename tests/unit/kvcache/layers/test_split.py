"""A cache layer split by rows is one layer to others: random operations beside a stock one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from elastic.errors import ConfigError
from elastic.kvcache.layers.elastic_layer import ElasticLayer
from elastic.kvcache.layers.split import RowSplitLayer
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.layout import LAYOUTS
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.places import close_place, open_place
from support.wrapped_model import small

HEADS, DIM, WINDOW = 2, 8, 6


class Places:
    """Three places and the cache memory over them; the first is home."""

    def __init__(self) -> None:
        self.open = [open_place(small(4 << 20, f"cpu#split-{name}")) for name in "abc"]
        self.pools = [KVPool(pool, 4 << 20) for pool in self.open]
        layout = LAYOUTS["head_major"]
        self.memory = KVMemory([(pool, layout) for pool in self.pools], 64, self.pools[:1])

    def close(self) -> None:
        self.memory.let_go()
        for kv_pool, pool in zip(self.pools, self.open, strict=True):
            kv_pool.close()
            close_place(pool)


class SplitMachine(RuleBasedStateMachine):
    @initialize(sliding=st.booleans(), batch=st.integers(1, 5))
    def begin(self, sliding: bool, batch: int) -> None:
        self.places = Places()
        self.sliding, self.batch, self.fed = sliding, batch, 0
        whole = ElasticLayer(self.places.memory, 0, sliding_window=WINDOW if sliding else None)
        self.layer: Any = RowSplitLayer(whole)
        self.stock: Any = DynamicSlidingWindowLayer(WINDOW) if sliding else DynamicLayer()

    def teardown(self) -> None:
        if hasattr(self, "places"):
            del self.layer
            self.places.close()

    @rule(new=st.integers(1, 9))
    def update(self, new: int) -> None:
        self.fed += 1
        generator = torch.Generator().manual_seed(self.fed)
        keys, values = torch.randn(2, self.batch, HEADS, new, DIM, generator=generator)
        ours, theirs = self.layer.update(keys, values), self.stock.update(keys, values)
        tokens = theirs[0].shape[2]  # the stock window may show tokens that nobody attends to
        assert all(torch.equal(a[:, :, -tokens:], b[:, :, -a.shape[2] :]) for a, b in zip(ours, theirs, strict=True))

    @rule(data=st.data())
    def split(self, data: Any) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, self.batch), min_size=2, max_size=2)))
        rows = [b - a for a, b in zip([0, *cuts], [*cuts, self.batch], strict=True)]
        pools = [None, *self.places.pools[1:]]
        self.layer.resplit(list(zip(pools, rows, strict=True)))
        held = [(part.layer.fixed_pool, part.rows) for part in self.layer.parts]
        assert held == [(pool, count) for pool, count in zip(pools, rows, strict=True) if count]

    @precondition(lambda self: self.stock.get_seq_length())
    @rule(data=st.data())
    def part_update(self, data: Any) -> None:
        """Each part is given its rows, as in a run."""
        self.fed += 1
        generator = torch.Generator().manual_seed(self.fed)
        keys, values = torch.randn(2, self.batch, HEADS, 1, DIM, generator=generator)
        start = 0
        for part in self.layer.parts:
            part.layer.update(keys[start : start + part.rows], values[start : start + part.rows])
            start += part.rows
        self.stock.update(keys, values)

    @precondition(lambda self: self.stock.get_seq_length())
    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        rows = torch.tensor(
            data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        )
        self.layer.reorder_cache(rows)
        self.stock.reorder_cache(rows)

    @precondition(lambda self: self.stock.get_seq_length())
    @rule(data=st.data())
    def select(self, data: Any) -> None:
        rows = torch.tensor(data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=6)))
        self.layer.batch_select_indices(rows)
        self.stock.batch_select_indices(rows)
        self.batch = len(rows)

    @precondition(lambda self: self.stock.get_seq_length() and self.batch <= 4)
    @rule()
    def repeat(self) -> None:
        self.layer.batch_repeat_interleave(2)
        self.stock.batch_repeat_interleave(2)
        self.batch *= 2

    @precondition(lambda self: not self.sliding and self.stock.get_seq_length())
    @rule(data=st.data())
    def crop(self, data: Any) -> None:
        count = data.draw(st.integers(0, self.stock.get_seq_length() - 1))
        self.layer.crop(-count)
        self.stock.crop(-count)

    @precondition(lambda self: self.stock.get_seq_length())
    @rule()
    def go_on_with_a_copy(self) -> None:
        shape, self.layer = self.layer.shape, copy.deepcopy(self.layer)
        assert self.layer.shape == shape

    @rule(batch=st.integers(1, 5))
    def begin_again(self, batch: int) -> None:
        self.layer.reset()
        self.stock = DynamicSlidingWindowLayer(WINDOW) if self.sliding else DynamicLayer()
        self.batch = batch

    @precondition(lambda self: self.stock.get_seq_length())
    @rule()
    def a_batch_of_another_size_is_refused(self) -> None:
        tokens = self.layer.get_seq_length()
        with pytest.raises(ConfigError, match="a cache belongs to one batch"):
            self.layer.update(*torch.zeros(2, self.batch + 1, HEADS, 1, DIM))
        assert self.layer.get_seq_length() == tokens

    @invariant()
    def they_hold_the_same(self) -> None:
        if not hasattr(self, "places"):
            return
        assert self.layer.get_seq_length() == self.stock.get_seq_length()
        assert self.layer.get_mask_sizes(1) == self.stock.get_mask_sizes(1)
        if self.stock.get_seq_length():
            assert_same(self.layer, self.stock)
            assert_same(pickle.loads(pickle.dumps(self.layer)), self.stock)
            assert sum(part.rows for part in self.layer.parts) == self.batch
        for pool in self.places.pools:
            pool.check()


def assert_same(ours: Any, theirs: Any) -> None:
    tokens = min(ours.keys.shape[2], theirs.keys.shape[2])
    assert tokens >= min(theirs.get_seq_length(), WINDOW - 1)
    assert torch.equal(ours.keys[:, :, -tokens:], theirs.keys[:, :, -tokens:])
    assert torch.equal(ours.values[:, :, -tokens:], theirs.values[:, :, -tokens:])


TestSplit = SplitMachine.TestCase
TestSplit.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_what_is_no_longer_held_goes_back() -> None:
    places = Places()
    layer = RowSplitLayer(ElasticLayer(places.memory, 0))
    layer.update(*torch.randn(2, 4, HEADS, 5, DIM))
    used = [pool.status().used_bytes for pool in places.pools]
    layer.resplit([(None, 1), (places.pools[1], 2), (places.pools[2], 1)])
    shared = [pool.status().used_bytes for pool in places.pools]
    assert shared[0] < used[0]
    assert all(shared)
    layer.resplit([(None, 4)])
    assert [pool.status().used_bytes for pool in places.pools] == used
    assert [part.layer.fixed_pool for part in layer.parts] == [None]
    del layer
    places.close()


def test_past_is_recorded_in_all_parts_until_it_is_not() -> None:
    places = Places()
    layer: Any = RowSplitLayer(ElasticLayer(places.memory, 0, sliding_window=WINDOW))
    tokens = torch.randn(2, 4, HEADS, 2 * WINDOW, DIM)
    layer.update(*tokens)
    layer.resplit([(None, 1), (places.pools[1], 3)])
    layer.activate_past_recording()
    layer.update(*tokens)
    assert layer.record_past
    assert [part.layer.keys.shape[2] for part in layer.parts] == [4 * WINDOW] * 2
    layer.record_past = False  # as transformers does where it finds out late that an answer has ended
    layer.update(*tokens[:, :, :, :1])
    assert not any(part.layer.record_past for part in layer.parts)
    assert [part.layer.keys.shape[2] for part in layer.parts] == [WINDOW] * 2
    del layer
    places.close()
