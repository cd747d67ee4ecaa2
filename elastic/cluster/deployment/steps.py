"""The steps from one configuration of a deployment to another: pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from elastic.cluster.deployment.status import StepKind, TransitionStep
from elastic.planning.deployment.devices import Stage
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.configuration import FULL, Configuration


def same(now: Deployment, wanted: Deployment) -> bool:
    """Return whether two deployments are of one configuration on the same devices, whatever room for KV they have."""
    return now.configuration == wanted.configuration and _cut(now.stages) == _cut(wanted.stages)


def steps_between(now: Deployment, wanted: Deployment) -> tuple[TransitionStep, ...]:
    """Return what is to be done, in order. While it is done, all requests are served by the ranks that are there.

    Ranks that are needed come first. Ranks of which the layers are shared, or in stages, compute whole models in full
    weights again before some of them leave, or share them otherwise: their requests then have where to go. Only full
    weights are shared or dropped; then each rank swaps what it has. Instances that stay as they are are not touched.
    """
    if same(now, wanted):
        return (TransitionStep("limit", wanted.devices),) if now.stages != wanted.stages else ()
    there, then = _layers(now), _layers(wanted)
    form, other = wanted.configuration.weights, now.configuration.weights != wanted.configuration.weights
    kept = {
        name for stages in wanted.instances if _cut(stages) in _cuts(now) for each in stages for name in each.devices
    }
    parted = [name for name in there if name not in kept] if now.configuration.ranks > 1 else []
    restored = [name for name in there if name in parted or (name in then and (other or name not in kept))]
    swapped = _step("swap", [name for name in then if other or name not in kept], then, form)
    steps = [
        *_step("add", [name for name in then if name not in there]),
        *(_step("restore", restored, there) if now.configuration.weights != FULL else ()),
        *_step("part", parted),
        *(swapped if form != FULL and wanted.configuration.ranks == 1 else ()),
        *_step("remove", [name for name in there if name not in then]),
    ]
    for stages in wanted.instances:
        if _cut(stages) not in _cuts(now):
            steps += grouping(stages)
    if form != FULL and wanted.configuration.ranks > 1:
        steps += swapped
    return (*steps, TransitionStep("limit", wanted.devices))


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


def as_begun(
    plan: Deployment, present: Collection[str], seen: Callable[[Collection[str]], Configuration]
) -> Deployment:
    """Return a plan with ranks that took the place of lost ones, and those that these left, as they begin.

    Instances whose ranks began with their shares are what they were, and so are those that lost none. Ranks of no
    instance are there where a change was stopped. `present` are the devices with ranks; `seen` says in which
    configuration those of some devices are.
    """
    wanted, stages = plan.configuration, list[Stage]()
    for instance in plan.instances:
        names = {name for stage in instance for name in stage.devices}
        now, whole_yet = seen(names), names.issubset(present)
        stays = wanted.ranks > 1 and whole_yet and (now.tp, now.pp) == (wanted.tp, wanted.pp)
        stages += instance if stays else apart(instance)
    every = range(plan.stages[-1].layers.stop)
    stages = [stage for stage in stages if set(stage.devices).issubset(present)]
    stages += [Stage(every, (name,), 0) for name in present if all(name not in each.devices for each in stages)]
    return replace(whole(plan) if wanted.ranks == 1 else plan, stages=tuple(stages))


def apart(stages: Sequence[Stage]) -> list[Stage]:
    """Return the ranks of an instance as they begin."""
    layers = range(stages[-1].layers.stop)
    return [Stage(layers, (name,), 0) for stage in stages for name in stage.devices]


def _step(
    kind: StepKind, devices: Sequence[str], layers: Mapping[str, range] | None = None, weights: str = ""
) -> list[TransitionStep]:
    """Return a step, if it is about any device. `layers`: those of each device."""
    own = tuple(layers[name] for name in devices) if layers else ()
    return [TransitionStep(kind, tuple(devices), own, weights)] if devices else []


def _layers(deployment: Deployment) -> dict[str, range]:
    """Return which layers each device has."""
    return {name: stage.layers for stage in deployment.stages for name in stage.devices}


def _cuts(deployment: Deployment) -> list[tuple[tuple[range, tuple[str, ...]], ...]]:
    return [_cut(stages) for stages in deployment.instances]


def _cut(stages: Sequence[Stage]) -> tuple[tuple[range, tuple[str, ...]], ...]:
    return tuple((stage.layers, stage.devices) for stage in stages)
