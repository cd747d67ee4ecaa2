"""Hooks that stream the absent layers of an eager model for the time of their calls.

A compiled model has none, for it would not see them change: there each absent matrix is copied when it is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic.hooks.forward_gate import ForwardGate
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights


class StreamingHooks:
    """Those on the absent decoder layers of one model. A layer without hooks is called faster."""

    def __init__(self, layers: Sequence[nn.Module], weights: ModelWeights, gate: ForwardGate) -> None:
        self._layers = layers
        self._weights = weights
        self._gate = gate
        self.commits = -1
        """Of the gate, when the layers were last looked at: later ones ask for `update`."""
        self._handles: dict[int, tuple[RemovableHandle, RemovableHandle]] = {}
        self.update()

    def update(self) -> None:
        """Have hooks on the layers that are absent now, and on no others. While no action can commit."""
        self.commits = self._gate.commits
        absent = {unit.index: unit for unit in self._weights.layers if unit.absent}
        if absent.keys() != self._handles.keys():
            for index in absent.keys() - self._handles.keys():
                layer, unit = self._layers[index], absent[index]
                before = layer.register_forward_pre_hook(partial(self._stream, unit, "enter"))
                behind = layer.register_forward_hook(partial(self._stream, unit, "leave"), always_call=True)
                self._handles[index] = before, behind
            self.remove(self._handles.keys() - absent.keys())

    def remove(self, indices: Iterable[int] | None = None) -> None:
        """Take them off some layers; None: off all. Can be called twice."""
        for index in set(self._handles) if indices is None else indices:
            for handle in self._handles.pop(index):
                handle.remove()

    def _stream(self, unit: WeightUnit, word: Literal["enter", "leave"], *_: Any) -> None:
        """Have a layer's weights be there from before its call until after it."""
        if unit.absent:
            streamer = self._weights.streamer(unit)
            streamer.enter(unit) if word == "enter" else streamer.leave(unit)
