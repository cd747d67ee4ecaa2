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
    before they change their form, and before some of them leave: their requests then have where to go. Instances that
    stay as they are are not touched.
    """
    if same(now, wanted):
        return (TransitionStep("limit", wanted.devices),) if now.stages != wanted.stages else ()
    before, after = now.devices, wanted.devices
    coming = tuple(name for name in after if name not in before)
    going = tuple(name for name in before if name not in after)
    steps = [TransitionStep("add", coming)] if coming else []
    parted = [stage for stages in now.instances if _cut(stages) not in _cuts(wanted) for stage in stages]
    if now.configuration.ranks > 1 and parted:
        steps.append(TransitionStep("part", tuple(name for stage in parted for name in stage.devices)))
    steps += _form(now.configuration, wanted.configuration, coming, tuple(n for n in before if n in after))
    if going:
        steps.append(TransitionStep("remove", going))
    for stages in wanted.instances:
        if _cut(stages) not in _cuts(now):
            steps += grouping(stages)
    return (*steps, TransitionStep("limit", after))


def grouping(stages: Sequence[Stage]) -> list[TransitionStep]:
    """Return how ranks that compute whole models come to share the layers of an instance, or to have a stage each."""
    steps = [TransitionStep("share", stage.devices) for stage in stages if len(stage.devices) > 1]
    if len(stages) > 1:
        devices = tuple(name for stage in stages for name in stage.devices)
        steps.append(TransitionStep("drop", devices, tuple(stage.layers for stage in stages for _ in stage.devices)))
    return steps


def whole(wanted: Deployment) -> Deployment:
    """Return the ranks of a deployment as they begin: each with all layers, in full weights."""
    stages = tuple(stage for each in wanted.instances for stage in apart(each))
    return replace(wanted, configuration=replace(wanted.configuration, tp=1, pp=1, weights=FULL), stages=stages)


def apart(stages: Sequence[Stage]) -> list[Stage]:
    """Return the ranks of an instance as they begin."""
    layers = range(stages[-1].layers.stop)
    return [Stage(layers, (name,), 0) for stage in stages for name in stage.devices]


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


def _cuts(deployment: Deployment) -> list[tuple[tuple[range, tuple[str, ...]], ...]]:
    return [_cut(stages) for stages in deployment.instances]


def _cut(stages: Sequence[Stage]) -> tuple[tuple[range, tuple[str, ...]], ...]:
    return tuple((stage.layers, stage.devices) for stage in stages)
