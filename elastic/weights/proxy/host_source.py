"""Where the value of a weight comes from whose bytes are not in the slot."""

from __future__ import annotations

import torch

from elastic.errors import StateError
from elastic.weights.proxy.tensor import FORWARD_FUNCTIONS, on_values, register
from elastic.weights.proxy.weight_home import WeightHome


class HostBacked:
    """A parameter whose full bytes the host store has."""

    def __init__(self, layer: WeightHome, name: str) -> None:
        self._layer = layer
        self._name = name

    def value(self) -> torch.Tensor:
        return self.copy().to(self._layer.pool.backend.device)

    def copy(self) -> torch.Tensor:
        return self._layer.host_tensor(self._name).clone()

    def stored(self) -> torch.Tensor:
        return self._layer.host_tensor(self._name)


class HostSource(HostBacked):
    """A weight that is in host memory only; while its layer is called, also in a stage on the device."""

    def value(self) -> torch.Tensor:
        staged = self._layer.staged
        if staged is not None and self._layer.entered:
            return staged[self._name]
        return super().value()

    def write(self, value: torch.Tensor) -> None:
        self._layer.write(self._name, value)

    def describe(self) -> str:
        return f"of {self._layer.name}, which is in host memory"


class PackedFallbackSource(HostBacked):
    """The full weight of a parameter that is in a variant at its place."""

    def __init__(self, layer: WeightHome, name: str, variant: str) -> None:
        super().__init__(layer, name)
        self._variant = variant

    def write(self, value: torch.Tensor) -> None:
        layer = self._layer.name
        raise StateError(
            f"{layer}.{self._name} is in variant {self._variant!r}, which does not follow what is written; restore it "
            f"first: model.elastic.restore({layer!r})"
        )

    def describe(self) -> str:
        return f"of {self._layer.name}, which is in variant {self._variant!r}"


register(HostSource, FORWARD_FUNCTIONS, on_values)
