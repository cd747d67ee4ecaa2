"""A replica in the place of its layer: what hooks cannot do, a layer's own forward that is left out.

One row cannot be shared out. Where a replica's place is the best for it, the replica is called in the thread of the
forward pass, between the layer's own hooks. So each decoder layer has a dispatcher as the `forward` of its instance.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from elastic.weights import batch_context


def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of the layer's class, or the replica that this thread's share of a batch asks for, once."""
    share = batch_context.thread.share
    if share is None or share.replica is None:
        return type(layer).forward(layer, *args, **kwargs)
    replica, share.replica = share.replica, None
    device = next(replica.parameters()).device
    with torch.cuda.device(device if device.type == "cuda" else -1):
        return replica(*args, **kwargs)


def install_override(layer: nn.Module) -> None:
    """Have a layer dispatch, unless another library has given its instance a forward method."""
    if "forward" not in layer.__dict__:
        layer.__dict__["forward"] = MethodType(forward, layer)


def remove_override(layer: nn.Module) -> None:
    """Undo `install_override`. Can be called twice."""
    if dispatches(layer):
        del layer.__dict__["forward"]


def dispatches(layer: nn.Module) -> bool:
    """Return whether a replica can be called in this layer's place."""
    return getattr(layer.__dict__.get("forward"), "__func__", None) is forward
