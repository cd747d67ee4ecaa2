"""The fixed set of hooks on a model. Actions never change them, only the data they read.

Every root and decoder layer has a pre-hook that enters the gate and a post-hook, called always, that leaves it. The
roots' hooks also see to it that the KV cache is an elastic one, and undo its growth when a forward pass fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic.hooks import forward_override, uncompiled
from elastic.hooks.base import CacheProvider, InertHook
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_state import ForwardState
from elastic.hooks.layer_hooks import AsInTheCheckpoint, EnterLayer, LeaveLayer
from elastic.hooks.request_tracking import CacheRequestTracker
from elastic.hooks.root_hooks import EnterRoot, LeaveRoot
from elastic.weights.decoder import Decoder
from elastic.weights.model import ModelWeights


class ModelHooks:
    """Installs the hooks on a decoder and removes them exactly. Holds no module."""

    def __init__(
        self,
        gate: ForwardGate,
        caches: CacheProvider,
        weights: ModelWeights,
        forward: ForwardState,
        generations: CacheRequestTracker,
    ) -> None:
        self._gate = gate
        self._caches = caches
        self._weights = weights
        self._forward = forward
        self._generations = generations
        self._handles: list[RemovableHandle] = []
        self._dispatching: list[weakref.ref[nn.Module]] = []
        self._uncompiled: list[weakref.ref[nn.Module]] = []

    def install(self, decoder: Decoder) -> None:
        for root in decoder.roots:
            enter = EnterRoot(root, self._gate, self._caches, self._weights, self._forward, self._generations)
            self._add(root, enter, LeaveRoot(enter), with_kwargs=True)
            self._uncompiled.append(weakref.ref(root))
            uncompiled.install(root)
        for index, layer in enumerate(decoder.layers):
            before = EnterLayer(self._gate, self._caches, self._weights, self._forward, index)
            after = LeaveLayer(self._gate, self._weights, self._forward, index)
            self._add(layer, before, after, with_kwargs=True)
            if self._weights.layers[index].reordered:
                hook: Any = AsInTheCheckpoint(self._weights, index)
                self._handles.append(layer.register_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]

    def let_stand_in(self, decoder: Decoder) -> None:
        """Have replicas called in the places of layers, where that is the best place."""
        for layer in decoder.layers:
            forward_override.install_override(layer)
            self._dispatching.append(weakref.ref(layer))

    def remove(self) -> None:
        """Remove the hooks, in reverse. Can be called twice."""
        for modules, take_off in (
            (self._dispatching, forward_override.remove_override),
            (self._uncompiled, uncompiled.remove),
        ):
            while modules:
                module = modules.pop()()
                if module is not None:
                    take_off(module)
        while self._handles:
            self._handles.pop().remove()

    def _add(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any], with_kwargs: bool) -> None:
        _drop_inert_hooks(module)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=with_kwargs))
        self._handles.append(module.register_forward_hook(after, with_kwargs=with_kwargs, always_call=True))


def _drop_inert_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, InertHook)]:
            del hooks[key]
