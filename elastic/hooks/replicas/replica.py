"""Copies of decoder layers at other places, and groups of consecutive layers that have them at the same places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.errors import StateError
from elastic.hooks.replicas.layer_copy import LayerCopy
from elastic.hooks.replicas.worker import ReplicaWorker
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights


@dataclass(frozen=True)
class Replica:
    """A copy of a decoder layer at another place."""

    unit: WeightUnit
    copy: LayerCopy
    worker: ReplicaWorker
    stands_in: bool
    """Whether it can be called in its layer's place."""
    version: int
    """How often its layer had been written when its bytes were copied."""


class ReplicaGroup:
    """Consecutive layers that are at the same places beside their own. Place 0 is their own."""

    def __init__(self, weights: ModelWeights, first: int, replicas: Sequence[Mapping[str, Replica]]) -> None:
        """`replicas` are those of each layer, by place."""
        self.replicas = tuple(replicas)
        self.layers = tuple(range(first, first + len(replicas)))
        own = weights.layers[first].pool
        self.workers = [replica.worker for replica in replicas[0].values()]
        self.places = (own.name, *(worker.place for worker in self.workers))
        self.devices = (own.backend.device, *(worker.device for worker in self.workers))
        self.stand_in = all(replica.stands_in for by_place in replicas for replica in by_place.values())
        """Whether replicas can be called in their layers' places."""
        self.passes = 0
        self._units = [unit for layer in self.layers for unit in weights.units(layer)]
        self._version = sum(min(replica.version for replica in by_place.values()) for by_place in replicas)

    def require_unwritten(self) -> None:
        """Raise `StateError` if a layer was written or got an adapter since it was replicated: replicas are old."""
        if sum(unit.version() for unit in self._units) != self._version:
            changed = "weights of layers {} to {} were written"
        elif not all(replica.copy.is_like_original for by_place in self.replicas for replica in by_place.values()):
            changed = "modules of layers {} to {} were replaced (by adapters, maybe)"
        else:
            return
        raise StateError(
            f"{changed.format(self.layers[0], self.layers[-1])} after they were replicated; evict their replicas and "
            "replicate them again"
        )
