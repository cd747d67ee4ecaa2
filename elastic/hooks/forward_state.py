"""The state that hooks of a model read in a forward pass beside its weights; actions set it at safe points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.hooks.interceptor import LayerInterceptor


@dataclass(frozen=True)
class ShardTiming:
    """The work of one place in one pass of a batch through a group of replicated layers."""

    place: str
    rows: int
    """Under an engine, tokens."""
    layers: int
    spans_s: tuple[tuple[float, float], ...]
    """Seconds of `time.perf_counter` from beginning to end: of each layer; on CUDA of all together."""

    @property
    def seconds(self) -> float:
        """Seconds in all layers."""
        return sum(stop - start for start, stop in self.spans_s)


class ForwardDispatcher(Protocol):
    """Whoever distributes the forward passes of a model between places, in their threads."""

    replicated: tuple[int, ...]
    """The layers that have replicas."""
    passes: Callable[[], tuple[tuple[ShardTiming, ...], ...]]
    """Returns the timings of the last passes through groups of them, by place, oldest first."""

    def begin_forward(self, *, whole: bool) -> None:
        """Begin an outermost forward pass; with `whole`, its layers must return all rows."""

    def use(self, cache: Any) -> None:
        """Have it go over a cache."""

    def note_between_layers(self, given: Mapping[str, Any]) -> None:
        """Note what a model was given, by which it may change hidden states between layers: these return all rows."""

    def end_forward(self) -> bool:
        """End it, well or not. Returns whether replicated layers were left half way."""


class ForwardState:
    """The interceptors of decoder layers, and the dispatcher of forward passes."""

    def __init__(self) -> None:
        self.interceptors: dict[int, tuple[LayerInterceptor, ...]] = {}
        """By layer, of those that do more than compute with their arguments, the outermost first."""
        self.dispatcher: ForwardDispatcher | None = None
        """None until the first layers are replicated."""

    def replace(self, layer: int, kind: type, new: LayerInterceptor | None, *, outermost: bool) -> None:
        """Have `new` (None: none) as the one interceptor of a kind on a layer, outside or inside all others.

        At a safe point.
        """
        others = [i for i in self.interceptors.pop(layer, ()) if not isinstance(i, kind)]
        chosen = [] if new is None else [new]
        if others or chosen:
            self.interceptors[layer] = (*chosen, *others) if outermost else (*others, *chosen)
