"""Hooks on decoder layers: the gate, streaming, interceptors, and the order of the checkpoint.

They run around every layer of every forward pass, behind weights that have filled the processor's caches: each object
that they touch is a miss. So the model's hook says once a pass whether all layers are plain, and then they do nothing.
A hook after the layer is needed even so: nothing else ends what a layer called by itself began.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic.hooks.base import Hook, HookContext, any_requires_grad
from elastic.hooks.interceptor import Args, Kwargs
from elastic.weights import batch_context
from elastic.weights.layer import Absence
from elastic.weights.model import ModelWeights
from elastic.weights.proxy.compilation import refuse_compilation
from elastic.weights.proxy.dropped_source import missing_error


class EnterLayer(Hook):
    """Begins the forward of a decoder layer; by itself, that is a forward pass too.

    A layer whose weights are absent is streamed, or refused if they were dropped, unless the thread passes over it; one
    that computes elsewhere, or not alone, is intercepted. Gradients that no root saw, such as those of a hook on the
    embeddings, are seen here, and so is a cache that the model made.
    """

    def __init__(self, index: int, context: HookContext) -> None:
        self._index = index
        self._gate, self._thread = context.gate, context.gate.thread
        self._caches = context.caches
        self._weights, self._layers = context.weights, context.weights.layers
        self._interceptors = context.forward.interceptors

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        if torch.compiler.is_compiling():
            refuse_compilation()
        if self._thread.plain and not torch.is_grad_enabled():
            return None
        if not self._thread.keys:  # it is called by itself
            if torch._C._is_tracing():
                refuse_compilation("traced")
            self._gate.enter(id(module), sys._getframe(2))
            if self._gate.closed:
                self._gate.leave(id(module))
                return None
        take, self._thread.take_cache = self._thread.take_cache, None
        if take is not None:
            take((*args, *kwargs.values()))
        if torch.is_grad_enabled() and any_requires_grad(args, kwargs):
            for value in (*args, *kwargs.values()):
                self._caches.become_stock(value)
        layer = self._layers[self._index]
        if layer.absent and ((plan := batch_context.thread.plan) is None or self._index in plan.layers):
            if layer.absent is Absence.HOST:
                self._weights.streamer(layer).enter(layer, self._thread.forward)
            elif plan is None or not layer.shards_here:  # by a plan, some of its parts may do
                raise missing_error(layer.name, self._index, sorted(layer.every - layer.shards_here), len(layer.every))
        if self._index not in self._interceptors:
            return None
        for interceptor in self._interceptors[self._index]:
            args, kwargs = interceptor.enter(args, kwargs) or (args, kwargs)
        return args, kwargs


class LeaveLayer(Hook):
    """Ends the forward of a decoder layer, also of one that failed: `output` is None then."""

    def __init__(self, index: int, context: HookContext) -> None:
        self._index = index
        self._gate, self._thread = context.gate, context.gate.thread
        self._weights, self._layers = context.weights, context.weights.layers
        self._interceptors = context.forward.interceptors

    def __call__(self, module: nn.Module, args: Args, output: Any) -> Any:
        if self._thread.plain:
            return None
        layer = self._layers[self._index]
        if layer.absent:
            self._weights.streamer(layer).leave(layer)
        try:
            if self._index in self._interceptors:
                for interceptor in reversed(self._interceptors[self._index]):
                    changed = interceptor.leave(output)
                    output = output if changed is None else changed
                return output
            return None
        finally:
            if id(module) in self._thread.keys:  # it was called by itself
                self._gate.leave(id(module))


@dataclass(eq=False)
class AsInTheCheckpoint(Hook):
    """On a layer whose weights are stored in another order: its `state_dict` has the user's."""

    _index: int
    _weights: ModelWeights

    def __call__(self, module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
        for name, slot in self._weights.slots(self._index).items():
            tensor = state.get(prefix + name)
            if tensor is not None and tensor.stride() != slot.strides:
                state[prefix + name] = torch.empty_strided(
                    tensor.shape, slot.strides, dtype=tensor.dtype, device=tensor.device
                ).copy_(tensor)
