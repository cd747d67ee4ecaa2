"""Runs of replicated layers: rows of the batch are scattered where one begins and gathered where it ends.

(CoCoServe, section 3.2.) The layer's own forward gets its own rows and goes on through the model's loop with them; the
replicas of each other place compute theirs beside it, in its lane, layer after layer. Nothing is exchanged in between.
Where a forward pass wants to see what layers return, or gives them what is not known to belong to rows, the layers' own
place computes all rows. Where one row holds the tokens of many requests, the requests are shared out
(`split_requests.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

from elastic.errors import StateError
from elastic.hooks.forward_state import ForwardState, ShardTiming
from elastic.hooks.interceptor import Args, Kwargs
from elastic.hooks.replicas.load_balance import ThroughputEstimator, balanced, split_batch
from elastic.hooks.replicas.replica import Replica, ReplicaGroup
from elastic.hooks.replicas.request_balance import share_requests
from elastic.hooks.replicas.scatter_gather import ScatterGatherPass
from elastic.hooks.replicas.split_requests import BY_REQUESTS, RequestCache, request_cache
from elastic.hooks.replicas.split_rows import LayerInputs, NotSplittable
from elastic.hooks.replicas.timing import PassTimings
from elastic.weights.model import ModelWeights

logger = logging.getLogger(__name__)
LOOK_EVERY = 32
"""Passes."""


class SplitCaches(Protocol):
    """What runs need of the KV cache."""

    def begin_forward(self, cache: Any, layers: Collection[int]) -> None:
        """Layers of these indices may be split by rows from now on; all others are whole again, if there is room."""
        ...

    def rows(self, cache: Any, layer: int, places: Sequence[str | None]) -> tuple[int, ...] | None:
        """The rows that a layer holds at each place; None: it holds nothing, or others have some."""
        ...

    def split(self, cache: Any, layers: Sequence[int], rows: Sequence[tuple[str | None, int]]) -> list[Any] | None:
        """Have so many rows of these layers at each place, in this order: for each place the cache as it sees it.

        None: this cache cannot be split, or a place has no room; it is good for all rows together, wherever they lie.
        """
        ...


class ReplicaInterceptor:
    """The detour of one layer of a run."""

    def __init__(self, runs: ReplicaDispatcher, run: ReplicaGroup, layer: int, names: Sequence[str]) -> None:
        self._runs = runs
        self._run = run
        self._layer = layer
        self._names = names

    def enter(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        return self._runs.enter(self._run, self._layer, LayerInputs(self._names, args, kwargs))

    def leave(self, output: Any) -> Any:
        return self._runs.leave(output)


class ReplicaDispatcher:
    """The runs of a model, and what each thread's forward pass does with them."""

    def __init__(
        self, weights: ModelWeights, forward: ForwardState, caches: SplitCaches, names: Sequence[Sequence[str]]
    ) -> None:
        self._weights = weights
        self._forward = forward
        self._caches = caches
        self._names = names
        self._replicated: tuple[int, ...] = ()
        self._mine = threading.local()  # .flight, .scattering
        self._speeds = ThroughputEstimator()
        self.timeline = PassTimings(self._speeds)
        self._told: set[str] = set()

    @property
    def any(self) -> bool:
        return bool(self._replicated)

    def lay(self, replicas: Mapping[int, Mapping[str, Replica]]) -> None:
        """Layers have these replicas from now on; at a safe point."""
        self._replicated = tuple(sorted(layer for layer, by_place in replicas.items() if by_place))
        runs: dict[int, ReplicaGroup] = {}
        devices = [layer.pool.backend.device for layer in self._weights.layers]
        for stretch in _stretches(self._replicated, replicas, devices):
            run = ReplicaGroup(self._weights, stretch[0], [dict(sorted(replicas[layer].items())) for layer in stretch])
            runs |= dict.fromkeys(run.layers, run)
        for layer, names in enumerate(self._names):
            others = [d for d in self._forward.interceptors.get(layer, ()) if not isinstance(d, ReplicaInterceptor)]
            mine = [ReplicaInterceptor(self, runs[layer], layer, names)] if layer in runs else []
            self._forward.interceptor(layer, [*others, *mine])

    # -- in the thread of a forward pass

    def begin_forward(self, cache: Any, *, whole: bool) -> None:
        """An outermost forward pass of the model begins; `whole`: what its layers return for all rows is wanted."""
        self.end_forward()
        self._mine.scattering = self.any and not whole
        if cache is not None:
            self._caches.begin_forward(cache, self._replicated)

    def end_forward(self) -> bool:
        """It is over, well or not. Returns whether it has ended in the middle of a run."""
        flight, self._mine.flight, self._mine.scattering = getattr(self._mine, "flight", None), None, False
        if flight is not None:
            flight.abort()
        return flight is not None

    def enter(self, run: ReplicaGroup, layer: int, inputs: LayerInputs) -> tuple[Args, Kwargs] | None:
        flight: ScatterGatherPass | None = getattr(self._mine, "flight", None)
        try:
            if flight is None and layer == run.first and getattr(self._mine, "scattering", False):
                flight = self._mine.flight = self._scatter(run, inputs)
            return None if flight is None else flight.enter(layer, inputs)
        except NotSplittable as reason:
            if flight is not None and layer != run.first:
                raise StateError(
                    f"layer {layer} was given {reason}, unlike the layers before it; evict the replicas"
                ) from None
            self.end_forward()
            self._mine.scattering = True
            self._tell(f"layers {run.layers} are computed at one place: it is not known which rows have {reason}")
            return None

    def leave(self, output: Any) -> Any:
        flight: ScatterGatherPass | None = getattr(self._mine, "flight", None)
        if flight is None:
            return None
        if output is None:
            self.end_forward()
            return None
        gathered = None
        try:
            gathered = flight.leave(output)
        finally:
            if flight.ended:
                self._mine.flight = None
        if flight.ended:
            self.timeline.passed(flight.timings(), len(flight.run.layers))
        return gathered

    def passes(self) -> tuple[tuple[ShardTiming, ...], ...]:
        """When the places computed their parts of the last passes through runs, oldest first."""
        return self.timeline.passes()

    def _scatter(self, run: ReplicaGroup, inputs: LayerInputs) -> ScatterGatherPass | None:
        hidden = inputs.hidden
        if not isinstance(hidden, torch.Tensor):
            raise NotSplittable("no hidden_states")
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise StateError(
                f"layers {run.layers} have replicas, which are not differentiated: evict them, or run under "
                "torch.no_grad()"
            )
        run.require_unwritten()
        requests = request_cache(inputs)
        if requests is not None:
            return self._scatter_requests(run, inputs, requests)
        cache = inputs.cache
        present = None if cache is None else self._caches.rows(cache, run.first, run.places)
        if present is not None and sum(present) != hidden.shape[0]:
            return None  # the cache has words for it
        counts = self._counts(run, hidden.shape[0], present)
        caches = [None] * len(counts)
        if cache is not None:
            found = self._caches.split(cache, run.layers, list(zip(run.places, counts, strict=True)))
            if found is None:
                if any(counts[1:]):
                    self._tell(f"layers {run.layers} are computed at one place: their KV cache cannot be split by rows")
                return None
            caches = found
        return (
            ScatterGatherPass(run, inputs, counts, caches)
            if any(counts[1:]) or self._to_be_timed(run, hidden)
            else None
        )

    def _scatter_requests(
        self, run: ReplicaGroup, inputs: LayerInputs, cache: RequestCache
    ) -> ScatterGatherPass | None:
        """Each place computes some requests of an engine's batch; their KV cache stays where it is."""
        tokens = cache.new_tokens()
        if len(tokens) == 1 and run.stand_in:
            shares = _only(self._speeds.best_alone(run.names), run.names)
        else:
            shares = share_requests(tokens, self._speeds.of(run.names))
        cuts = list(pairwise(accumulate(shares, initial=0)))
        counts = [sum(tokens[start:stop]) for start, stop in cuts]
        if not any(counts[1:]) and not self._to_be_timed(run, inputs.hidden):
            return None
        caches = [cache.of_requests(start, stop) if stop > start else None for start, stop in cuts]
        return ScatterGatherPass(run, inputs, counts, caches, BY_REQUESTS)

    def _counts(self, run: ReplicaGroup, batch: int, present: tuple[int, ...] | None) -> tuple[int, ...]:
        """The rows of each place. Those of a running generation are thought over now and then only."""
        run.passes += 1
        if present is not None and balanced(present) and run.passes % LOOK_EVERY:
            return present
        if batch == 1 and run.stand_in:
            best = self._speeds.best_alone(run.names, None if present is None else present.index(1))
            return _only(best, run.names)
        return split_batch(batch, self._speeds.of(run.names), present)

    def _to_be_timed(self, run: ReplicaGroup, hidden: torch.Tensor) -> bool:
        """Whether this is a step of one token at the layers' own place, and it is not known how long that takes."""
        return hidden.shape[:2] == (1, 1) and run.stand_in and not self._speeds.knows_alone(run.home)

    def _tell(self, message: str) -> None:
        """Once."""
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)


def _only(best: int, places: Sequence[str]) -> tuple[int, ...]:
    """All for one place."""
    return tuple(int(place == best) for place in range(len(places)))


def _stretches(
    layers: Sequence[int], replicas: Mapping[int, Mapping[str, Replica]], devices: Sequence[torch.device]
) -> list[list[int]]:
    """Consecutive layers on one device with replicas at the same places."""
    found: list[list[int]] = []
    for layer in layers:
        last = found[-1][-1] if found else None
        alike = last is not None and replicas[last].keys() == replicas[layer].keys()
        if alike and last == layer - 1 and devices[last] == devices[layer]:
            found[-1].append(layer)
        else:
            found.append([layer])
    return found
