"""The weight of a parameter whose layer was dropped, or parts of it: nowhere in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from elastic.errors import StateError


def dropped_error(layer: str, index: int) -> StateError:
    """Make the error of whoever needs the weights of a dropped layer."""
    return StateError(
        f"{layer} is dropped: its weights are nowhere in this process; have them back with rt.fetch({index}, source) "
        f"from a process that has them, or with rt.restore({index}) from the checkpoint"
    )


def missing_error(layer: str, index: int, missing: Sequence[int], of: int) -> StateError:
    """Make the error of whoever needs some of the parts that a layer is cut into, where these are dropped."""
    if len(missing) == of:
        return dropped_error(layer, index)
    shards = tuple(index * of + part for part in missing)
    return StateError(
        f"shards {shards} of {layer} are dropped: have them back with rt.fetch((), source, shards={shards}) from a "
        f"process that has them, or with rt.restore({index}) from the checkpoint"
    )


@dataclass(eq=False)
class DroppedSource:
    """A weight that is not here: its shape and dtype are known, and whoever needs its value is refused."""

    has_gradient = False
    layer: str
    index: int
    missing: Sequence[int]
    """The parts of the layer that are not here, of so many."""
    of: int

    def value(self, value: torch.Tensor | None = None) -> NoReturn:
        """Raise `StateError`, also where it would be replaced by a `value` of any shape."""
        raise missing_error(self.layer, self.index, self.missing, self.of)

    copy = stored = write = value

    def describe(self) -> str:
        """Say for an error message where the weight is."""
        return f"of {self.layer}, which is dropped"
