"""Replicated layers: rows of the batch are scattered where a group begins and gathered where it ends.

(CoCoServe, section 3.2.) The layer's own forward gets its own rows and goes on through the model's loop with them; the
replicas of each other place compute theirs beside it, in its worker, layer after layer. Nothing is exchanged in
between. Where a forward pass wants to see what layers return, or gives them what is not known to belong to rows, the
layers' own place computes all rows. Where one row holds the tokens of many requests, the requests are shared out
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
from elastic.hooks.forward_state import ForwardState
from elastic.hooks.interceptor import Args, Kwargs
from elastic.hooks.replicas.load_balance import ThroughputEstimator, balanced, split_batch
from elastic.hooks.replicas.replica import Replica, ReplicaGroup
from elastic.hooks.replicas.request_balance import share_requests
from elastic.hooks.replicas.scatter_gather import ScatterGatherPass
from elastic.hooks.replicas.split_requests import BY_REQUESTS, RequestCache, request_cache
from elastic.hooks.replicas.split_rows import CACHES, PLAIN, LayerInputs, NotSplittable
from elastic.hooks.replicas.timing import PassTimings
from elastic.weights.model import ModelWeights

logger = logging.getLogger(__name__)
LOOK_EVERY = 32
"""Passes of a group between two looks at whether the rows of a running generation should be split otherwise."""


class SplitCaches(Protocol):
    """KV caches that can be split by rows: at the KV's own place, which counts first, and at `places`."""

    def begin_forward(self, cache: Any, layers: Collection[int]) -> None:
        """Let layers of these indices be split by rows from now on; join all others again, if there is room."""

    def rows(self, cache: Any, layer: int, places: Sequence[str]) -> tuple[int, ...] | None:
        """Return the rows that a layer holds at each place; None: it holds nothing, or others have some."""

    def split(
        self, cache: Any, layers: Sequence[int], places: Sequence[str], counts: Sequence[int]
    ) -> list[Any] | None:
        """Have so many rows of these layers at each place, in this order; returns for each place the cache it sees.

        None: this cache cannot be split, or a place has no room; it is good for all rows together, wherever they lie.
        """


class ReplicaInterceptor:
    """Has one layer of a replica group computed by several places."""

    def __init__(self, dispatcher: ReplicaDispatcher, group: ReplicaGroup, layer: int, names: Sequence[str]) -> None:
        self._dispatcher = dispatcher
        self._group = group
        self._layer = layer
        self._names = names
        """The parameters of the layer's forward method."""

    def enter(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """Begin the layer at all places: at the first of the group, the batch is scattered.

        Raises `StateError` where the pass cannot go on with what this layer was given.
        """
        inputs, thread = LayerInputs(self._names, args, kwargs), self._dispatcher.thread
        first = self._layer == self._group.layers[0]
        try:
            if thread.current is None and first and thread.scattering:
                thread.current = self._dispatcher.scatter(self._group, inputs)
            return None if thread.current is None else thread.current.enter(self._layer, inputs)
        except NotSplittable as reason:
            if thread.current is not None and not first:
                raise StateError(
                    f"layer {self._layer} was given {reason}, unlike the layers before it; evict the replicas"
                ) from None
            self._dispatcher.end_forward()
            thread.scattering = True
            self._dispatcher.warn_once(
                f"layers {self._group.layers} are computed at one place: it is not known which rows have {reason}"
            )
            return None

    def leave(self, output: Any) -> Any:
        """End the layer: after the last one of the group, return the output for all rows."""
        thread = self._dispatcher.thread
        current = thread.current
        if current is None:
            return None
        if output is None:
            self._dispatcher.end_forward()
            return None
        try:
            gathered = current.leave(output)
        finally:
            if current.ended:
                thread.current = None
        if current.ended:
            self._dispatcher.timings.add(current.timings(), len(self._group.layers))
        return gathered


class _CurrentPass(threading.local):
    """The pass that a thread is in, and whether its forward may be scattered at all."""

    current: ScatterGatherPass | None = None
    scattering: bool = False


class ReplicaDispatcher:
    """The replica groups of a model, and how each thread's forward pass is split between their places."""

    def __init__(
        self, weights: ModelWeights, forward: ForwardState, caches: SplitCaches, names: Sequence[Sequence[str]]
    ) -> None:
        """`names` are the parameters of each layer's forward method."""
        self._weights = weights
        self._forward = forward
        self._caches = caches
        self._names = names
        self.replicated: tuple[int, ...] = ()
        self.thread = _CurrentPass()
        self._speeds = ThroughputEstimator()
        self.timings = PassTimings(self._speeds)
        self.passes = self.timings.passes
        self._warned: set[str] = set()

    def set_replicas(self, replicas: Mapping[int, Mapping[str, Replica]]) -> None:
        """Have these replicas, by layer and place, from now on; at a safe point.

        Forward passes come by here from the first ones on: later ones join what was split of the caches.
        """
        self._forward.dispatcher = self
        self.replicated = tuple(sorted(layer for layer, by_place in replicas.items() if by_place))
        devices = [layer.pool.backend.device for layer in self._weights.layers]
        groups: dict[int, ReplicaGroup] = {}
        for layers in _alike(self.replicated, replicas, devices):
            group = ReplicaGroup(self._weights, layers[0], [dict(sorted(replicas[i].items())) for i in layers])
            groups |= dict.fromkeys(layers, group)
        for layer, names in enumerate(self._names):
            new = ReplicaInterceptor(self, groups[layer], layer, names) if layer in groups else None
            self._forward.replace(layer, ReplicaInterceptor, new, outermost=False)

    # -- in the thread of a forward pass

    def begin_forward(self, *, whole: bool) -> None:
        """Begin an outermost forward pass; with `whole`, its layers must return all rows."""
        self.end_forward()
        self.thread.scattering = bool(self.replicated) and not whole

    def use(self, cache: Any) -> None:
        """Have it go over a cache."""
        self._caches.begin_forward(cache, self.replicated)

    def note_between_layers(self, given: Mapping[str, Any]) -> None:
        """Note what a model was given, by which it may change hidden states between layers: these return all rows."""
        names = [name for name, value in given.items() if not isinstance(value, PLAIN)]
        if names and self.thread.scattering:
            self.thread.scattering = False
            self.warn_once(
                f"layers {self.replicated} are computed at one place: hidden states may change between them, by "
                f"{', '.join(names)}"
            )

    def end_forward(self) -> bool:
        """End it, well or not. Returns whether a group was left half way."""
        current, self.thread.current, self.thread.scattering = self.thread.current, None, False
        if current is not None:
            current.abort()
        return current is not None

    def scatter(self, group: ReplicaGroup, inputs: LayerInputs) -> ScatterGatherPass | None:
        """Split a batch between the places of a group; None: their own place computes all of it.

        Raises `NotSplittable` for unknown inputs, `StateError` for hidden states with gradients and old replicas.
        """
        hidden = inputs.hidden
        if not isinstance(hidden, torch.Tensor):
            raise NotSplittable("hidden states, as no argument has that name")
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise StateError(
                f"layers {group.layers} have replicas, which are not differentiated: evict them, or run under "
                "torch.no_grad()"
            )
        group.require_unwritten()
        requests = request_cache(inputs)
        if requests is None:
            return self._scatter_rows(group, inputs, hidden)
        return self._scatter_requests(group, inputs, requests)

    def warn_once(self, message: str) -> None:
        """Log a warning, if it was not logged before."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    def _scatter_rows(self, group: ReplicaGroup, inputs: LayerInputs, hidden: torch.Tensor) -> ScatterGatherPass | None:
        """Have each place compute some rows; their KV cache goes with them."""
        cache, places = inputs.first_of(CACHES), group.places[1:]
        present = None if cache is None else self._caches.rows(cache, group.layers[0], places)
        if present is not None and sum(present) != hidden.shape[0]:
            return None  # the cache raises an error in words
        counts = self._row_counts(group, hidden.shape[0], present)
        caches: list[Any] | None = [None] * len(counts)
        if cache is not None:
            caches = self._caches.split(cache, group.layers, places, counts)
        if caches is None:
            if any(counts[1:]):
                self.warn_once(
                    f"layers {group.layers} are computed at one place: their KV cache cannot be split by rows"
                )
            return None
        worthwhile = any(counts[1:]) or self._to_be_timed(group, hidden)
        return ScatterGatherPass(group, inputs, counts, caches) if worthwhile else None

    def _scatter_requests(
        self, group: ReplicaGroup, inputs: LayerInputs, cache: RequestCache
    ) -> ScatterGatherPass | None:
        """Have each place compute some requests of an engine's batch; their KV cache stays where it is."""
        tokens = cache.new_tokens()
        if len(tokens) == 1 and group.stand_in:
            shares = _only(self._speeds.best_alone(group.places), group)
        else:
            shares = share_requests(tokens, self._speeds.of(group.places))
        spans = list(pairwise(accumulate(shares, initial=0)))
        counts = [sum(tokens[start:stop]) for start, stop in spans]
        if not any(counts[1:]) and not self._to_be_timed(group, inputs.hidden):
            return None
        caches = [cache.of_requests(start, stop) if stop > start else None for start, stop in spans]
        return ScatterGatherPass(group, inputs, counts, caches, BY_REQUESTS)

    def _row_counts(self, group: ReplicaGroup, batch: int, present: tuple[int, ...] | None) -> tuple[int, ...]:
        """Choose the rows of each place. For a running generation that is reconsidered now and then only."""
        group.passes += 1
        if present is not None and balanced(present) and group.passes % LOOK_EVERY:
            return present
        if batch == 1 and group.stand_in:
            return _only(self._speeds.best_alone(group.places, None if present is None else present.index(1)), group)
        return split_batch(batch, self._speeds.of(group.places), present)

    def _to_be_timed(self, group: ReplicaGroup, hidden: torch.Tensor) -> bool:
        """Return whether this is one token for the layers' own place, which was not timed with one yet."""
        return hidden.shape[:2] == (1, 1) and group.stand_in and not self._speeds.knows_alone(group.places[0])


def _only(chosen: int, group: ReplicaGroup) -> tuple[int, ...]:
    return tuple(int(place == chosen) for place in range(len(group.places)))


def _alike(
    layers: Sequence[int], replicas: Mapping[int, Mapping[str, Replica]], devices: Sequence[torch.device]
) -> list[list[int]]:
    """Group consecutive layers on one device with replicas at the same places."""
    groups: list[list[int]] = []
    for layer in layers:
        last = groups[-1][-1] if groups else None
        alike = last is not None and replicas[last].keys() == replicas[layer].keys()
        if alike and last == layer - 1 and devices[last] == devices[layer]:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups
