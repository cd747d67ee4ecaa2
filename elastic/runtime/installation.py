"""The hooks, the attention, the caches and the runtime on a Hugging Face model, and how they come off again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from elastic.errors import StateError
from elastic.hooks.base import HookContext, copy_as_usual, copy_plainly
from elastic.hooks.install import ModelHooks
from elastic.kvcache.attention import AttentionSwitch
from elastic.kvcache.decode_table import FILE, measure_ahead, table
from elastic.kvcache.decode_timing import processor
from elastic.kvcache.hf_cache import make_memory
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.pages.background import janitor
from elastic.memory.pages.finalizers import call_at_death, cancel
from elastic.runtime import lifecycle
from elastic.runtime.assemble import assemble, connect
from elastic.runtime.handlers import make_handlers
from elastic.runtime.options import WrapOptions
from elastic.runtime.parts import ModelParts
from elastic.runtime.runtime import Runtime
from elastic.weights.shards.stored_names import blocks_of

GONE = (
    "the wrapped model that this is a part of is gone, and so are layers of it that were not in pages; keep the model "
    "as long as its parts are used, or unwrap it before"
)


@dataclass(eq=False)
class Installation:
    """The undoing of a `wrap`: weights and memory first; the hooks, which hold forward passes up, last."""

    runtime: Runtime
    parts: ModelParts
    weights: ExitStack
    memory: ExitStack
    hooks: ExitStack
    forsaken: weakref.ref[nn.Module] | None = None
    """Has the memory given back when the model goes without `unwrap`."""

    def take_off(self) -> None:
        """Leave the model as it was. Raises `StateError` where that cannot be now."""
        if self.runtime.in_forked_child:
            raise StateError(lifecycle.FORKED)
        with self.runtime.last_safe_point(), self.hooks, self.memory, self.weights:
            pass  # a layer that finds no ordinary memory keeps its pages, as `retained`, and goes on working
        if self.forsaken is not None:  # it would hold what the model's parameters were until the model goes
            cancel(self.forsaken)

    def abandon(self) -> None:
        """Give the memory back of a model that is gone without `unwrap`. Parts of it may live, and be computed with."""
        if self.runtime.in_forked_child:
            return
        self.runtime.close()
        gate, weights = self.runtime.gate, self.parts.weights
        with gate.exclusive():
            if any(layer.absent for layer in weights.layers):
                gate.refusal = GONE
            weights.let_go()
            self.memory.close()


installations: weakref.WeakKeyDictionary[nn.Module, Installation] = weakref.WeakKeyDictionary()
"""Of the wrapped models that live."""


def install(model: nn.Module, options: WrapOptions) -> None:
    """Move the model's memory, then put everything on it; on an error it is as it was."""
    if options.files is not None and not options.files.blocks:
        options.files.blocks.update(blocks_of(model, options.files))
    with ExitStack() as memory, ExitStack() as weights, ExitStack() as hooks:
        choose_decode_kernels(options)
        handlers = partial(make_handlers, options.decoder, options.copy_rate)
        parts = assemble(model, options, partial(_make_kv, options), handlers, memory, weights)
        runtime = Runtime(parts)
        connect(runtime, parts, options, memory)
        attention = AttentionSwitch(model)
        memory.callback(attention.remove)  # it is of the process: also when the model is gone
        _put_on(model, runtime, parts, options, attention, hooks)
        hooks.callback(runtime.close)
        runtime.start(controlled=options.start_controller)
        installed = Installation(runtime, parts, weights.pop_all(), memory.pop_all(), hooks.pop_all())
        installations[model] = installed
    installed.forsaken = call_at_death(model, janitor.submit, partial(janitor.run_beside, installed.abandon))


def choose_decode_kernels(options: WrapOptions) -> None:
    """Decide which kernels compute one new token, by the table beside the variants or by measuring; keep it there."""
    decoder, layouts = options.decoder, options.layouts
    if decoder.config._attn_implementation != "sdpa":
        return
    path = Path(options.variant_cache) / FILE if options.variant_cache is not None else None
    if path is not None and os.path.exists(path):  # False, too, where it cannot be looked for
        table.load(path)
    dtype = next(p.dtype for p in decoder.layers[0].parameters() if p.is_floating_point())
    measure_ahead(decoder.config, dtype, layouts)
    if path is not None:
        table.save(path, map(processor, layouts))


def _make_kv(options: WrapOptions, pools: Sequence[KVPool], homes: Sequence[KVPool], stack: ExitStack) -> KVMemory:
    """Make the memory of Hugging Face caches."""
    return make_memory(options.decoder.config, [(pool, options.layouts[pool.device]) for pool in pools], homes)


def _put_on(
    model: nn.Module,
    runtime: Runtime,
    parts: ModelParts,
    options: WrapOptions,
    attention: AttentionSwitch,
    stack: ExitStack,
) -> None:
    hooks = ModelHooks(HookContext(parts.gate, parts.kv, parts.weights, parts.forward, runtime.generations))
    stack.callback(hooks.remove)
    hooks.install(options.decoder)
    if len(parts.pools) > 1:
        hooks.override(options.decoder.layers)
    attention.install()
    parts.kv.attention_follows = attention.follows_cache
    model.elastic = runtime  # type: ignore[assignment]
    copy_plainly(model, "elastic")
    stack.callback(_detach, weakref.ref(model))


def _detach(model: weakref.ref[nn.Module]) -> None:
    alive = model()
    if alive is not None:
        if isinstance(alive.__dict__.get("elastic"), Runtime | None):
            alive.__dict__.pop("elastic", None)
        copy_as_usual(alive)
