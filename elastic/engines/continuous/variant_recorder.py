"""The forms that a model's layers have had at the forward passes of an engine, and a name for their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elastic.hooks.base import Hook
from elastic.hooks.weights_recorder import WeightsRecorder
from elastic.runtime.runtime import Runtime


class VariantRecorder(Hook):
    """A pre-hook of the model, behind those of `wrap`: notes the variants of the layers at each forward pass."""

    def __init__(self, runtime: Runtime, counts: Callable[[], bool]) -> None:
        """`counts` says whether forward passes of the present thread are the engine's."""
        self.forms: dict[tuple[str, ...], int] = {}
        """The layers' variants -> a number, in the order in which they came."""
        self.current = 0
        """Of the present step, or of the last one."""
        self._runtime = runtime
        self.counts = counts
        self.weights = WeightsRecorder(runtime.weights, runtime.gate).weights
        """Returns how often layers got other variants, and a name for those that they have."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        # the pass is behind the gate: no layer changes until it has ended
        if self.counts():
            self.current = self.forms.setdefault(self._runtime.form(), len(self.forms))
            self.weights()
