"""The base of all hooks, which stay with the model that they were installed on, and their view of its KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_state import ForwardState
from elastic.hooks.interceptor import Args, Kwargs
from elastic.hooks.request_tracking import CacheRequestTracker
from elastic.weights.model import ModelWeights


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


class InertHook:
    """A hook on a copy of a model, made by deepcopy or pickle: it does nothing, as the copy is not wrapped."""

    def __call__(self, *args: Any) -> None:
        return None


class Hook:
    """A hook that stays with the module it was installed on."""

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return InertHook, ()


def any_requires_grad(args: Args, kwargs: Kwargs) -> bool:
    """Return whether an argument is a tensor that is differentiated."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values()))
