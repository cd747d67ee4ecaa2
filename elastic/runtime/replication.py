"""Replication, as the user of a runtime sees it, and how it is put together for a model."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, overload

from elastic.actions.deferred import DeferredActions
from elastic.actions.pages.allocation import WeightPageAllocator
from elastic.actions.replicate import ReplicateHandler
from elastic.hooks.forward_state import ForwardState, ShardTiming
from elastic.hooks.replicas.dispatcher import ReplicaDispatcher
from elastic.hooks.replicas.split_rows import parameter_names
from elastic.memory.rate_limit import RateLimiter
from elastic.runtime.acting import Acting, Layers
from elastic.types import Change, Evict, Replicate
from elastic.weights.decoder import Decoder
from elastic.weights.model import ModelWeights

if TYPE_CHECKING:
    from elastic.kvcache.manager import KVMemory


def replication(
    decoder: Decoder,
    memory: KVMemory,
    weights: ModelWeights,
    forward: ForwardState,
    tenancy: WeightPageAllocator,
    waiting: DeferredActions,
    pace: RateLimiter,
    stack: ExitStack,
) -> ReplicateHandler:
    """The mechanism of a model, which from then on shares out batches between its layers' replicas."""
    from elastic.kvcache.attention import attend_alike
    from elastic.kvcache.split_cache import RowSplitCaches, without_rows

    names = [parameter_names(layer) for layer in decoder.layers]
    runs = forward.dispatcher = ReplicaDispatcher(weights, forward, RowSplitCaches(memory), names)
    unsplittable = without_rows(memory, decoder.config)
    mechanism = ReplicateHandler(weights, decoder.layers, runs, tenancy, waiting, pace, unsplittable, attend_alike)
    stack.callback(mechanism.close)
    return mechanism


class Replicating(Acting):
    """The part of a runtime that adds copies of layers at other places, and takes them away."""

    @property
    def replicated(self) -> tuple[int, ...]:
        """The decoder layers that have replicas now."""
        return tuple(sorted(self._weights.replicas))

    def passes(self) -> tuple[tuple[ShardTiming, ...], ...]:
        """When the places computed their rows in the last passes through runs of replicated layers, oldest first."""
        return self.forward.dispatcher.passes() if self.forward.dispatcher is not None else ()

    @overload
    def replicate(self, layers: Layers, place: str, *, wait: Literal[True] = True) -> Change: ...

    @overload
    def replicate(self, layers: Layers, place: str, *, wait: Literal[False]) -> Future[tuple[Change]]: ...

    def replicate(self, layers: Layers, place: str, *, wait: bool = True) -> Change | Future[tuple[Change]]:
        """Have decoder layers at one more place, which computes a part of the rows of each batch from then on.

        Rows are scattered where a run of layers with the same replicas begins and gathered where it ends; each place
        gets as many as it has been fast, and keeps the KV cache of those. Running generations go on, their rows' KV
        moving with them. Under an engine requests are shared out instead, and their KV stays where it is. A layer with
        replicas is not swapped, released or migrated before they are evicted. Raises `ConfigError` for what is no layer
        or no place, `CapacityError` where the place has no room, `StateError` for a layer that is there itself, or is
        released. With `wait=False`, a future. (CoCoServe, section 3.2)
        """
        done = self.apply((Replicate(self._weights.layer_indices(layers), place),), wait=wait)
        return done if isinstance(done, Future) else done[0]

    @overload
    def evict(self, layers: Layers, place: str, *, wait: Literal[True] = True) -> Change: ...

    @overload
    def evict(self, layers: Layers, place: str, *, wait: Literal[False]) -> Future[tuple[Change]]: ...

    def evict(self, layers: Layers, place: str, *, wait: bool = True) -> Change | Future[tuple[Change]]:
        """Undo `replicate`: the replicas of decoder layers leave a place, and their pages are KV capacity there.

        KV rows that were there return with the next token of their generation; where they find no room they stay, and
        the generation goes on, slower. Raises `ConfigError` for what is no layer or no place, `StateError` for a layer
        without a replica there. With `wait=False`, a future.
        """
        done = self.apply((Evict(self._weights.layer_indices(layers), place),), wait=wait)
        return done if isinstance(done, Future) else done[0]
