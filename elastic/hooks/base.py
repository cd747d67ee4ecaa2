"""The base of all hooks, which copies of a model do not have, and their view of its KV cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_override import is_override
from elastic.hooks.forward_state import ForwardState
from elastic.hooks.interceptor import Args, Kwargs
from elastic.hooks.request_tracking import CacheRequestTracker
from elastic.weights.model import ModelWeights

HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The attributes of a module in which torch keeps its hooks, by numbers that no two hooks of a process share."""
_REDUCE = "__reduce_ex__"
"""Of an instance: what `deepcopy` and pickle ask first."""


class CacheProvider(Protocol):
    """The KV caches of a model, as far as hooks need them."""

    def among(self, values: Iterable[Any]) -> Any:
        """Return the first of these values that is a KV cache; None if none is."""

    def adopt(self, cache: Any) -> None:
        """Give an empty stock cache elastic layers; leave any other alone."""

    def become_stock(self, cache: Any) -> None:
        """Give any cache stock layers in place of elastic ones, with the same contents."""

    def begin_forward(self, cache: Any) -> dict[int, int]:
        """Mark a cache as used by a forward pass of this thread; return what its layers (ids) hold, in tokens."""

    def rewind(self, cache: Any, lengths: Mapping[int, int]) -> None:
        """Have the elastic layers of any cache hold so many tokens again, those that are not named none."""


@dataclass(frozen=True)
class HookContext:
    """Everything of a wrapped model that its hooks work on."""

    gate: ForwardGate
    caches: CacheProvider
    weights: ModelWeights
    forward: ForwardState
    requests: CacheRequestTracker


class Hook:
    """A hook that stays with the module it was installed on; a copy of it does nothing.

    With `copy_plainly`, copies of the module have none, unless its class makes them in its own way.
    """

    def __call__(self, *args: Any) -> Any:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def copy_plainly(module: nn.Module, *names: str) -> None:
    """Have copies and pickles of a module lack its hooks of Elastic's, and what it has by these names."""
    module.__dict__[_REDUCE] = partial(_reduce_plainly, module, {*names, _REDUCE})


def copy_as_usual(module: nn.Module) -> None:
    """Undo `copy_plainly`. Can be called twice."""
    module.__dict__.pop(_REDUCE, None)


def _reduce_plainly(module: nn.Module, left_out: Collection[str], protocol: Any) -> Any:
    """Return what `deepcopy` and pickle make a copy of."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    if len(reduced) < 3 or not isinstance(reduced[2], dict):  # its class has a way of its own
        return reduced
    constructor, arguments, state, *more = reduced
    plain = {name: value for name, value in state.items() if name not in left_out and not is_override(value)}
    tables = {name: plain[name] for name in HOOK_TABLES if plain.get(name)}
    keys = {key for table in tables.values() for key, hook in table.items() if isinstance(hook, Hook)}
    for name, table in tables.items():
        plain[name] = OrderedDict((key, value) for key, value in table.items() if key not in keys)
    return constructor, arguments, plain, *more


def any_requires_grad(args: Args, kwargs: Kwargs) -> bool:
    """Return whether an argument is a tensor that is differentiated."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values()))
