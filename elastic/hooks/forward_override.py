"""A replica in the place of its layer: what hooks cannot do, a layer's own forward that is left out.

One row cannot be shared out. Where a replica's place is the best for it, the replica is called in the thread of the
forward pass, between the layer's own hooks. So each decoder layer has a dispatcher as the `forward` of its instance.
"""

from __future__ import annotations

import threading
from types import MethodType
from typing import Any

import torch
from torch import nn


class _Here(threading.local):
    module: nn.Module | None = None


_here = _Here()


def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of the layer's class, or of what this thread is to call instead, this once."""
    module, _here.module = _here.module, None
    if module is None:
        return type(layer).forward(layer, *args, **kwargs)
    device = next(module.parameters()).device
    with torch.cuda.device(device if device.type == "cuda" else -1):
        return module(*args, **kwargs)


def install_override(layer: nn.Module) -> None:
    """Have a layer dispatch, unless another library has given its instance a forward method."""
    if "forward" not in layer.__dict__:
        layer.__dict__["forward"] = MethodType(forward, layer)


def remove_override(layer: nn.Module) -> None:
    """Undo `install_override`. Can be called twice."""
    if dispatches(layer):
        del layer.__dict__["forward"]


def dispatches(layer: nn.Module) -> bool:
    """Whether another module can be called in this one's place."""
    return getattr(layer.__dict__.get("forward"), "__func__", None) is forward


def call_next_instead(module: nn.Module | None) -> None:
    """The next layer that this thread calls is this one; None: itself."""
    _here.module = module
