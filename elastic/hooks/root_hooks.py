"""Hooks on a model: the gate, an elastic KV cache, and its growth undone when a forward pass fails."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import nn

from elastic.errors import StateError
from elastic.hooks.base import CacheProvider, Hook, _any_requires_grad
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_state import ForwardState
from elastic.hooks.interceptor import Args, Kwargs
from elastic.hooks.request_tracking import CacheRequestTracker
from elastic.weights.model import ModelWeights

_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


class EnterRoot(Hook):
    """On a model: the gate, and an elastic cache where none or an empty stock one was given."""

    def __init__(
        self,
        root: nn.Module,
        gate: ForwardGate,
        caches: CacheProvider,
        weights: ModelWeights,
        forward: ForwardState,
        generations: CacheRequestTracker,
    ) -> None:
        self.gate = gate
        self._forward = forward
        self._caches = caches
        self._weights = weights
        self._generations = generations
        self._refuse = torch.compiler.disable(_refuse_compilation)  # type: ignore[no-untyped-call]
        names = list(inspect.signature(type(root).forward).parameters)[1:]
        wanted = ("past_key_values", "use_cache", "input_ids", "inputs_embeds", *_OUTPUTS)
        self._positions = {name: names.index(name) for name in wanted if name in names}
        self._flight = threading.local()  # .cache, .lengths: of the forward in flight, as they were before it

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        if torch.compiler.is_compiling():
            self._refuse()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            _refuse_capture()
        outermost = self.gate.enter(id(module))
        if outermost:
            self._weights.begin_forward()
        cache = self._argument("past_key_values", args, kwargs)
        changed = None
        if _records_gradients(module, args, kwargs):
            self._caches.become_stock(cache)
        elif cache is not None:
            self._caches.adopt(cache)
        elif self._wants_cache(module, args, kwargs):
            cache = self._caches.make(module.config)
            changed = self._with("past_key_values", cache, args, kwargs)
        if outermost and self._forward.dispatcher is not None:
            whole = self._forward.dispatcher.any and self._wants_all(module, args, kwargs)
            self._forward.dispatcher.begin_forward(cache, whole=whole)
        if outermost and cache is not None:
            self._caches.begin_forward(cache)
            self._flight.cache = cache
            self._flight.lengths = {id(layer): layer.get_seq_length() for layer in self._caches.layers(cache)}
            if self._generations.observer is not None:
                tokens = self._argument("input_ids", args, kwargs)
                self._generations.begin(
                    cache, tokens if tokens is not None else self._argument("inputs_embeds", args, kwargs)
                )
        return changed

    def land(self, failed: bool) -> None:
        """The forward is over. If it failed, its cache holds again what it held before.

        Raises `StateError` if it ended in the middle of a run of replicated layers.
        """
        flights = self._forward.dispatcher
        unfinished = flights is not None and flights.end_forward() and not failed
        failed = failed or unfinished
        cache, lengths = getattr(self._flight, "cache", None), getattr(self._flight, "lengths", {})
        self._flight.cache, self._flight.lengths = None, {}
        if failed:
            for layer in self._caches.layers(cache):
                layer.rewind(lengths.get(id(layer), 0))
        if cache is not None and self._generations.observer is not None:
            self._generations.end(cache, failed)
        if unfinished:
            raise StateError("the model left out layers in the middle of a replicated run; evict the replicas")

    def _argument(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        if name in kwargs:
            return kwargs[name]
        index = self._positions.get(name, len(args))
        return args[index] if index < len(args) else None

    def _with(self, name: str, value: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        index = self._positions[name]
        if index < len(args):
            return (*args[:index], value, *args[index + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def _wants_all(self, module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
        """Whether more than the last hidden states is asked for, or not all layers are to be called."""
        config: Any = module.config
        asked = {name: self._argument(name, args, kwargs) for name in _OUTPUTS}
        asked |= {name: value for name, value in kwargs.items() if name.startswith("output_")}
        wanted = any(getattr(config, name, False) if value is None else value for name, value in asked.items())
        count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
        return wanted or count != len(self._weights.layers)

    def _wants_cache(self, module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
        use_cache = self._argument("use_cache", args, kwargs)
        if use_cache is None:
            config: Any = module.config
            use_cache = getattr(config.get_text_config(decoder=True), "use_cache", False)
        return bool(use_cache)


class LeaveRoot(Hook):
    """Leaves the gate; after a forward that failed, the cache holds what it held before."""

    def __init__(self, enter: EnterRoot) -> None:
        self._enter = enter

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        try:
            self._enter.land(failed=output is None)
        finally:
            self._enter.gate.leave(id(module))


def _refuse_compilation() -> None:
    """Called outside the compiled code, where an error is not taken for a reason to run it uncompiled."""
    raise StateError("a wrapped model cannot be compiled; unwrap it first")


def _refuse_capture() -> None:
    """A replay would pass no gate: pages would be taken from under it."""
    raise StateError(
        "a wrapped model cannot be captured in a CUDA graph, because its weights may move; unwrap it first (for "
        "generate_batch: ContinuousBatchingConfig(use_cuda_graph=False))"
    )


def _records_gradients(module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Whether anything in a module, or given to it, is differentiated: what it caches must not be written in place."""
    if not torch.is_grad_enabled():
        return False
    return _any_requires_grad(args, kwargs) or any(p.requires_grad for p in module.parameters())
