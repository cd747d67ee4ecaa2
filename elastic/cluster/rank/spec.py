"""What one rank is to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.cluster.control.messages import RankPlace
from elastic.config import Place
from elastic.controller.sensors.nvml import identify
from elastic.memory.places import total_bytes
from elastic.planning.sharding.share import Share


@dataclass(frozen=True)
class RankSpec:
    """What one rank is to be. It can be pickled where `model` is a path."""

    name: str
    model: Any
    """A model's directory; within a process also a model, plain or wrapped."""
    places: tuple[str, ...] = ()
    """Memory that it may use, such as `cpu#0=64MiB`; none: as `elastic.wrap` chooses."""
    wrap: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `elastic.wrap`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of `ContinuousEngine`; `grammars="llguidance"` is a compiler over the tokenizer in the directory."""
    cores: tuple[int, ...] = ()
    """The CPU cores that it may run on, with a thread for each; none: all."""
    threads: int | None = None
    """Threads that it computes with at the most, where it has no cores of its own; None: as many as torch chooses."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process, set before the model is loaded."""
    share: Share | None = None
    """What it has of a model that several ranks begin to serve together; None: all of it."""
    unit: int = 0
    """Which ranks these are: those with the same number."""
    lookahead: bool = False
    """Whether it measures what its model's steps cost before it serves, for steps that cost the same in a pipeline."""


def rank_places(texts: Sequence[str]) -> tuple[RankPlace, ...]:
    """Return what a fleet is told of places, to be asked for by the process that has them."""
    places = [Place.parse(text) for text in texts]
    return tuple(
        RankPlace(text, place.name, _memory(place), place.budget_bytes, total_bytes(place.device))
        for text, place in zip(texts, places, strict=True)
    )


def _memory(place: Place) -> str:
    """Name the memory that a place is a part of; a GPU has another number in each process."""
    if place.device.type != "cuda":
        return place.device.type
    gpu = identify(place.device.index or 0)
    return gpu.uuid or gpu.bus_id or str(place.device)
