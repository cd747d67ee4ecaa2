"""A name for what the layers compute with, so that keys and values of other weights are not taken for theirs."""

from __future__ import annotations

import threading
from hashlib import blake2b

from elastic.hooks.forward_gate import ForwardGate
from elastic.weights.model import ModelWeights


class WeightsRecorder:
    """How often the layers of a model got other variants, and a name for those that they have. Looks behind commits."""

    def __init__(self, weights: ModelWeights, gate: ForwardGate) -> None:
        self._model = weights
        self._gate = gate
        self._lock = threading.Lock()  # of those below
        self._commits = gate.commits
        self._seen = _look_at(weights)
        self._weights = 0, _name_of(self._seen[0])

    def weights(self) -> tuple[int, bytes]:
        """Return how often layers were seen to have other weights than before, and the name of the present ones.

        The name [16 bytes] is a hash of what is in which variant; it is empty where all layers, as far as they are
        here, have their full weights, resident or streamed. From any thread.
        """
        if self._gate.commits != self._commits:
            with self._lock:
                self._look()
        return self._weights

    def _look(self) -> None:
        commits = self._gate.commits
        seen = _look_at(self._model)
        if seen != self._seen:
            self._weights, self._seen = (self._weights[0] + 1, _name_of(seen[0])), seen
        self._commits = commits


def _look_at(weights: ModelWeights) -> tuple[tuple[object, ...], int]:
    """Return which parameters of each unit are in which variant, and how often a unit got another precision.

    Precisions in between count: a pass that waits for other ranks may have been computed by them. After a migration of
    a unit that had some, the number is another one, too.
    """
    units = [unit for layer in weights.layers for unit in weights.units(layer.index)]
    packed = tuple((unit.index, unit.part, unit.precision.key) for unit in units if unit.precision.variants)
    return packed, sum(unit.precision_changes for unit in units)


def _name_of(packed: tuple[object, ...]) -> bytes:
    return blake2b(repr(packed).encode(), digest_size=16).digest() if packed else b""
