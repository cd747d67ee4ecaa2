"""Decoder layers of one model as graphs, each by itself: for passes of which other ranks compute some layers.

Such a pass waits for hidden states between layers, and actions may come while it does. A layer that is computed whole,
with weights of its own place, waits for nobody.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from elastic.engines.executor.graphs.captured_pass import Inputs
from elastic.engines.executor.graphs.model_graphs import ModelGraphs, modules_within
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.replicas.split_rows import hidden_of
from elastic.weights.decoder import PAGED_CACHE


class LayerGraphs(ModelGraphs[tuple[int, int]]):
    """The forward passes of decoder layers in which every sequence has one new token. For threads that take turns."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], gate: ForwardGate) -> None:
        super().__init__(model, gate, list(chain.from_iterable(map(modules_within, layers))))
        self._names = list(inspect.signature(type(layers[0]).forward).parameters)[1:]
        self.most_graphs *= len(layers)
        self.most_kinds *= len(layers)

    def call(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the layer's own forward would, in tensors of the caller's: other threads replay meanwhile.

        The caller sees to it that the layer is computed whole.
        """
        cache = kwargs.get(PAGED_CACHE)
        if self._for_good or cache is None or layer.training or not cache.only_single:
            return type(layer).forward(layer, *args, **kwargs)

        def forward(**inputs: Any) -> Any:
            return type(layer).forward(layer, **_nested(inputs))

        inputs = _flat({**dict(zip(self._names, args, strict=False)), **kwargs})
        output = self.run((index, inputs[self._names[0]].shape[1]), forward, inputs)
        hidden = hidden_of(output).clone()
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _told(self, output: Any) -> torch.Tensor:
        return hidden_of(output)


def _flat(kwargs: dict[str, Any]) -> Inputs:
    """Return keyword arguments with the items of tuples, as of position embeddings, by names of their own."""
    flat: Inputs = {}
    for name, value in kwargs.items():
        if isinstance(value, tuple):
            flat.update({f"{name}.{i}": item for i, item in enumerate(value)})
        else:
            flat[name] = value
    return flat


def _nested(inputs: Inputs) -> dict[str, Any]:
    """Undo `_flat`."""
    kwargs: dict[str, Any] = {}
    for name, value in inputs.items():
        whole, dot, _ = name.partition(".")
        if dot:
            kwargs[whole] = (*kwargs.get(whole, ()), value)
        else:
            kwargs[name] = value
    return kwargs
