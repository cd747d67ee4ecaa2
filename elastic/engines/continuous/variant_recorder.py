"""The forms that a model's layers have had at the forward passes of an engine, and a name for their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch

from elastic.hooks.base import Hook
from elastic.runtime.runtime import Runtime


class VariantRecorder(Hook):
    """A pre-hook of the model, behind those of `wrap`: notes the variants of the layers at each forward pass."""

    def __init__(self, runtime: Runtime, counts: Callable[[], bool]) -> None:
        """`counts` says whether forward passes of the present thread are the engine's."""
        self.forms: dict[tuple[str, ...], int] = {}
        """The layers' variants -> a number, in the order in which they came."""
        self.current = 0
        self._runtime = runtime
        self._counts = counts
        self._lock = threading.Lock()  # of those below
        self._commits = runtime.gate.commits
        self._seen = runtime.weights.packed, runtime.weights.precision_changes
        self._weights = 0, _name_of(self._seen[0])

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        # the pass is behind the gate: no layer changes until it has ended
        if self._counts():
            self.current = self.forms.setdefault(self._runtime.form(), len(self.forms))
            self.weights()

    def weights(self) -> tuple[int, bytes]:
        """Return how often layers were seen to have other weights than before, and the name of the present ones.

        The name [16 bytes] is a hash of what is in which variant; it is empty where all layers, as far as they are
        here, have their full weights, resident or streamed. From any thread.
        """
        if self._runtime.gate.commits != self._commits:
            with self._lock:
                self._look()
        return self._weights

    def _look(self) -> None:
        commits, weights = self._runtime.gate.commits, self._runtime.weights
        # other ones in between count: a pass that waits for other ranks may have been computed by them
        seen = weights.packed, weights.precision_changes
        if seen != self._seen:
            self._weights, self._seen = (self._weights[0] + 1, _name_of(seen[0])), seen
        self._commits = commits


def _name_of(packed: tuple[object, ...]) -> bytes:
    return blake2b(repr(packed).encode(), digest_size=16).digest() if packed else b""
