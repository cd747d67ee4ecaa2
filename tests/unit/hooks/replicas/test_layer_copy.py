"""A copy of a layer computes like it, whatever its hooks are beside hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic.hooks.replicas.layer_copy import LayerCopy


class Probe:
    """A part of a layer that is a hook of it, too."""

    def __call__(self, *args: Any) -> None:
        raise AssertionError("no hook of a copy is called")

    def scale(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden


class Passes(nn.Module):
    def forward(self, *args: Any) -> Any:
        return None if len(args) > 1 else 3 * args[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.probe, self.inner = Probe(), Passes()
        self.register_forward_hook(self.probe)
        self.register_forward_pre_hook(self.inner)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(self.probe.scale(hidden))  # type: ignore[no-any-return]


def test_a_hook_that_is_a_part_of_the_layer_is_one_of_the_copy() -> None:
    copied = LayerCopy(Layer()).module
    assert torch.equal(copied(torch.ones(2)), torch.full((2,), 6.0))
