"""The fixed set of hooks on a model. Actions never change them, only the data they read.

Every root and decoder layer has a pre-hook that enters the gate and a post-hook, called always, that leaves it. The
roots' hooks also see to it that the KV cache is an elastic one, and undo its growth when a forward pass fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic.hooks.base import HookContext, copy_as_usual, copy_plainly
from elastic.hooks.forward_override import install_override, override, remove_override
from elastic.hooks.layer_hooks import AsInTheCheckpoint, EnterLayer, LeaveLayer
from elastic.hooks.root_hooks import EnterRoot, LeaveRoot
from elastic.hooks.uncompiled import get_compiled_call
from elastic.weights.decoder import Decoder, between_layers
from elastic.weights.proxy.conversion import convert
from elastic.weights.shards.transposed_linear import has_kernel


class ModelHooks:
    """Installs the hooks on a decoder and removes them exactly. Holds no module."""

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._handles: list[RemovableHandle] = []
        self._undo: list[tuple[Callable[[nn.Module], None], weakref.ref[nn.Module]]] = []

    def install(self, decoder: Decoder) -> None:
        """Put the hooks on every root and decoder layer."""
        for root in decoder.roots:
            enter = EnterRoot(root, self._context, between_layers(decoder) if root is decoder.roots[-1] else ())
            self._add(root, enter, LeaveRoot(enter))
            for name, method in (("_apply", convert), ("get_compiled_call", get_compiled_call)):
                if hasattr(type(root), name) and override(root, name, method):
                    self._undo.append((partial(remove_override, name=name), weakref.ref(root)))
        for index, layer in enumerate(decoder.layers):
            self._add(layer, EnterLayer(index, self._context), LeaveLayer(index, self._context))
            unit = self._context.weights.layers[index]
            reordered = [slot for n, slot in unit.slots.items() if unit.layout.parameters[n].strides != slot.strides]
            if reordered:
                hook: Any = AsInTheCheckpoint(index, self._context.weights)
                self._handles.append(layer.register_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]
            homes = (slot.homes for slot in reordered if has_kernel(unit.pool.backend.device, slot.parameter.dtype))
            self.override(module for module, _ in chain.from_iterable(homes) if type(module) is nn.Linear)

    def remove(self) -> None:
        """Remove the hooks, in reverse. Can be called twice."""
        while self._undo:
            undo, reference = self._undo.pop()
            module = reference()
            if module is not None:
                undo(module)
        while self._handles:
            self._handles.pop().remove()

    def override(self, modules: Iterable[nn.Module]) -> None:
        """Have modules dispatch: layers, so that replicas are called in their places where these are the best ones."""
        for module in modules:
            if install_override(module):
                self._undo.append((remove_override, weakref.ref(module)))
                self._keep_copies_plain(module)

    def _add(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._keep_copies_plain(module)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _keep_copies_plain(self, module: nn.Module) -> None:
        copy_plainly(module)
        self._undo.append((copy_as_usual, weakref.ref(module)))
