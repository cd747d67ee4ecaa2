"""The unit of weights that a parameter is of, as far as what sits in its slot cares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from elastic.memory.page_pool import PagePool
from elastic.weights.proxy.transfer_cache import TransferCache


class WeightHome(Protocol):
    """A unit of a layer's weights: where it is, and its bytes in the host store."""

    @property
    def name(self) -> str:
        """Of its layer."""
        ...

    @property
    def pool(self) -> PagePool:
        """Its place."""
        ...

    @property
    def compute_device(self) -> torch.device:
        """Where its layer computes."""
        ...

    @property
    def arrivals(self) -> TransferCache:
        """What its parameters are multiplied with, brought to its device."""
        ...

    @property
    def staged(self) -> Mapping[str, torch.Tensor] | None:
        """While absent: the parameters in a stage."""
        ...

    @property
    def entered(self) -> bool:
        """Whether this thread is in a forward of the layer."""
        ...

    def host_tensor(self, name: str) -> torch.Tensor:
        """A full parameter in the host store. Not to be written."""
        ...

    def write(self, name: str, value: torch.Tensor) -> None:
        """Replace a parameter while absent."""
        ...

    def wrote(self) -> None:
        """A parameter was written that is not plain."""
        ...
