"""Copies of decoder layers at other places, and runs of consecutive layers that have them at the same places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.errors import StateError
from elastic.hooks.replicas.layer_copy import LayerCopy
from elastic.hooks.replicas.worker import ReplicaWorker
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights

HOME = None
"""The place of a layer itself, whichever that is."""


@dataclass(frozen=True)
class Replica:
    """A copy of a decoder layer at another place."""

    unit: WeightUnit
    skeleton: LayerCopy
    lane: ReplicaWorker
    stands_in: bool
    """Whether it can be called in its layer's place."""
    version: int
    """How often its layer had been written when its bytes were copied."""


class ReplicaGroup:
    """Consecutive layers that are at the same places beside their own."""

    def __init__(self, weights: ModelWeights, first: int, replicas: Sequence[Mapping[str, Replica]]) -> None:
        self.first = first
        self.replicas = tuple(replicas)
        """Of each layer, by place."""
        self.layers = tuple(range(first, first + len(replicas)))
        self.lanes = [replica.lane for replica in replicas[0].values()]
        home = weights.layers[first].pool
        self.home, self.device = home.name, home.backend.device
        self.places: tuple[str | None, ...] = (HOME, *(lane.place for lane in self.lanes))
        self.names = (home.name, *(lane.place for lane in self.lanes))
        self.stand_in = all(replica.stands_in for by_place in replicas for replica in by_place.values())
        """Whether replicas can be called in their layers' places."""
        self.passes = 0
        self._units = [unit for layer in self.layers for unit in weights.units(layer)]
        self._version = sum(min(replica.version for replica in by_place.values()) for by_place in replicas)

    def require_unwritten(self) -> None:
        """Raises `StateError` if a layer was written since it was replicated: its replicas are old."""
        if sum(unit.version() for unit in self._units) != self._version:
            raise StateError(
                f"weights of layers {self.layers[0]} to {self.layers[-1]} were written after they were replicated; "
                "evict their replicas and replicate them again"
            )
