"""The full weight of a parameter whose bytes are not in the slot: absent, or packed at its place."""

from __future__ import annotations

import torch

from elastic.errors import StateError
from elastic.weights.proxy.tensor import FORWARD_FUNCTIONS, on_values, register
from elastic.weights.proxy.weight_home import WeightHome


class HostSource:
    """A weight in host memory; while its absent layer is called, also in a prefetch buffer on the device.

    With a `variant`, the parameter is packed in it at its place, and cannot be written.
    """

    has_gradient = False

    def __init__(self, unit: WeightHome, name: str, variant: str = "") -> None:
        self._unit = unit
        self._name = name
        self._variant = variant

    def value(self) -> torch.Tensor:
        """Return the weight on the device of its place, in the same shape and dtype."""
        prefetched = self._unit.prefetched.tensors
        if prefetched is not None:
            return prefetched[self._name]
        return self.stored().to(self._unit.pool.backend.device, copy=True)

    def copy(self) -> torch.Tensor:
        """Return a copy in host memory, in the same shape and dtype."""
        return self.stored().clone()

    def stored(self) -> torch.Tensor:
        """Return the tensor of the host store, in the same shape and dtype. Not to be written."""
        return self._unit.host_copies[self._name].tensor

    def write(self, value: torch.Tensor) -> None:
        """Replace the weight by `value`, of any shape that broadcasts to it. Raises `StateError` for a packed one."""
        layer = self._unit.name
        if self._variant:
            raise StateError(
                f"{layer}.{self._name} is in variant {self._variant!r}, which does not follow what is written; "
                f"restore it first: model.elastic.restore({layer!r})"
            )
        self._unit.write(self._name, value)

    def describe(self) -> str:
        """Say for an error message where the weight is."""
        state = f"in variant {self._variant!r}" if self._variant else "in host memory"
        return f"of {self._unit.name}, which is {state}"


register(HostSource, FORWARD_FUNCTIONS, on_values)
