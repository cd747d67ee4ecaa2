"""Hooks that stage the absent layers of an eager model for the time of their calls.

A compiled model has none, for it would not see them change: there each absent matrix is copied when it is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from elastic.weights.model import ModelWeights


class StreamingHooks:
    """Those on the decoder layers of one model."""

    def __init__(self, layers: Sequence[nn.Module], weights: ModelWeights) -> None:
        self._handles = []
        for index, layer in enumerate(layers):
            self._handles.append(layer.register_forward_pre_hook(_Enter(weights, index)))
            self._handles.append(layer.register_forward_hook(_Leave(weights, index), always_call=True))

    def remove(self) -> None:
        """Take them off. Can be called twice."""
        while self._handles:
            self._handles.pop().remove()


class _Enter:
    def __init__(self, weights: ModelWeights, index: int) -> None:
        self._weights, self._layers, self._index = weights, weights.layers, index

    def __call__(self, module: nn.Module, args: Any) -> None:
        unit = self._layers[self._index]
        if unit.absent:
            self._weights.streamer(unit).enter(unit)


class _Leave:
    def __init__(self, weights: ModelWeights, index: int) -> None:
        self._weights, self._layers, self._index = weights, weights.layers, index

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        unit = self._layers[self._index]
        if unit.absent:
            self._weights.streamer(unit).leave(unit)
