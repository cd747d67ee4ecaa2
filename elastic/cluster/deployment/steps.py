"""The steps from one configuration of a deployment to another: pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from elastic.cluster.deployment.status import StepKind, TransitionStep
from elastic.planning.deployment.devices import Stage
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.configuration import FULL, Configuration

Instances = Mapping[frozenset[tuple[str, int]], tuple[int, int]]
"""The TP and PP of each instance that there is, by the devices of its ranks and the first layer that each has."""


def same(now: Deployment, wanted: Deployment) -> bool:
    """Return whether two deployments are of one configuration on the same devices, whatever room for KV they have."""
    return now.configuration == wanted.configuration and _cut(now.stages) == _cut(wanted.stages)


def steps_between(
    now: Deployment, wanted: Deployment, forms: Mapping[str, Collection[str]] = MappingProxyType({})
) -> tuple[TransitionStep, ...]:
    """Return what is to be done, in order. While it is done, all requests are served by the ranks that are there.

    `forms` says of devices in which forms the layers of their ranks are, where that is not the configuration's.

    Ranks that are needed come first. Ranks of which the layers are shared, or in stages, compute whole models in full
    weights again before some of them leave, or share them otherwise: their requests then have where to go. Only full
    weights are shared or dropped; then each rank swaps what it has. Instances that stay as they are are not touched.
    """
    there, then = _layers(now), _layers(wanted)
    form = wanted.configuration.weights
    seen = {name: {*forms.get(name, (now.configuration.weights,))} for name in there}
    parts = now.configuration.ranks > 1 and wanted.configuration.ranks == 1  # also what a stopped change left shared
    cuts = [] if parts else [_cut(stages) for stages in now.instances]
    alike = [stages for stages in wanted.instances if _cut(stages) in cuts]
    stay = {name for stages in alike for each in stages for name in each.devices}
    other = [name for name in then if name not in stay or not seen[name] <= {form}]
    if not other and there.keys() == then.keys():
        return (TransitionStep("limit", wanted.devices),) if now.stages != wanted.stages else ()
    parted = [name for name in there if name not in stay] if now.configuration.ranks > 1 else []
    restored = [name for name in there if not seen[name] <= {FULL} and (name in parted or name in other)]
    swapped = _step("swap", other, then, form) if form != FULL else []
    steps = [
        *_step("add", [name for name in then if name not in there]),
        *_step("restore", restored, there),
        *_step("part", parted),
        *(swapped if wanted.configuration.ranks == 1 else ()),
        *_step("remove", [name for name in there if name not in then]),
    ]
    for stages in wanted.instances:
        if stages not in alike:
            steps += grouping(stages)
    if wanted.configuration.ranks > 1:
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


def as_seen(seen: Configuration, instances: Instances, *plans: Deployment) -> Deployment:
    """Return the first plan with the ranks that there are: those of an instance of any plan, or each by itself.

    These are ranks of instances that are not what they were to be, as where a change was stopped, and those that took
    the place of lost ones, unless they began with their shares. `seen` is the configuration that all ranks are in. What
    an instance is to have that was planned with other weights nobody has said.
    """
    stages, alone = list[Stage](), dict.fromkeys(sorted(device for each in instances for device, _ in each))
    for plan in plans:
        own = plan.configuration
        for instance in plan.instances:
            firsts = {name: stage.layers.start for stage in instance for name in stage.devices}
            if instances.get(frozenset(firsts.items())) == (own.tp, own.pp) and firsts.keys() <= alone.keys():
                stages += [replace(stage, nbytes=stage.nbytes * (own.weights == seen.weights)) for stage in instance]
                alone = {name: None for name in alone if name not in firsts}
    every = range(plans[0].stages[-1].layers.stop)
    stages += [Stage(every, (name,), 0) for name in alone]
    return replace(plans[0], configuration=seen, stages=tuple(stages))


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


def _cut(stages: Sequence[Stage]) -> tuple[tuple[range, tuple[str, ...]], ...]:
    return tuple((stage.layers, stage.devices) for stage in stages)
