"""What the steps of a change take: bytes of weights, and seconds, about."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastic.cluster.deployment.choice import Chooser
from elastic.cluster.deployment.status import StepKind, TransitionStep
from elastic.cluster.fleet.overload.offers import START_S
from elastic.controller.policies.action_costs import ActionCosts
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.configuration import FULL, Configuration
from elastic.planning.estimate.performance import Load
from elastic.types import Restore, Swap

KEPT = 5
"""Of so many last steps of a kind it is known what they took."""
_ACTIONS: Mapping[StepKind, type] = {"swap": Swap, "restore": Restore, "part": Restore}


class StepPrices:
    """Prices of one deployment's steps: by their bytes, and by what steps of their kind took besides."""

    def __init__(self) -> None:
        self.begin_s: float | None = None
        """What a rank took to begin, the last time; None: it is assumed."""
        self._besides: dict[StepKind, deque[float]] = {}

    def note(self, step: TransitionStep, seconds: float) -> None:
        """Note how long a step took that had a price."""
        if step.kind == "add":
            self.begin_s = seconds / len(step.devices)
            return
        besides = max(0.0, seconds - self._by_bytes(step))
        self._besides.setdefault(step.kind, deque(maxlen=KEPT)).append(besides)

    def priced(
        self, steps: Sequence[TransitionStep], chooser: Chooser, now: Configuration, wanted: Deployment
    ) -> tuple[TransitionStep, ...]:
        """Return steps with the bytes of weights that they read or copy, and about the seconds that they take.

        What keys and values are copied depends on the requests of that moment: it is known from the last such steps.
        """
        pages = chooser.estimator(Load(1, 1)).pages
        layers = range(len(chooser.layout.decoder.layers))

        def nbytes(weights: str, of: range = layers) -> int:
            return pages.layers(of, weights, 1) * pages.page_bytes

        def moved_bytes(step: TransitionStep) -> int:
            match step.kind:
                case "add":
                    return len(step.devices) * nbytes(FULL)
                case "swap":
                    return sum(nbytes(step.weights, kept) for kept in step.layers)
                case "restore":
                    return sum(nbytes(FULL, kept) for kept in step.layers)
                case "part" if now.ranks > 1:
                    return round((now.ranks - 1) * nbytes(FULL))
            return 0

        moved = [replace(step, moved_bytes=moved_bytes(step)) for step in steps]
        return tuple(replace(step, seconds=self._seconds(step)) for step in moved)

    def _seconds(self, step: TransitionStep) -> float:
        besides = self._besides.get(step.kind)
        return self._by_bytes(step) + (statistics.median(besides) if besides else 0.0)

    def _by_bytes(self, step: TransitionStep) -> float:
        """Return what a step takes by the bytes that it moves; ranks begin one after another."""
        if step.kind == "add":
            return len(step.devices) * (START_S if self.begin_s is None else self.begin_s)
        if not step.moved_bytes:
            return 0.0
        cost = ActionCosts().by_kind[_ACTIONS[step.kind]]
        return cost.byte_s * step.moved_bytes + cost.pause_s
