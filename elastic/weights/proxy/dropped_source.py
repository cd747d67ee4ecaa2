"""The weight of a parameter whose layer was dropped: nowhere in this process."""

from __future__ import annotations

from typing import NoReturn

import torch

from elastic.errors import StateError


def dropped_error(layer: str, index: int) -> StateError:
    """Make the error of whoever needs the weights of a dropped layer."""
    return StateError(
        f"{layer} is dropped: its weights are nowhere in this process; have them back with rt.fetch({index}, source) "
        f"from a process that has them, or with rt.restore({index}) from the checkpoint"
    )


class DroppedSource:
    """A weight that is not here: its shape and dtype are known, and whoever needs its value is refused."""

    def __init__(self, layer: str, index: int) -> None:
        self._layer = layer
        self._index = index

    def value(self) -> NoReturn:
        """Raise `StateError`."""
        raise dropped_error(self._layer, self._index)

    copy = stored = value

    def write(self, value: torch.Tensor) -> NoReturn:
        """Raise `StateError`, whatever the value: any shape."""
        raise dropped_error(self._layer, self._index)

    def describe(self) -> str:
        """Say for an error message where the weight is."""
        return f"of {self._layer}, which is dropped"
