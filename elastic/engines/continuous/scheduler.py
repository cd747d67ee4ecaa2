"""The choice of the next batch: transformers' rule (live requests first, then by arrival), with no eviction."""

from __future__ import annotations

import time
from itertools import islice
from typing import Protocol

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from elastic.engines.continuous.cache import ElasticPagedCache

_NO_LIMIT = 2**62  # the stock budget for reads from the cache is for index tensors that are not used here


class SchedulerListener(Protocol):
    """The receiver of what the scheduler did."""

    def scheduled(self, request: str) -> None:
        """Note that a request goes into a batch for the first time."""

    def stalled(self, requests: int) -> None:
        """Count live requests that were left out of a batch: no block was to be had."""

    def cancelled(self, request: str) -> None:
        """Note that a request was taken out because its user cancelled it."""


class ElasticScheduler(FIFOScheduler):  # type: ignore[misc]
    """Runs on the engine's thread.

    `short_of_kv_s` is a clock that stands still while every request that could be computed has the blocks it asks for:
    by how much it went on is how long a request that waited meanwhile has waited for blocks, not for its turn.
    """

    cache: ElasticPagedCache
    starved_requests: list[tuple[RequestState, int]]

    def __init__(self, cache: ElasticPagedCache, max_requests: int, listener: SchedulerListener) -> None:
        self._listener = listener
        self.short_of_kv_s = 0.0
        self._last_s = time.perf_counter()
        super().__init__(cache, 0.0, max_requests)

    def add_waiting_request(self, state: RequestState) -> None:
        """Queue a request, announced to the cache with all the tokens that it may come to hold."""
        self.cache.expect(state.request_id, len(state.initial_tokens) + (state.max_new_tokens or 0))
        super().add_waiting_request(state)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Take cancelled requests out; return them."""
        states: list[RequestState] = super().clear_cancelled_requests()
        for state in states:
            self._listener.cancelled(state.request_id)
        return states

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[FutureRequestState], bool, int, int]:
        """Choose the next batch; empty when nothing can go on now, which the stock loop takes for "wait"."""
        now = time.perf_counter()
        if self.cache.refused:
            self.short_of_kv_s += now - self._last_s
        self._last_s = now
        self.cache.begin_step()
        fresh = {state.request_id for state in self._get_waiting_candidates()}
        batch, fast_path, new_tokens, read = super().schedule_batch(token_budget, _NO_LIMIT)
        stalled, self.starved_requests = len(self.starved_requests), []
        for entry in batch or ():
            if entry.state.request_id in fresh:
                self._listener.scheduled(entry.state.request_id)
        if stalled:
            self._listener.stalled(stalled)
        return batch or [], fast_path, new_tokens, read

    def _get_waiting_candidates(self) -> list[RequestState]:
        """List those that may go into this batch for the first time. (Stock: all that wait.)"""
        first = islice(self.waiting_requests_order, self.max_requests_per_batch)
        return [self.waiting_requests[name] for name in first]
