"""Which requests go into the next batch: transformers' rule (the living first, then by arrival), with no eviction."""

from __future__ import annotations

import time
from itertools import islice
from typing import Protocol

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from elastic.engines.paged_cache import ElasticPagedCache

_NO_LIMIT = 2**62  # the stock budget for reads from the cache is for index tensors that are not used here


class Watcher(Protocol):
    """Who hears what the scheduler did."""

    def scheduled(self, request: str) -> None:
        """A request goes into a batch for the first time."""
        ...

    def stalled(self, requests: int) -> None:
        """So many that live were left out of this batch: no block was to be had."""
        ...

    def cancelled(self, request: str) -> None: ...


class ElasticScheduler(FIFOScheduler):  # type: ignore[misc]
    """Runs on the engine's thread.

    `waiting_s` sums up, over all requests, how long they waited for KV blocks, and for their turn to be computed.
    `blocked_s` is for how long in all no block was to be had for the one whose turn it was.
    """

    cache: ElasticPagedCache
    starved_requests: list[tuple[RequestState, int]]

    def __init__(self, cache: ElasticPagedCache, max_requests: int, watcher: Watcher) -> None:
        self._watcher = watcher
        self.waiting_s = {"kv": 0.0, "compute": 0.0}
        self.blocked_s = 0.0
        self._last_s = time.perf_counter()
        self._reason = "compute"
        self._queue: tuple[object, ...] = ()  # by which a change of the queue is noticed
        self._largest = 0
        super().__init__(cache, 0.0, max_requests)

    def add_waiting_request(self, state: RequestState) -> None:
        self.cache.expect(state.request_id, most_tokens(state))
        super().add_waiting_request(state)

    def clear_cancelled_requests(self) -> list[RequestState]:
        states: list[RequestState] = super().clear_cancelled_requests()
        for state in states:
            self._watcher.cancelled(state.request_id)
        return states

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[FutureRequestState], bool, int, int]:
        """The next batch; empty when nothing can go on now, which the stock loop takes for "wait"."""
        self._account()
        self.cache.begin_step()
        fresh = {state.request_id for state in self._get_waiting_candidates()}
        batch, fast_path, new_tokens, read = super().schedule_batch(token_budget, _NO_LIMIT)
        stalled, self.starved_requests = len(self.starved_requests), []
        self.cache.keep_promises(self._largest_waiting())
        self._reason = "kv" if self.cache.refused else "compute"
        for entry in batch or ():
            if entry.state.request_id in fresh:
                self._watcher.scheduled(entry.state.request_id)
        if stalled:
            self._watcher.stalled(stalled)
        return batch or [], fast_path, new_tokens, read

    def _get_waiting_candidates(self) -> list[RequestState]:
        first = islice(self.waiting_requests_order, self.max_requests_per_batch)
        return [self.waiting_requests[name] for name in first]

    def _largest_waiting(self) -> int:
        """Sectors that the largest waiting request needs."""
        order = self.waiting_requests_order
        queue = (len(order), order[0], order[-1]) if order else ()
        if queue != self._queue:
            most = max((most_tokens(state) for state in self.waiting_requests.values()), default=0)
            self._queue, self._largest = queue, self.cache.sectors_for(most)
        return self._largest

    def _account(self) -> None:
        now = time.perf_counter()
        self.waiting_s[self._reason] += (now - self._last_s) * len(self.waiting_requests)
        self.blocked_s += now - self._last_s if self._reason == "kv" else 0.0
        self._last_s = now


def most_tokens(state: RequestState) -> int:
    """The tokens that a request will hold at the most."""
    assert state.status == RequestStatus.PENDING
    return len(state.initial_tokens) + (state.max_new_tokens or 0)
