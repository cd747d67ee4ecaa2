"""Replication, as the user of a runtime sees it, and how it is put together for a model."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, overload

from elastic.acting import Acting, Layers
from elastic.hooks.actions import Waiting
from elastic.hooks.replicate import ReplicaMechanism
from elastic.hooks.rows import parameter_names
from elastic.hooks.runs import Runs
from elastic.hooks.structure import Decoder
from elastic.hooks.tenancy import Tenancy
from elastic.hooks.timeline import PartTime
from elastic.hooks.weights import ModelWeights
from elastic.memory.copying import Pace
from elastic.types import Change, Evict, Replicate

if TYPE_CHECKING:
    from elastic.kvcache.memory import KVMemory


def replication(
    decoder: Decoder,
    memory: KVMemory,
    weights: ModelWeights,
    tenancy: Tenancy,
    waiting: Waiting,
    pace: Pace,
    stack: ExitStack,
) -> ReplicaMechanism:
    """The mechanism of a model, which from then on shares out batches between its layers' replicas."""
    from elastic.kvcache.rows import RowCaches, without_rows

    runs = weights.flights = Runs(weights, RowCaches(memory), [parameter_names(layer) for layer in decoder.layers])
    unsplittable = without_rows(memory, decoder.config)
    mechanism = ReplicaMechanism(weights, decoder.layers, runs, tenancy, waiting, pace, unsplittable)
    stack.callback(mechanism.close)
    return mechanism


class Replicating(Acting):
    """The part of a runtime that adds copies of layers at other places, and takes them away."""

    @property
    def replicated(self) -> tuple[int, ...]:
        """The decoder layers that have replicas now."""
        return tuple(sorted(self._weights.replicas))

    def passes(self) -> tuple[tuple[PartTime, ...], ...]:
        """When the places computed their rows in the last passes through runs of replicated layers, oldest first."""
        return self._weights.flights.passes() if self._weights.flights is not None else ()

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
        done = self.apply((Replicate(self._weights.find(layers), place),), wait=wait)
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
        done = self.apply((Evict(self._weights.find(layers), place),), wait=wait)
        return done if isinstance(done, Future) else done[0]
