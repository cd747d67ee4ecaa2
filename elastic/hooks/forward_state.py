"""What the hooks of a model read in a forward pass beside its weights; actions set it at safe points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.hooks.interceptor import LayerInterceptor


@dataclass(frozen=True)
class ShardTiming:
    """What one place did in one pass of a batch through a run of replicated layers."""

    place: str
    rows: int
    """Under an engine, tokens."""
    layers: int
    spans_s: tuple[tuple[float, float], ...]
    """Seconds of `time.perf_counter` from beginning to end: of each layer; on CUDA of all together."""

    @property
    def seconds(self) -> float:
        return sum(stop - start for start, stop in self.spans_s)


class DispatcherRegistry(Protocol):
    """Hears of the forward passes of a model, in their threads."""

    @property
    def any(self) -> bool:
        """Whether it cares."""
        ...

    def begin_forward(self, cache: Any, *, whole: bool) -> None:
        """An outermost forward pass of the model begins; `whole`: what its layers return for all rows is wanted."""
        ...

    def end_forward(self) -> bool:
        """It is over, well or not. Returns whether it has ended in the middle of something."""
        ...

    def passes(self) -> tuple[tuple[ShardTiming, ...], ...]:
        """When the places computed their parts of the last passes, oldest first."""
        ...


class ForwardState:
    """What decoder layers do beside computing, and who hears of forward passes."""

    def __init__(self) -> None:
        self.interceptors: dict[int, tuple[LayerInterceptor, ...]] = {}
        """Of layers that do more than compute with what they are given, the outermost first."""
        self.dispatcher: DispatcherRegistry | None = None
        """Hears of the forward passes of the model."""

    def interceptor(self, layer: int, detours: Sequence[LayerInterceptor]) -> None:
        """A layer makes these detours from now on, the outermost first. At a safe point."""
        self.interceptors.pop(layer, None)
        if detours:
            self.interceptors[layer] = tuple(detours)
