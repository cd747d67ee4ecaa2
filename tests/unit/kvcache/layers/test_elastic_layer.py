"""Elastic layers against stock ones, operation by operation, while the KV limit moves under them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from elastic import CapacityError, ConfigError, StateError
from elastic.kvcache.layers import elastic_layer
from elastic.kvcache.layers.elastic_layer import ElasticLayer
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.layer_store import StoreState
from elastic.kvcache.storage.layout import HEAD_MAJOR, LAYOUTS, KVLayout
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.transfer import KVTransfer
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.copy_engine import ThreadCopyEngine
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from support.faulty_backend import CALLS, FaultyBackend
from support.wrapped_model import pickled

PAGE = 4096
HEADS, DIM_K, DIM_V, WINDOW = 2, 64, 48, 12
copier = ThreadCopyEngine()


def new_memory(layout: KVLayout = HEAD_MAJOR, pages: int = 2000, max_tokens: int = 64) -> tuple[KVMemory, KVPool]:
    pool = PagePool("cpu#test", FaultyBackend(MemfdBackend(PAGE)), pages * PAGE, ready_pages=0)
    kv = KVPool(pool, pages * PAGE, ready_share=0)
    return KVMemory([(kv, layout)], max_tokens), kv


def states(batch: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, HEADS, tokens, DIM_K, generator=generator),
        torch.randn(batch, HEADS, tokens, DIM_V, generator=generator),
    )


class LayerMachine(RuleBasedStateMachine):
    """One elastic layer and its stock twin, while it moves between two places with pages of different sizes."""

    sliding = False

    @initialize(layouts=st.tuples(*[st.sampled_from(list(LAYOUTS.values()))] * 2))
    def begin(self, layouts: tuple[KVLayout, KVLayout]) -> None:
        pools = [
            PagePool(f"cpu#{n}", FaultyBackend(MemfdBackend(n * PAGE)), 2000 * PAGE, ready_pages=0) for n in (1, 2)
        ]
        self.pools = [KVPool(pool, 2000 * PAGE, ready_share=0) for pool in pools]
        self.kv = self.pools[0]
        self.memory = KVMemory(list(zip(self.pools, layouts, strict=True)), 40, [self.kv])
        self.parcel: KVTransfer | None = None
        self.seed = 0
        self.twin: Any
        self.layer: ElasticLayer
        if self.sliding:
            self.layer = ElasticLayer(self.memory, 0, sliding_window=WINDOW, record_past=True)
        else:
            self.layer = ElasticLayer(self.memory, 0)
        self.twin = self.new_twin()
        self.batch = 2
        self.recent = 0

    def new_twin(self) -> Any:
        if not self.sliding:
            return DynamicLayer()
        twin = DynamicSlidingWindowLayer(WINDOW)
        twin.activate_past_recording()
        return twin

    @rule(tokens=st.integers(1, 23))
    def append(self, tokens: int) -> None:
        self.seed += 1
        keys, values = states(self.batch, tokens, self.seed)
        visible, _ = self.layer.get_mask_sizes(tokens)
        assert self.layer.get_mask_sizes(tokens) == self.twin.get_mask_sizes(tokens)
        ours, theirs = self.layer.update(keys, values), self.twin.update(keys, values)
        for our, their in zip(ours, theirs, strict=True):
            assert torch.equal(our, their[:, :, -visible:])  # older transformers give more than the mask is told of
        self.recent += tokens

    @rule(call=st.sampled_from(CALLS), tokens=st.integers(20, 40), half_way=st.booleans())
    def append_with_a_fault(self, call: str, tokens: int, half_way: bool) -> None:
        backend: Any = self.kv.pool.backend
        backend.fail(call, half_way=half_way)
        length = self.layer.get_seq_length()
        keys, values = states(self.batch, tokens, seed=99)
        try:
            self.layer.update(keys, values)
        except CapacityError:
            assert self.layer.get_seq_length() == length
        else:
            self.twin.update(keys, values)
        backend.disarm()

    @rule(tokens=st.integers(0, 5))
    def crop(self, tokens: int) -> None:
        # A sliding layer forgets at a crop what a further one would need, unless new tokens come between.
        if self.layer.get_seq_length() > tokens and (tokens <= self.recent or not self.sliding):
            self.layer.crop(-tokens)
            self.twin.crop(-tokens)
            self.recent = 0

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        self.layer.reorder_cache(torch.tensor(rows))
        self.twin.reorder_cache(torch.tensor(rows))

    @precondition(lambda self: self.batch <= 3)
    @rule()
    def repeat(self) -> None:
        if self.layer.get_seq_length():
            self.layer.batch_repeat_interleave(2)
            self.twin.batch_repeat_interleave(2)
            self.batch *= 2

    @precondition(lambda self: self.batch >= 2)
    @rule()
    def select(self) -> None:
        if self.layer.get_seq_length():
            self.layer.batch_select_indices(torch.tensor([1, 0]))
            self.twin.batch_select_indices(torch.tensor([1, 0]))
            self.batch = 2

    @rule(batch=st.integers(1, 3))
    def reset(self, batch: int) -> None:
        self.layer.reset()
        self.twin = self.new_twin()
        self.batch = batch

    @precondition(lambda self: self.parcel is None)
    @rule()
    def send(self) -> None:
        self.there = self.pools[self.memory.homes[0] is self.pools[0]]
        self.parcel = KVTransfer(self.memory, self.there)
        self.catch_up(None)

    @precondition(lambda self: self.parcel is not None)
    @rule(tokens=st.none() | st.integers(1, 9))
    def catch_up(self, tokens: int | None) -> None:
        """All at once, or so many tokens at a time."""
        assert self.parcel is not None
        pace = RateLimiter(None if tokens is None else 1e12)
        pace.CHUNK = (tokens or 0) * self.batch * HEADS * (DIM_K + DIM_V) * 4
        self.parcel.sync(self.layer, lambda source: copier, pace)

    @precondition(lambda self: self.parcel is not None)
    @rule(undo=st.booleans(), crop=st.booleans())
    def arrive(self, undo: bool, crop: bool) -> None:
        """Or arrive and go back, with a crop between the two."""
        assert self.parcel is not None
        here, self.memory.homes[0] = self.memory.homes[0], self.there
        self.parcel.cut_over(self.layer)
        assert self.layer.held() is None or self.layer.is_on(self.there)
        if undo:
            self.memory.homes[0] = here
            if crop:
                self.crop(1)
            self.parcel.revert(self.layer)
            assert not self.layer.is_on(self.there)
        else:
            assert self.parcel.finish() == 0
        self.parcel = None
        if not undo:
            assert here.status().used_bytes == 0

    @precondition(lambda self: self.parcel is not None)
    @rule()
    def call_off(self) -> None:
        assert self.parcel is not None
        self.parcel.revert(self.layer)
        self.parcel = None

    @precondition(lambda self: self.parcel is None)
    @rule()
    def go_on_with_a_copy(self) -> None:
        self.layer = copy.deepcopy(self.layer)
        self.twin = copy.deepcopy(self.twin)

    @rule()
    def wait_in_host_memory(self) -> None:
        copied = self.layer.copy_to_host()
        if copied is not None:
            assert self.layer.move_to_host(copied)
            assert self.layer.pages == 0

    @rule(pages=st.integers(0, 300))
    def resize(self, pages: int) -> None:
        used = self.kv.status().used_bytes
        result = self.kv.resize(pages * PAGE)
        # What was not needed is gone, so a deferred shrink could not have been applied.
        assert (result.status == "deferred") == (result.used_bytes > pages * PAGE)
        assert result.used_bytes <= used
        if result.status == "deferred":
            assert all(store.spare() == 0 for store in self.kv.usage.stores_in(StoreState.LIVE))
        self.kv.resize(self.kv.limits.maximum * PAGE)

    @invariant()
    def same_contents(self) -> None:
        if not hasattr(self, "layer"):
            return
        length = self.twin.get_seq_length()
        assert self.layer.get_seq_length() == length
        if length:
            visible = min(length, WINDOW - 1) if self.sliding else length
            assert torch.equal(self.layer.keys[:, :, -visible:], self.twin.keys[:, :, -visible:])  # type: ignore[index]
            assert torch.equal(self.layer.values[:, :, -visible:], self.twin.values[:, :, -visible:])  # type: ignore[index]
        for pool in self.pools:
            pool.check()

    def teardown(self) -> None:
        if hasattr(self, "layer"):
            del self.layer
            for kv in self.pools:
                assert kv.status().used_bytes == 0
                kv.close()
                kv.pool.close()
                assert kv.pool.backend.created == 0


class SlidingMachine(LayerMachine):
    sliding = True


_settings = settings(max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestFullLayer = LayerMachine.TestCase
TestFullLayer.settings = _settings
TestSlidingLayer = SlidingMachine.TestCase
TestSlidingLayer.settings = _settings


@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_a_long_slide_holds_only_its_window(layout: KVLayout) -> None:
    memory, kv = new_memory(layout, max_tokens=32)
    layer, twin = ElasticLayer(memory, sliding_window=WINDOW), DynamicSlidingWindowLayer(WINDOW)
    most = 0
    for step in range(400):
        ours, theirs = layer.update(*states(1, 1, step)), twin.update(*states(1, 1, step))
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        del ours
        most = max(most, kv.status().used_bytes)
        kv.check()
    rows = {"head_major": HEADS, "batch_major": 1, "token_major": 1}[layout.name]
    held = WINDOW * HEADS * (DIM_K + DIM_V) * 4
    assert most <= held + 2 * rows * 2 * PAGE
    with pytest.raises(StateError, match="activate_past_recording"):
        layer.crop(-1)


def test_what_a_crop_gave_up_is_not_there_for_the_next_one() -> None:
    memory, kv = new_memory()
    layer = ElasticLayer(memory, sliding_window=WINDOW, record_past=True)
    layer.update(*states(1, 20))
    layer.crop(-3)
    held = layer.keys.clone()  # type: ignore[union-attr]
    with pytest.raises(StateError, match=r"crop\(-1\): what is held begins at token 6 of 17, .*in one crop"):
        layer.crop(-1)
    assert torch.equal(layer.keys, held)  # type: ignore[arg-type]
    layer.crop(0)
    layer.update(*states(1, 2))
    layer.crop(-2)
    assert layer.get_seq_length() == 17
    assert torch.equal(layer.keys, held)  # type: ignore[arg-type]
    kv.check()


def test_a_window_that_slides_on_while_it_is_copied_elsewhere_is_copied_as_far_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward pass may give pages back between the look at what is held and the views of it."""
    pools = [KVPool(PagePool(f"cpu#{n}", MemfdBackend(PAGE), 200 * PAGE), 200 * PAGE) for n in (1, 2)]
    memory = KVMemory([(pool, HEAD_MAJOR) for pool in pools], 256, pools[:1])
    layer = ElasticLayer(memory, 0, sliding_window=WINDOW)
    layer.update(*states(1, 20))
    seen_before = layer.held()
    for step in range(60):
        layer.update(*states(1, 1, step))
    with monkeypatch.context() as patch:
        patch.setattr(layer, "held", lambda: seen_before)
        transfer = KVTransfer(memory, pools[1])
        transfer.sync(layer, lambda source: copier, RateLimiter())
    assert transfer.moved_bytes == 0
    before = layer.keys.clone()  # type: ignore[union-attr]
    transfer.cut_over(layer)
    assert layer.is_on(pools[1])
    assert torch.equal(layer.keys, before)  # type: ignore[arg-type]


def test_a_cache_that_is_given_up_while_it_is_copied_to_the_host_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, kv = new_memory()
    layer = ElasticLayer(memory)
    keys, _ = layer.update(*states(1, 20))
    expected = keys.clone()
    del keys

    @contextmanager
    def given_up_meanwhile(stream: object) -> Iterator[None]:
        layer.give_up()
        yield

    monkeypatch.setattr(elastic_layer, "on_stream", given_up_meanwhile)
    copied = layer.copy_to_host()
    assert copied is not None
    assert torch.equal(copied.keys, expected)
    assert not layer.move_to_host(copied)
    kv.check()


@pytest.mark.parametrize("asked", [lambda layer, kv: layer.is_on(kv), lambda layer, kv: layer.pages > 0])
def test_a_lease_may_end_in_another_thread_once_it_was_looked_at(asked: Callable[[Any, KVPool], bool]) -> None:
    class LookedAtOnce(ElasticLayer):
        @property
        def _lease(self) -> Any:  # type: ignore[override]
            return self.__dict__.pop("_lease", None)

    memory, kv = new_memory()
    layer: Any = ElasticLayer(memory)
    layer.update(*states(1, 20))
    layer.__class__ = LookedAtOnce
    assert asked(layer, kv)
    assert not asked(layer, kv)


def test_nothing_is_copied_on_growth() -> None:
    memory, _ = new_memory(max_tokens=4096)
    layer = ElasticLayer(memory)
    first, _ = layer.update(*states(1, 5))
    address = first.data_ptr()
    grown, _ = layer.update(*states(1, 900))
    assert grown.data_ptr() == address
    assert torch.equal(first, states(1, 5)[0])


def test_peak_memory_is_the_tokens_and_a_page_for_each_row() -> None:
    memory, kv = new_memory(max_tokens=4096)
    layer = ElasticLayer(memory)
    for _ in range(100):
        layer.update(*states(2, 7))
        tokens = 2 * HEADS * (DIM_K + DIM_V) * 4 * layer.get_seq_length()
        assert kv.pool.backend.created * PAGE <= 1.05 * tokens + 4 * 2 * PAGE


def test_stock_layers_come_out_of_pickle() -> None:
    memory, _ = new_memory()
    for layer in (ElasticLayer(memory), ElasticLayer(memory, sliding_window=WINDOW)):
        layer.update(*states(1, 20))
        loaded = pickled(layer)
        assert type(loaded) in (DynamicLayer, DynamicSlidingWindowLayer)
        assert loaded.get_seq_length() == 20
        assert torch.equal(loaded.keys, layer.keys[:, :, -loaded.keys.shape[2] :])  # type: ignore[index]


def test_what_does_not_continue_the_cache_is_refused_in_words() -> None:
    memory, _ = new_memory()
    layer = ElasticLayer(memory)
    layer.update(*states(2, 5))
    with pytest.raises(ConfigError, match="belongs to one batch"):
        layer.update(*states(1, 5))
    with pytest.raises(ConfigError, match="differ in batch"):
        layer.update(states(2, 5)[0], states(2, 4)[1])
    with pytest.raises(ConfigError, match="negative"):
        layer.crop(3)
    with pytest.raises(StateError, match="differentiated"):
        layer.update(*(t.requires_grad_() for t in states(2, 1)))
    with pytest.raises(StateError, match="offload"):
        layer.offload()
    assert layer.get_seq_length() == 5
    layer.reset()
    layer.update(*states(1, 5))
    assert layer.keys.shape == (1, HEADS, 5, DIM_K)  # type: ignore[union-attr]


def test_layers_made_under_inference_mode_work_outside() -> None:
    memory, _ = new_memory()
    layer = ElasticLayer(memory)
    with torch.inference_mode():
        layer.update(*states(1, 5))
    keys, _ = layer.update(*states(1, 5))
    assert keys.shape[2] == 10


def test_a_failed_change_of_batch_leaves_an_empty_layer_that_can_go_on() -> None:
    memory, kv = new_memory()
    layer = ElasticLayer(memory)
    layer.update(*states(1, 3))
    layer.reset()
    backend: Any = kv.pool.backend
    backend.fail("reserve")
    with pytest.raises(CapacityError, match="reserve"):
        layer.update(*states(2, 3))
    assert not layer.is_initialized
    layer.update(*states(1, 3))
    assert kv.resize(0).status == "deferred"
    assert torch.equal(layer.keys, states(1, 3)[0])  # type: ignore[arg-type]
    kv.check()
