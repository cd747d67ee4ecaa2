"""Admission without eviction: under any load and any change of memory, every request ends, and the books balance."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.generation.continuous_batching.requests import RequestState

from elastic import CapacityError, Overloaded
from elastic.engines.continuous.cache import ElasticPagedCache
from elastic.engines.continuous.scheduler import ElasticScheduler
from elastic.kvcache.storage.budget import WeightsShare
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.page_pool import PagePool

PAGE = 4096
PAGES = 96
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip
CONFIGS = {
    "full": LlamaConfig(**SMALL),
    "mixed": Gemma3TextConfig(**SMALL, sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
}


class Watch:
    """Counts what the scheduler tells."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.gone: list[str] = []

    def scheduled(self, request: str) -> None:
        self.started.append(request)

    def stalled(self, requests: int) -> None:
        assert requests > 0

    def cancelled(self, request: str) -> None:
        self.gone.append(request)


class Serving(RuleBasedStateMachine):
    """A scheduler and its cache, with the steps of a model that computes nothing."""

    @initialize(kind=st.sampled_from(sorted(CONFIGS)), share=st.booleans())
    def begin(self, kind: str, share: bool) -> None:
        self.pool = PagePool("cpu#test", MemfdBackend(PAGE), PAGES * PAGE, ready_pages=0)
        self.weights: list[int] = []  # pages that weights hold, by claim
        self.kv = KVPool(self.pool, PAGES * PAGE, idle_share=1.0, ready_share=0)
        self.share = WeightsShare(self.kv)
        self.cache = ElasticPagedCache(
            CONFIGS[kind],
            self.kv,
            device=torch.device("cpu"),
            dtype=torch.float32,
            block_tokens=4,
            max_batch_tokens=16,
            share_prefixes=share,
        )
        self.watch = Watch()
        self.scheduler = ElasticScheduler(self.cache, 8, self.watch)
        self.computed: dict[str, int] = {}
        self.asked: dict[str, RequestState] = {}
        self.ended: set[str] = set()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        if self.kv.limits.limit < self.kv.limits.maximum:
            self.kv.resize(self.kv.limits.maximum * PAGE)
        steps = 0
        while self.scheduler.has_pending_requests():
            assert self.step(), f"nothing goes on: {self.state_of_affairs()}"
            steps += 1
            assert steps < 5000
        assert self.ended == self.asked.keys()
        assert self.kv.status().used_bytes == 0
        self.books()
        self.cache.close()
        self.kv.trim()
        assert self.pool.free_pages + sum(self.weights) == PAGES

    def state_of_affairs(self) -> str:
        ledger = self.cache.ledger
        claims = {name: ledger.demand(name, ledger.none) for name in ledger.most_tokens}
        limits, memory = self.kv.limits, self.cache.memory
        live = {n: len(t) for a in self.cache.cache_allocators.values() for n, t in a.block_table.items()}
        return f"{limits}, used {memory.used_pages}, idle {memory.idle_pages}, live {live}, claims {claims}"

    @rule(prompt=st.integers(1, 40), tokens=st.integers(1, 30), alphabet=st.integers(1, 3))
    def arrive(self, prompt: int, tokens: int, alphabet: int) -> None:
        name = f"r{len(self.asked)}"
        ids = [i % alphabet for i in range(prompt)]  # few different prompts, so that beginnings are shared
        state = RequestState(name, ids, max_new_tokens=tokens, eos_token_id=None)
        needed = self.cache.ledger.sectors_for(prompt + tokens) * self.cache.memory.sector_pages
        try:
            self.cache.expect(name, prompt + tokens)
        except CapacityError:
            assert needed > self.kv.limits.maximum
            return
        except Overloaded:
            assert self.kv.limits.limit < needed <= self.kv.limits.maximum
            return
        self.asked[name] = state
        self.scheduler.add_waiting_request(state)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> bool:
        batch, _, new_tokens, _ = self.scheduler.schedule_batch(16, 0)
        assert new_tokens <= 16
        writes: list[list[int]] = [[] for _ in self.cache.cache_allocators]
        for entry in batch:
            state = entry.state
            before = [len(rows) for rows in writes]
            self.cache.extend_read_and_write_indices(
                state.request_id, state.position_offset, entry.query_length, None, writes
            )
            assert all(len(rows) - n == entry.query_length for rows, n in zip(writes, before, strict=True))
            state.position_offset += entry.query_length
            self.computed[state.request_id] = self.computed.get(state.request_id, 0) + entry.query_length
        for rows, allocator in zip(writes, self.cache.cache_allocators.values(), strict=True):
            assert len(set(rows)) == len(rows), "two tokens of one batch are written to one row"
            for layer in allocator.layer_indices:
                allocator.layers[layer].value_rows[torch.tensor(rows, dtype=torch.long)] = 1.0  # a fault if unmapped
        for entry in batch:
            if entry.has_new_token and entry.state.update_and_check_completion(1, None):
                self.cache.mark_complete_blocks(entry.state, entry.complete_blocks)
                self.scheduler.finish_request(entry.state.request_id)
                self.ended.add(entry.state.request_id)
            else:
                self.cache.mark_complete_blocks(entry.state, entry.complete_blocks)
        return bool(batch)

    @precondition(lambda self: self.asked.keys() - self.ended)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked.keys() - self.ended)))
        self.scheduler.set_request_cancellation(name)
        self.scheduler.clear_cancelled_requests()
        assert self.watch.gone[-1] == name
        self.ended.add(name)

    @rule(pages=st.integers(1, 40))
    def take_pages(self, pages: int) -> None:
        """Weights come back."""
        if self.share.take_from_cache(pages):
            self.weights.append(pages)
            self.pool.reserve("layer", pages)

    @precondition(lambda self: self.weights)
    @rule()
    def give_pages(self) -> None:
        """Weights leave."""
        pages = self.weights.pop()
        self.pool.unreserve("layer", pages)
        self.share.give_to_cache(pages)

    @rule(pages=st.integers(0, PAGES))
    def resize(self, pages: int) -> None:
        if pages <= self.kv.limits.maximum:
            self.kv.resize(pages * PAGE)

    @rule()
    def trim(self) -> None:
        self.kv.trim()

    @invariant()
    def books(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check()
            status = self.kv.status()
            assert status.used_bytes + self.cache.memory.promised_pages * PAGE <= status.maximum_bytes
            assert len(self.watch.started) == len(set(self.watch.started))

    @invariant()
    def nothing_is_computed_twice(self) -> None:
        for name, count in getattr(self, "computed", {}).items():
            state = self.asked[name]
            assert count <= len(state.initial_tokens) + state.generated_len()


class TestServing(Serving.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
