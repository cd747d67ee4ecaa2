"""The requests of plain `generate`, as far as a model's hooks can see them: a cache is a request.

It arrives, and is scheduled, with the first forward pass over a cache; every pass that ends well has generated one
token for each row of the batch; it has ended when the cache dies, or when a pass fails.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Collection
from functools import partial
from typing import Any, Literal, Protocol

import torch

from elastic.memory.pages.background import janitor
from elastic.memory.pages.finalizers import call_at_death

_names = itertools.count()
TrackedRequest = tuple[str, int]
"""Its name, and the rows of its batch."""


class RequestObserver(Protocol):
    """Counts requests. Times are seconds of `time.perf_counter`."""

    def arrived(self, request: str, prompt_tokens: int, at_s: float | None = None, *, sequences: int = 1) -> None:
        """Count a request with so many tokens in all of its sequences."""

    def scheduled(self, request: str, at_s: float | None = None) -> None:
        """Count its first forward pass."""

    def produced(self, request: str, tokens: int = 1, at_s: float | None = None) -> None:
        """Count tokens that it was given."""

    def ended(self, request: str, outcome: Literal["completed", "failed"], at_s: float | None = None) -> None:
        """Count its end."""


class CacheRequestTracker:
    """Reports caches as requests to an observer. While there is none, nothing is looked at."""

    def __init__(self, observer: RequestObserver | None, users: Collection[object] = ()) -> None:
        """`users`: those of the model who count their requests themselves; while there is one, nobody observes."""
        self._observer, self._users = observer, users
        self._live: weakref.WeakKeyDictionary[Any, TrackedRequest] = weakref.WeakKeyDictionary()

    @property
    def observer(self) -> RequestObserver | None:
        """Whom requests are reported to now."""
        return None if self._users else self._observer

    def begin(self, cache: Any, tokens: torch.Tensor | None) -> TrackedRequest | None:
        """Report a forward pass that begins, with ids [batch, tokens] or embeddings [batch, tokens, hidden].

        Returns the request that the cache is; None: nobody observes, or there are no tokens.
        """
        observer = self.observer
        if observer is None or tokens is None or tokens.ndim < 2:
            return None
        request = self._live.get(cache)
        if request is None:
            rows, now = tokens.shape[0], time.perf_counter()
            request = self._live[cache] = f"generate-{next(_names)}", rows
            name, _ = request
            observer.arrived(name, rows * tokens.shape[1], now, sequences=rows)
            observer.scheduled(name, now)
            completed = partial(observer.ended, name, "completed")  # by a finalizer, so maybe inside the observer
            call_at_death(cache, lambda: janitor.submit(partial(completed, time.perf_counter())))
        return request

    def end(self, cache: Any, request: TrackedRequest, failed: bool) -> None:
        """Report the end of the forward pass over a cache: a token for each row, or a failure."""
        observer, (name, rows) = self.observer, request
        if observer is None:
            return
        if failed:
            self._live.pop(cache, None)
            observer.ended(name, "failed", time.perf_counter())
        else:
            observer.produced(name, rows, time.perf_counter())
