"""What the steps of a change take: bytes of weights, and seconds, about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic.cluster.deployment.choice import Chooser
from elastic.cluster.deployment.status import TransitionStep
from elastic.cluster.fleet.overload.offers import START_S
from elastic.controller.policies.action_costs import ActionCosts
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.configuration import FULL, Configuration
from elastic.planning.estimate.performance import Load
from elastic.types import Restore, Swap


def priced(
    steps: Sequence[TransitionStep], chooser: Chooser, now: Configuration, wanted: Deployment, begin_s: float | None
) -> tuple[TransitionStep, ...]:
    """Return steps with the bytes of weights that they read or copy, and about the seconds that they take.

    `begin_s`: what ranks took to begin; None: it is assumed. What keys and values are copied depends on the requests of
    that moment, and is not counted.
    """
    pages = chooser.estimator(Load(1, 1)).pages
    layers = range(len(chooser.layout.decoder.layers))

    def nbytes(weights: str, of: range = layers) -> int:
        return pages.layers(of, weights, 1) * pages.page_bytes

    def one(step: TransitionStep) -> TransitionStep:
        action: type
        match step.kind:
            case "add":
                begun_s = START_S if begin_s is None else begin_s
                return replace(step, moved_bytes=len(step.devices) * nbytes(FULL), seconds=begun_s)
            case "swap":
                action, moved = Swap, sum(nbytes(step.weights, kept) for kept in step.layers)
            case "restore":
                action, moved = Restore, sum(nbytes(FULL, kept) for kept in step.layers)
            case "part" if now.ranks > 1:
                action, moved = Restore, round((now.ranks - 1) * nbytes(FULL))
            case _:
                return step
        cost = ActionCosts().by_kind[action]
        return replace(step, moved_bytes=moved, seconds=cost.byte_s * moved + cost.pause_s)

    return tuple(one(step) for step in steps)
