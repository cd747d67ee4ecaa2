"""What hooks cannot do: a module's own forward that is left out, for a replica, other ranks, or a graph of it.

One row cannot be shared out. Where a replica's place is the best for it, the replica is called in the thread of the
forward pass, between the layer's own hooks. A layer that another rank computes is passed over; of one that several
ranks compute, some modules compute a part; a matrix whose inputs lie outermost has a product of its own; a whole model
that was captured is replayed. So each module that may need it has a dispatcher as the `forward` of its instance.
Roots have some other methods of Elastic's on their instances, too: these come and go by the same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from elastic.weights import batch_context
from elastic.weights.shards.transposed_linear import transposed_linear

_dispatchers: dict[tuple[type, Callable[..., Any]], Callable[..., Any]] = {}
"""By the class of a module and what is called for it: functions with the signature of the class's own forward, which
transformers looks at."""
_overrides: list[Callable[..., Any]] = []
"""What `override` was given."""


def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module's class, or what this thread's plan or share of a batch asks for instead."""
    plan = batch_context.thread.plan
    if plan is not None:
        return plan.call(layer, args, kwargs)
    share = batch_context.thread.share
    if share is None or share.replica is None:
        return own_forward(layer, *args, **kwargs)
    replica, share.replica = share.replica, None
    device = next(replica.parameters()).device
    with torch.cuda.device(device if device.type == "cuda" else -1):
        return replica(*args, **kwargs)


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module's class, or compute the same by the fastest product for how a weight lies."""
    if type(module) is nn.Linear:
        return _linear(module, *args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


def _linear(module: Any, input: torch.Tensor) -> torch.Tensor:
    return transposed_linear(input, module.weight, module.bias)


def root_forward(root: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a model's class, or what this thread has in its place."""
    graphs = batch_context.thread.graphs
    return type(root).forward(root, *args, **kwargs) if graphs is None else graphs(root, args, kwargs)


def install_override(module: nn.Module, called: Callable[..., Any] = forward) -> bool:
    """Have a module call `forward`, or of a whole model `root_forward`, in the place of its class's own.

    Returns whether it does: not if its instance has a forward method already.
    """
    kind = type(module)
    if (kind, called) not in _dispatchers:

        @functools.wraps(kind.forward)
        def dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return called(module, *args, **kwargs)

        _dispatchers[kind, called] = dispatch
    return override(module, "forward", _dispatchers[kind, called])


def override(module: nn.Module, name: str, function: Callable[..., Any]) -> bool:
    """Have a module call a function in the place of a method of its class; return whether it does.

    Not if its instance has such a method already.
    """
    if name in module.__dict__:
        return False
    if not any(function is each for each in _overrides):
        _overrides.append(function)
    module.__dict__[name] = MethodType(function, module)
    return True


def remove_override(module: nn.Module, name: str = "forward") -> None:
    """Undo `override`. Can be called twice."""
    if is_override(module.__dict__.get(name)):
        del module.__dict__[name]


def dispatches(layer: nn.Module) -> bool:
    """Return whether this module's own forward can be left out."""
    return is_override(layer.__dict__.get("forward"))


def is_override(value: Any) -> bool:
    """Return whether an attribute is what `override` puts on a module."""
    function = getattr(value, "__func__", None)
    return any(function is each for each in _overrides)
