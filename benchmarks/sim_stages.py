"""What the simulator is told of ranks that are stages, fitted to their steps for one request at a time, and for two."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sim_fit import FEW, MOST_BYTES_S, Fitted, StagedSteps, beside
from sim_runs import HIDDEN, LAYERS, TimedStep
from sim_shared import replayed

from elastic.engines.pipeline.path import LayerPath
from elastic.sim.mechanisms.model import Links

ROUNDS = 3
"""In which what ranks take from each other is changed by what the simulator makes of it."""


def with_stages(fitted: Fitted, calibrations: Mapping[str, StagedSteps]) -> Fitted:
    """Fit what is between two stages, and around each, to steps of one request at a time.

    Steps of one token tell what is fixed, those of prompts what there is for each token. Of what is fixed stages
    compute what they were busy longer than one rank would have been; the rest is waited for. What home does beside its
    turn was measured: `with_home`. What computing takes longer while both instances have steps, besides what the
    simulator has it wait, is what their ranks take from each other.
    """
    fixed_s, token_s, busy_s = [], [], []
    for name, (steps, bubbles, *_) in calibrations.items():
        costs_s = fitted.at_pace_of([name]).costs_s(steps)
        more_s = [
            (sum(count for _, count in step.chunks), step.seconds - cost_s)
            for step, cost_s in zip(steps, costs_s, strict=True)
        ]
        decoded_s = statistics.median(seconds for tokens, seconds in more_s if tokens == 1)
        fixed_s.append(decoded_s)
        token_s += [(seconds - decoded_s) / tokens for tokens, seconds in more_s if tokens > 1]
        home_s = math.fsum(step.seconds - step.turn_s for step in steps if step.turn_s)
        whole_s = math.fsum(step.seconds for step in steps)
        computed_s = whole_s - math.fsum(seconds for _, seconds in more_s) - home_s  # by one rank
        busy_s.append(((1 - bubbles) * (2 * whole_s - home_s) - computed_s) / len(steps))
    each_s, each_token_s = max(0.0, statistics.mean(fixed_s)) / 2, max(0.0, statistics.median(token_s)) / 2
    stage_s = min(each_s, max(0.0, statistics.mean(busy_s) / 2))
    bytes_s = min(MOST_BYTES_S, 4 * HIDDEN / max(each_token_s, 1e-12))
    links = Links(bytes_s, each_s - stage_s, stage_s=stage_s)
    made = replace(fitted, stage_links=links)
    if not all(told.pairs for told in calibrations.values()):
        return made
    real = slowdown(made, calibrations)
    for _ in range(ROUNDS):
        simulated = slowdown(made, {name: _replayed(made, name, told) for name, told in calibrations.items()})
        more = max(0.0, made.sharing.stages + real - simulated)
        made = replace(made, sharing=replace(made.sharing, stages=more))
    return made


def _replayed(fitted: Fitted, name: str, told: StagedSteps) -> StagedSteps:
    steps, pairs = (replayed(fitted, name, each, staged_path) for each in (told.steps, told.pairs))
    return told._replace(steps=steps, pairs=pairs)


def staged_path(home: str, names: Sequence[str]) -> LayerPath:
    """Return the path of an instance whose ranks are stages, the first of them first."""
    first, second = names
    return LayerPath(home, (first,) * (LAYERS // 2) + (second,) * (LAYERS - LAYERS // 2))


def slowdown(fitted: Fitted, calibrations: Mapping[str, StagedSteps]) -> float:
    """Return how many times as long steps of one token take while those of another instance go their way as alone.

    What is cold in calibrations, which are short, is so in both. Raises `ValueError` where there are no such steps.
    """
    pairs, alone = ({name: told[at] for name, told in calibrations.items()} for at in (2, 0))
    return _times_cost(fitted, pairs, together=True) / _times_cost(fitted, alone, together=False)


def _times_cost(fitted: Fitted, calibrations: Mapping[str, Sequence[TimedStep]], *, together: bool) -> float:
    """Return how many times their cost steps of one token take, in all: together with others, or alone."""
    took_s, costs_s = [], []
    for name, steps in calibrations.items():
        for step, others, cost_s in zip(steps, beside(steps), fitted.at_pace_of([name]).costs_s(steps), strict=True):
            is_wanted = others.share > 1 - FEW if together else others.share < FEW
            if is_wanted and [count for _, count in step.chunks] == [1]:
                took_s.append(step.seconds)
                costs_s.append(cost_s)
    if not costs_s:
        raise ValueError("calibrations of stages have no steps of one token, or none beside those of another instance")
    return math.fsum(took_s) / math.fsum(costs_s)
