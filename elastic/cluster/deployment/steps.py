"""The steps from one configuration of a deployment to another: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic.cluster.deployment.status import TransitionStep
from elastic.planning.deployment.devices import Stage
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.configuration import FULL, Configuration


def same(now: Deployment, wanted: Deployment) -> bool:
    """Return whether two deployments are of one configuration on the same devices, whatever room for KV they have."""
    return now.configuration == wanted.configuration and _cut(now.stages) == _cut(wanted.stages)


def steps_between(now: Deployment, wanted: Deployment) -> tuple[TransitionStep, ...]:
    """Return what is to be done, in order. While it is done, all requests are served by the ranks that are there.

    Ranks that are needed come first. Ranks of which the layers are shared, or in stages, compute whole models again
    before they change their form, and before some of them leave: their requests then have where to go.
    """
    if same(now, wanted):
        return (TransitionStep("limit", wanted.devices),) if now.stages != wanted.stages else ()
    before, after = now.devices, wanted.devices
    coming = tuple(name for name in after if name not in before)
    going = tuple(name for name in before if name not in after)
    steps = [TransitionStep("add", coming)] if coming else []
    regrouped = _cut(now.stages) != _cut(wanted.stages) or now.configuration.tp != wanted.configuration.tp
    if len(before) > 1 and regrouped:
        steps.append(TransitionStep("part", before))
    steps += _form(now.configuration, wanted.configuration, coming, tuple(n for n in before if n in after))
    if going:
        steps.append(TransitionStep("remove", going))
    if regrouped or coming:
        steps += grouping(wanted)
    return (*steps, TransitionStep("limit", after))


def grouping(wanted: Deployment) -> list[TransitionStep]:
    """Return how ranks that compute whole models come to share layers, or to have a stage each."""
    steps, chosen = [], wanted.configuration
    if chosen.tp > 1:
        steps += [TransitionStep("share", stage.devices) for stage in wanted.stages]
    if chosen.pp > 1:
        kept = tuple(stage.layers for stage in wanted.stages for _ in stage.devices)
        steps.append(TransitionStep("drop", wanted.devices, kept))
    return steps


def whole(wanted: Deployment) -> Deployment:
    """Return the ranks of a deployment as they begin: each with all layers, in full weights."""
    layers = range(wanted.stages[-1].layers.stop)
    stages = tuple(Stage(layers, (name,), 0) for name in wanted.devices)
    return replace(wanted, configuration=replace(wanted.configuration, tp=1, pp=1, weights=FULL), stages=stages)


def _form(
    now: Configuration, wanted: Configuration, coming: Sequence[str], staying: Sequence[str]
) -> list[TransitionStep]:
    """Return how layers get their form; ranks that come have full weights."""
    steps = []
    if now.weights not in (FULL, wanted.weights) and staying:
        steps.append(TransitionStep("restore", tuple(staying)))
    if wanted.weights != FULL:
        changed = (*(staying if now.weights != wanted.weights else ()), *coming)
        if changed:
            steps.append(TransitionStep("swap", changed, weights=wanted.weights))
    return steps


def _cut(stages: Sequence[Stage]) -> list[tuple[range, tuple[str, ...]]]:
    return [(stage.layers, stage.devices) for stage in stages]
