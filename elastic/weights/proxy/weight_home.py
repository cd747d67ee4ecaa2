"""The unit of weights that a parameter is of, as far as the proxy in its slot needs it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

import torch

from elastic.memory.host_store import HostTensor
from elastic.memory.pages.page_pool import PagePool
from elastic.weights.proxy.transfer_cache import TransferCache


class PrefetchedTensors(threading.local):
    """The full parameters of an absent unit in a prefetch buffer, for the thread that is inside its layer."""

    tensors: Mapping[str, torch.Tensor] | None = None


class WeightHome(Protocol):
    """A unit of a layer's weights: where it is, and its bytes in the host store."""

    name: str
    """The layer's."""
    pool: PagePool
    """Its place's."""
    compute_device: torch.device
    """Where its layer computes."""
    transfers: TransferCache
    """What its parameters are multiplied with, brought to its device."""
    prefetched: PrefetchedTensors
    host_copies: dict[str, HostTensor]
    """Its full parameters in the host store, by name."""
    writes: int
    """How often a parameter was written that is not plain."""

    def write(self, name: str, value: torch.Tensor) -> None:
        """Replace a parameter while absent: `value`, any shape, is broadcast and cast to it."""

    def overwritten(self, name: str) -> None:
        """Note that a parameter was written in the place where it lies: what the host store has of it is old."""
