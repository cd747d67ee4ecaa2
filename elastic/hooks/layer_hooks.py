"""Hooks on decoder layers: the gate, streaming, detours, and the order of the checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic.hooks.base import CacheProvider, Hook, _any_requires_grad
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_state import ForwardState
from elastic.hooks.interceptor import Args, Kwargs
from elastic.weights.model import ModelWeights


class EnterLayer(Hook):
    """A forward of a decoder layer by itself is a forward pass too.

    A layer whose weights are absent is staged; one that computes elsewhere, or not alone, makes its detour. Gradients
    that no root saw, such as those of a hook on the embeddings, are seen here.
    """

    def __init__(
        self, gate: ForwardGate, caches: CacheProvider, weights: ModelWeights, forward: ForwardState, index: int
    ) -> None:
        self._gate = gate
        self._caches = caches
        self._forward = forward
        self._weights = weights
        self._layers = weights.layers
        self._index = index

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        if not self._gate.inside:  # most often it is: a forward of the whole model is in flight
            self._gate.enter(id(module))
        if torch.is_grad_enabled() and _any_requires_grad(args, kwargs):
            for given in (*args, *kwargs.values()):
                self._caches.become_stock(given)
        layer = self._layers[self._index]
        if layer.absent:
            self._weights.streamer(layer).enter(layer)
        detours = self._forward.interceptors.get(self._index)
        if not detours:
            return None
        for detour in detours:
            args, kwargs = detour.enter(args, kwargs) or (args, kwargs)
        return args, kwargs


class LeaveLayer(Hook):
    def __init__(self, gate: ForwardGate, weights: ModelWeights, forward: ForwardState, index: int) -> None:
        self._gate = gate
        self._forward = forward
        self._weights = weights
        self._layers = weights.layers
        self._index = index

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        layer = self._layers[self._index]
        if layer.absent:
            self._weights.streamer(layer).leave(layer)
        try:
            for detour in reversed(self._forward.interceptors.get(self._index, ())):
                changed = detour.leave(output)
                output = output if changed is None else changed
            return output
        finally:
            self._gate.leave(id(module))


class AsInTheCheckpoint(Hook):
    """On a layer whose weights are stored in another order: its `state_dict` has the user's."""

    def __init__(self, weights: ModelWeights, index: int) -> None:
        self._weights = weights
        self._index = index

    def __call__(self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
        for name, slot in self._weights.slots(self._index).items():
            tensor = state.get(prefix + name)
            if tensor is not None and tensor.stride() != slot.strides:
                state[prefix + name] = torch.empty_strided(
                    tensor.shape, slot.strides, dtype=tensor.dtype, device=tensor.device
                ).copy_(tensor)
