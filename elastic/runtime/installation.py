"""The hooks, the attention and the runtime on a model, and how they come off again."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import partial

from torch import nn

from elastic.errors import StateError
from elastic.hooks.base import HookContext
from elastic.hooks.install import ModelHooks
from elastic.kvcache.attention import AttentionSwitch
from elastic.kvcache.hf_cache import ElasticCaches
from elastic.memory.background import janitor
from elastic.runtime.build import build_parts
from elastic.runtime.controller_setup import connect_controller
from elastic.runtime.options import WrapOptions
from elastic.runtime.parts import ModelParts
from elastic.runtime.runtime import Runtime


class Installation:
    """The undoing of a `wrap`: what is on the model first, its memory after."""

    def __init__(self, runtime: Runtime, parts: ModelParts, on_model: ExitStack, memory: ExitStack) -> None:
        self._runtime = runtime
        self._parts = parts
        self._on_model = on_model
        self._memory = memory

    def take_off(self) -> None:
        """Leave the model as it was. Raises `StateError` where that cannot be now."""
        if self._runtime.in_forked_child:
            raise StateError(
                "this model was wrapped before the process forked: its weights lie in pages of the parent, which may "
                "change them; load it again in the child"
            )
        with self._runtime.last_safe_point():
            try:
                self._on_model.close()
            finally:  # a layer that finds no ordinary memory keeps its pages, as `retained`, and goes on working
                self._memory.close()

    def abandon(self) -> None:
        """Give the memory back of a model that is gone without `unwrap`."""
        if not self._runtime.in_forked_child:
            self._runtime.close()
            self._parts.weights.let_go()
            self._memory.close()


installations: weakref.WeakKeyDictionary[nn.Module, Installation] = weakref.WeakKeyDictionary()
"""Of the wrapped models that live."""


def install(model: nn.Module, options: WrapOptions) -> None:
    """Move the model's memory, then put everything on it; on an error it is as it was."""
    with ExitStack() as memory, ExitStack() as on_model:
        parts = build_parts(model, options, memory, on_model)
        runtime = Runtime(parts)
        connect(runtime, parts, options, memory)
        _put_on(model, runtime, parts, options, on_model)
        runtime.start(controlled=options.start_controller)
        installations[model] = Installation(runtime, parts, on_model.pop_all(), memory.pop_all())
    weakref.finalize(model, janitor.submit, installations[model].abandon).atexit = False


def connect(runtime: Runtime, parts: ModelParts, options: WrapOptions, stack: ExitStack) -> None:
    """Have memory tell the runtime what happens by itself, and the controller watch it: all late wires."""
    for kv_pool in parts.kv.pools:
        kv_pool.on_settled = partial(runtime.resize_settled, kv_pool.pool.name)
    for place, streamer in parts.weights.streamers.items():
        streamer.on_spare = partial(parts.broker.give_to_cache, place)
    for pool in parts.pools:
        pool.listeners.append(runtime.pages_came_free)
        stack.callback(pool.listeners.remove, runtime.pages_came_free)
    connect_controller(runtime, parts, options.make_policy, options.slo, stack)


def _put_on(model: nn.Module, runtime: Runtime, parts: ModelParts, options: WrapOptions, stack: ExitStack) -> None:
    caches = ElasticCaches(parts.kv)
    hooks = ModelHooks(HookContext(parts.gate, caches, parts.weights, parts.forward, runtime.generations))
    attention = AttentionSwitch(model)
    stack.callback(hooks.remove)
    hooks.install(options.decoder)
    if len(parts.pools) > 1:
        hooks.install_overrides(options.decoder)
    stack.callback(attention.remove)
    attention.install()
    parts.kv.attention_follows = attention.everywhere
    model.elastic = runtime  # type: ignore[assignment]
    stack.callback(_detach, weakref.ref(model))


def _detach(model: weakref.ref[nn.Module]) -> None:
    alive = model()
    if alive is not None:
        del alive.elastic
