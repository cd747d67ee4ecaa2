"""What releasing and restoring layers have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from elastic.errors import CapacityError, StateError
from elastic.hooks.layer import LayerWeights
from elastic.hooks.streaming import MOST_STAGES
from elastic.hooks.weights import ModelWeights
from elastic.types import Release, Restore
from elastic.weights import Weight

logger = logging.getLogger(__name__)


class Lender(Protocol):
    """The other tenant of the pages: the KV cache."""

    def lend(self, place: str, pages: int) -> None: ...

    def claim(self, place: str, pages: int) -> bool: ...

    def reserve(self, place: str, pages: int) -> None: ...

    def room(self, place: str) -> int: ...

    def could_claim(self, place: str, pages: int) -> bool: ...


@dataclass
class Prepared:
    """What an action will flip, and what it holds until then."""

    action: Release | Restore
    layers: list[LayerWeights] = field(default_factory=list)
    plain: list[Mapping[str, nn.Parameter]] = field(default_factory=list)
    """Restore: what each layer will show."""
    weights: list[Mapping[str, Weight]] = field(default_factory=list)
    """Release: what will stand for each layer's parameters."""
    versions: list[int] = field(default_factory=list)
    """How often each layer's parameters had been written when their bytes were copied."""
    deferred: list[LayerWeights] = field(default_factory=list)
    moved_bytes: int = 0
    lent_bytes: int = 0
    """Restore: stages that the layers will not need."""
    committed: bool = False

    def require_unwritten(self) -> None:
        """Raises `StateError` if a layer was written since its bytes were copied: the copies are old."""
        for layer, version in zip(self.layers, self.versions, strict=True):
            if layer.version() != version:
                raise StateError(f"the weights of {layer.name} were written while they were on their way; try again")


class Waiting:
    """The layers whose restore is deferred. The KV cache keeps their pages from new caches."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self.layers: tuple[LayerWeights, ...] = ()

    def add(self, layers: list[LayerWeights]) -> None:
        self._set((*self.layers, *(layer for layer in layers if layer not in self.layers)))

    def drop(self, layers: Iterable[LayerWeights]) -> None:
        gone = set(layers)
        self._set(tuple(layer for layer in self.layers if layer not in gone))

    def _set(self, layers: tuple[LayerWeights, ...]) -> None:
        places = {layer.pool.name for layer in (*self.layers, *layers)}
        self.layers = layers
        for place in places:
            self._lender.reserve(place, sum(layer.pages for layer in layers if layer.pool.name == place))


def by_place(layers: Iterable[LayerWeights]) -> dict[str, list[LayerWeights]]:
    places: dict[str, list[LayerWeights]] = {}
    for layer in layers:
        places.setdefault(layer.pool.name, []).append(layer)
    return places


def retire(layer: LayerWeights, lender: Lender) -> int:
    """The layer's block is not read any more; returns the pages that are free now."""
    block, place = layer.block, layer.pool.name
    assert block is not None
    if layer.pool.backend.device.type == "cuda":
        torch.cuda.synchronize(layer.pool.backend.device)
    if block.hide():
        block.rest()
        return layer.pages
    layer.block = None
    return block.abandon(lambda pages: lender.lend(place, pages))


def resize_stages(weights: ModelWeights, place: str) -> int:
    """As many stages as the absent layers of a place need; returns the pages that others may have more or fewer."""
    streamer = weights.streamers[place]
    absent = sum(layer.absent for layer in weights.layers if layer.pool.name == place)
    wanted = max(1, min(MOST_STAGES, absent))
    try:
        return streamer.resize(wanted)
    except CapacityError as error:  # one stage will do, only nothing is fetched ahead
        logger.info("place %s has no room for another stage: %s", place, str(error))
        return 0
