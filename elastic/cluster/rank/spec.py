"""What one rank is to be."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.cluster.control.messages import RankPlace
from elastic.config import Place
from elastic.controller.sensors.nvml import identify
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.errors import ConfigError, is_list, nearest, require
from elastic.memory.places import total_bytes
from elastic.model_files import DTYPES
from elastic.planning.sharding.share import Share
from elastic.wrap import wrap

ENGINE_OPTIONS = {k: v for k, v in inspect.signature(ContinuousEngine).parameters.items() if k != "model"}
_OWN = ("model", "places", "load_shards")  # what a spec says itself
_OPTIONS = {
    "wrap": inspect.signature(wrap).parameters.keys() - set(_OWN),
    "engine": ENGINE_OPTIONS.keys(),
}


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
    dtype: str = "auto"
    """What a model is loaded in from its directory: one of `DTYPES`."""
    lookahead: bool = False
    """Whether it measures what its model's steps cost before it serves, for steps that cost the same in a pipeline."""

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")


def options_of(kind: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options for ranks of a kind, a field of `RankSpec`; None: there are none.

    Raises `ConfigError` for what is no mapping, and for options that there are not.
    """
    given = {} if given is None else given
    is_mapping = isinstance(given, Mapping) and is_list([*given], lambda key: isinstance(key, str))
    require(is_mapping, kind, given, "a mapping from options, which are texts, to their values")
    if kind == "environment":
        is_text = is_list([*given.values()], lambda value: isinstance(value, str))
        require(is_text, kind, given, "a mapping from variables to their values, which are texts")
    allowed = _OPTIONS.get(kind, given.keys())
    if unknown := sorted(given.keys() - allowed):
        itself = f"say {unknown[0]}= of the fleet itself"
        raise ConfigError(
            f"{kind}: no option {unknown[0]!r}; {itself if unknown[0] in _OWN[:2] else nearest(unknown[0], allowed)}"
        )
    return dict(given)


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
