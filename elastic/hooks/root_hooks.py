"""Hooks on a model: the gate, an elastic KV cache, and its growth undone when a forward pass fails."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from elastic.errors import StateError
from elastic.hooks.base import Hook, HookContext, any_requires_grad
from elastic.hooks.interceptor import Args, Kwargs
from elastic.hooks.request_tracking import TrackedRequest
from elastic.memory.backends.streams import capturing, note_current_stream
from elastic.weights import batch_context
from elastic.weights.decoder import EARLIER_NAME, cache_argument, layer_count
from elastic.weights.proxy.compilation import refuse_compilation

_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


class _ForwardCache(threading.local):
    """The cache of a thread's forward pass, the tokens that its layers (ids) held before it, its request."""

    cache: Any = None
    lengths: dict[int, int] = {}
    request: TrackedRequest | None = None
    commits = -1
    """Those that had ended when its last pass began."""
    plain = False
    """Whether all layers were resident then, and none was intercepted, which only commits change."""


class EnterRoot(Hook):
    """Begins a forward of a model: the gate, and an elastic cache where an empty stock one was given.

    Where none was, the model makes its own, and what belongs to it: that becomes elastic before the first layer.
    """

    def __init__(self, root: nn.Module, context: HookContext, between_layers: Sequence[str] = ()) -> None:
        """`between_layers`: arguments by which this root may change hidden states between two layers."""
        self.gate = context.gate
        self._caches = context.caches
        self._weights = context.weights
        self._forward = context.forward
        self._requests = context.requests
        names = list(inspect.signature(type(root).forward).parameters)[1:]
        self._cache_name = cache_argument(root)
        self._between_layers = between_layers
        wanted = (self._cache_name, "use_cache", "input_ids", "inputs_embeds", *_OUTPUTS, *between_layers)
        self._positions = {name: names.index(name) for name in wanted if name in names}
        self._thread = _ForwardCache()
        pools = [streamer.pool for streamer in context.weights.streamers.values()]
        self._gpus = [pool.device for pool in pools if pool.device.type == "cuda"]

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if torch.compiler.is_compiling():
            refuse_compilation()
        if torch._C._is_tracing():
            refuse_compilation("traced")
        if self._gpus and batch_context.thread.graphs is None and capturing():
            _refuse_capture()
        outermost = self.gate.enter(id(module), sys._getframe(2))  # that of the module's call, which outlasts its hooks
        if self.gate.closed:
            self.gate.leave(id(module))
            return
        if outermost:
            for device in self._gpus:
                note_current_stream(device)
            self._weights.require_intact(self.gate.commits)
            self.gate.thread.plain, self.gate.thread.take_cache = self._layers_are_plain(), None
        name = self._cache_name if self._cache_name in kwargs or EARLIER_NAME not in kwargs else EARLIER_NAME
        cache = self._argument(name, args, kwargs)
        if torch.is_grad_enabled() and (
            any_requires_grad(args, kwargs) or any(parameter.requires_grad for parameter in module.parameters())
        ):
            self._caches.become_stock(cache)  # what is cached must not be written in place
        elif cache is not None:
            self._caches.adopt(cache)
        elif self.gate.thread.take_cache is None and self._wants_cache(module, args, kwargs):
            self.gate.thread.take_cache = partial(self._take, args, kwargs, self.gate.thread.plain)
            self.gate.thread.plain = False
        if outermost:
            self._begin(cache, module, args, kwargs)
        if self._between_layers and self._forward.dispatcher is not None:
            given = {name: self._argument(name, args, kwargs) for name in self._between_layers}
            self._forward.dispatcher.note_between_layers(given)

    def end_forward(self, failed: bool) -> None:
        """End a forward. If it failed, its cache holds again what it held before.

        Raises `StateError` if it ended in the middle of a group of replicated layers.
        """
        dispatcher = self._forward.dispatcher
        unfinished = dispatcher is not None and dispatcher.end_forward() and not failed
        failed = failed or unfinished
        cache, lengths, request = self._thread.cache, self._thread.lengths, self._thread.request
        self._thread.cache, self._thread.lengths, self._thread.request = None, {}, None
        self.gate.thread.take_cache = None
        if failed:
            self._caches.rewind(cache, lengths)
        if request is not None:
            self._requests.end(cache, request, failed)
        if unfinished:
            raise StateError("the model left out layers in the middle of a replicated run; evict the replicas")

    def give_back_pages(self, error: BaseException | None) -> None:
        """Where torch ran out of memory, give it the pages that nobody needs, for the next forward.

        Its allocator asks nobody before it raises, so this one is lost.
        """
        if isinstance(error, torch.OutOfMemoryError):
            given = sum(streamer.pool.give_back_unused() for streamer in self._weights.streamers.values())
            error.add_note(
                f"Elastic has now given back {given:,} bytes of pages that nobody used: try again; if that is not "
                "enough, release or swap layers, or give wrap() places with smaller budgets"
            )

    def _begin(self, cache: Any, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Begin an outermost forward pass, over a cache or not yet."""
        dispatcher = self._forward.dispatcher
        if dispatcher is not None:
            dispatcher.begin_forward(whole=bool(dispatcher.replicated) and self._wants_all(module, args, kwargs))
        if cache is not None:
            self._use(cache, args, kwargs)

    def _take(self, args: Args, kwargs: Kwargs, plain: bool, given: Iterable[Any]) -> None:
        """Go on over the cache that the model made as it would without hooks, and set up what belongs to it; or none.

        `plain`: what the pass was before it waited for the cache. `given`: what the first layer is called with.
        """
        self.gate.thread.plain, cache = plain, self._caches.among(given)
        if cache is not None:
            self._caches.adopt(cache)
            self._use(cache, args, kwargs)

    def _use(self, cache: Any, args: Args, kwargs: Kwargs) -> None:
        """Have the outermost forward pass go over a cache."""
        if self._forward.dispatcher is not None:
            self._forward.dispatcher.use(cache)
        self._thread.cache, self._thread.lengths = cache, self._caches.begin_forward(cache)
        if self._requests.observer is not None:
            tokens = self._argument("input_ids", args, kwargs)
            embeddings = self._argument("inputs_embeds", args, kwargs)
            self._thread.request = self._requests.begin(cache, embeddings if tokens is None else tokens)

    def _layers_are_plain(self) -> bool:
        """Return whether layers do nothing but compute. If not, or not so far, leave what a pass that died was in."""
        thread, changed = self._thread, self._thread.commits != self.gate.commits
        if changed or not thread.plain:
            for streamer in self._weights.streamers.values():
                streamer.leave_all()
        if changed:
            special = self._forward.interceptors or any(layer.absent for layer in self._weights.layers)
            thread.plain, thread.commits = not special, self.gate.commits
        return thread.plain

    def _argument(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        if name in kwargs:
            return kwargs[name]
        index = self._positions.get(name, len(args))
        return args[index] if index < len(args) else None

    def _wants_all(self, module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
        """Return whether more than the last hidden states is asked for, or not all layers are to be called."""
        config: Any = module.config
        given = {name: self._argument(name, args, kwargs) for name in _OUTPUTS}
        given |= {name: value for name, value in kwargs.items() if name.startswith("output_")}
        wanted = any(getattr(config, name, False) if value is None else value for name, value in given.items())
        count = layer_count(config.get_text_config(decoder=True))
        return wanted or count != len(self._weights.layers)

    def _wants_cache(self, module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
        use_cache = self._argument("use_cache", args, kwargs)
        if use_cache is None:
            config: Any = module.config
            use_cache = getattr(config.get_text_config(decoder=True), "use_cache", False)
        return bool(use_cache)


@dataclass(eq=False)
class LeaveRoot(Hook):
    """Ends a forward of a model; after one that failed, the cache holds what it held before."""

    _enter: EnterRoot

    def __call__(self, module: nn.Module, args: Args, output: Any) -> None:
        try:
            self._enter.end_forward(failed=output is None)
        finally:
            self._enter.gate.leave(id(module))
        if output is None:
            self._enter.give_back_pages(sys.exception())


def _refuse_capture() -> None:
    """Refuse a CUDA graph of others: its replay would pass no gate, and pages would be taken from under it."""
    raise StateError(
        "a wrapped model cannot be captured in a CUDA graph, because its weights may move; unwrap it first (for "
        "generate_batch: ContinuousBatchingConfig(use_cuda_graph=False))"
    )
