"""What starts ranks: the protocol of launchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastic.cluster.rank.client import RankClient


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
    """Options of `ContinuousEngine`."""
    cores: tuple[int, ...] = ()
    """The CPU cores that it may run on; none: all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process, set before the model is loaded."""
    grammars: bool = True
    """Whether it serves structured output, where the model has a tokenizer and end tokens."""


class Launcher(Protocol):
    """Starts ranks. Thread-safe: several `start` may run at once."""

    name: str
    """What `RankStatus.launcher` says."""

    def start(self, spec: RankSpec) -> RankClient:
        """Start a rank, and return when it can serve.

        Raises `ConfigError` for what can never start, `CapacityError` where there is no room, `StateError` for a rank
        that ended meanwhile or did not come in time: in the words of the rank. Then nothing is left of it.
        """

    def close(self) -> None:
        """End all that it has started. Can be called twice."""
