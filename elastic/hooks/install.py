"""The fixed set of hooks on a model. Actions never change them, only the data they read.

Every root and decoder layer has a pre-hook that enters the gate and a post-hook, called always, that leaves it. The
roots' hooks also see to it that the KV cache is an elastic one, and undo its growth when a forward pass fails.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic.errors import StateError
from elastic.hooks.detours import Args, Kwargs
from elastic.hooks.gate import Gate
from elastic.hooks.generations import Generations
from elastic.hooks.stand_in import install, remove
from elastic.hooks.structure import Decoder
from elastic.hooks.weights import ModelWeights

_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


class Layer(Protocol):
    """An elastic cache layer, as far as hooks care."""

    def get_seq_length(self) -> int: ...

    def rewind(self, length: int) -> None: ...


class Caches(Protocol):
    """What the hooks need of the KV cache."""

    def make(self, config: Any) -> Any:
        """A new elastic cache for a model config."""
        ...

    def adopt(self, cache: Any) -> None:
        """Give an empty stock cache elastic layers; leave any other alone."""
        ...

    def begin_forward(self, cache: Any) -> None:
        """A forward pass of this thread uses the cache now."""
        ...

    def layers(self, cache: Any) -> Sequence[Layer]:
        """The elastic layers of any cache."""
        ...


class ModelHooks:
    """Installs the hooks on a decoder and removes them exactly. Holds no module."""

    def __init__(self, gate: Gate, caches: Caches, weights: ModelWeights, generations: Generations) -> None:
        self._gate = gate
        self._caches = caches
        self._weights = weights
        self._generations = generations
        self._handles: list[RemovableHandle] = []
        self._dispatching: list[weakref.ref[nn.Module]] = []

    def install(self, decoder: Decoder) -> None:
        for root in decoder.roots:
            enter = EnterRoot(root, self._gate, self._caches, self._weights, self._generations)
            self._add(root, enter, LeaveRoot(enter), with_kwargs=True)
        for index, layer in enumerate(decoder.layers):
            before, after = EnterLayer(self._gate, self._weights, index), LeaveLayer(self._gate, self._weights, index)
            self._add(layer, before, after, with_kwargs=True)
            if self._weights.layers[index].reordered:
                hook: Any = AsInTheCheckpoint(self._weights, index)
                self._handles.append(layer.register_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]

    def let_stand_in(self, decoder: Decoder) -> None:
        """Have replicas called in the places of layers, where that is the best place."""
        for layer in decoder.layers:
            install(layer)
            self._dispatching.append(weakref.ref(layer))

    def remove(self) -> None:
        """Remove the hooks, in reverse. Can be called twice."""
        while self._dispatching:
            layer = self._dispatching.pop()()
            if layer is not None:
                remove(layer)
        while self._handles:
            self._handles.pop().remove()

    def _add(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any], with_kwargs: bool) -> None:
        _drop_inert_hooks(module)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=with_kwargs))
        self._handles.append(module.register_forward_hook(after, with_kwargs=with_kwargs, always_call=True))


class InertHook:
    """What a hook becomes on a copy of a model, made by deepcopy or pickle: the copy is not wrapped."""

    def __call__(self, *args: Any) -> None:
        return None


class Hook:
    """A hook that stays with the module it was installed on."""

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return InertHook, ()


class EnterLayer(Hook):
    """A forward of a decoder layer by itself is a forward pass too.

    A layer whose weights are absent is staged; one that computes elsewhere, or not alone, makes its detour.
    """

    def __init__(self, gate: Gate, weights: ModelWeights, index: int) -> None:
        self._gate = gate
        self._weights = weights
        self._layers = weights.layers
        self._index = index

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        if not self._gate.inside:  # most often it is: a forward of the whole model is in flight
            self._gate.enter(id(module))
        layer = self._layers[self._index]
        if layer.absent:
            self._weights.streamer(layer).enter(layer)
        detours = self._weights.detours.get(self._index)
        if not detours:
            return None
        for detour in detours:
            args, kwargs = detour.enter(args, kwargs) or (args, kwargs)
        return args, kwargs


class LeaveLayer(Hook):
    def __init__(self, gate: Gate, weights: ModelWeights, index: int) -> None:
        self._gate = gate
        self._weights = weights
        self._layers = weights.layers
        self._index = index

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        layer = self._layers[self._index]
        if layer.absent:
            self._weights.streamer(layer).leave(layer)
        try:
            for detour in reversed(self._weights.detours.get(self._index, ())):
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


class EnterRoot(Hook):
    """On a model: the gate, and an elastic cache where none or an empty stock one was given."""

    def __init__(
        self, root: nn.Module, gate: Gate, caches: Caches, weights: ModelWeights, generations: Generations
    ) -> None:
        self.gate = gate
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
        outermost = self.gate.enter(id(module))
        if outermost:
            self._weights.begin_forward()
        cache = self._argument("past_key_values", args, kwargs)
        changed = None
        if cache is None:
            if self._wants_cache(module, args, kwargs):
                cache = self._caches.make(module.config)
                changed = self._with("past_key_values", cache, args, kwargs)
        elif not _records_gradients(module):
            self._caches.adopt(cache)
        if outermost and self._weights.flights is not None:
            whole = self._weights.flights.any and self._wants_all(module, args, kwargs)
            self._weights.flights.begin_forward(cache, whole=whole)
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
        flights = self._weights.flights
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
        return bool(use_cache) and not _records_gradients(module)


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


def _records_gradients(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _drop_inert_hooks(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, InertHook)]:
            del hooks[key]
