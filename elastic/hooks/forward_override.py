"""What hooks cannot do: a module's own forward that is left out, for a replica, or because other ranks compute of it.

One row cannot be shared out. Where a replica's place is the best for it, the replica is called in the thread of the
forward pass, between the layer's own hooks. A layer that another rank computes is passed over; of one that several
ranks compute, some modules compute a part. So each decoder layer of a model that may need it, and each such module, has
a dispatcher as the `forward` of its instance.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from elastic.weights import batch_context


def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module's class, or what this thread's plan or share of a batch asks for instead."""
    plan = batch_context.thread.plan
    if plan is not None:
        return plan.call(layer, args, kwargs)
    share = batch_context.thread.share
    if share is None or share.replica is None:
        return type(layer).forward(layer, *args, **kwargs)
    replica, share.replica = share.replica, None
    device = next(replica.parameters()).device
    with torch.cuda.device(device if device.type == "cuda" else -1):
        return replica(*args, **kwargs)


def install_override(layer: nn.Module) -> bool:
    """Have a module dispatch, unless its instance has a forward method already; return whether it had none."""
    if "forward" in layer.__dict__:
        return False
    layer.__dict__["forward"] = MethodType(forward, layer)
    return True


def remove_override(layer: nn.Module) -> None:
    """Undo `install_override`. Can be called twice."""
    if dispatches(layer):
        del layer.__dict__["forward"]


def dispatches(layer: nn.Module) -> bool:
    """Return whether this module's own forward can be left out."""
    return getattr(layer.__dict__.get("forward"), "__func__", None) is forward
