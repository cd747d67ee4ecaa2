"""The steps from any configuration to any other: what is wanted comes, and only full weights are shared or dropped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.cluster.deployment.status import TransitionStep
from elastic.cluster.deployment.steps import Instances, as_seen, same, steps_between, whole
from elastic.planning.deployment.devices import Stage
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.configuration import FULL, Configuration
from elastic.planning.estimate.ranking import Estimate
from elastic.planning.sharding.share import even_stages

LAYERS = 6


def deployment(tp: int, pp: int, weights: str, devices: str) -> Deployment:
    """A configuration on devices named by a letter each, of as many instances as they are for."""
    configuration = Configuration(tp, pp, weights)
    cut = even_stages(LAYERS, pp)
    every = cut * (len(devices) // (tp * pp))
    stages = tuple(Stage(layers, tuple(devices[tp * n : tp * n + tp]), 100) for n, layers in enumerate(every))
    return Deployment(configuration, stages, 1, Estimate(configuration, cut, (), "", "", 1), (math.nan,) * len(every))


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]))
    weights = draw(st.sampled_from([FULL, "int8", "int4"] if tp == 1 else [FULL]))
    replicas = draw(st.integers(1, 6 // (tp * pp)))
    devices = "".join(draw(st.permutations("abcdef"))[: replicas * tp * pp])
    return deployment(tp, pp, weights, devices)


class Ranks:
    """What steps do, in a model of a fleet: device -> weights, and who shares or splits layers."""

    def __init__(self, begin: Deployment) -> None:
        self.weights = dict.fromkeys(begin.devices, begin.configuration.weights)
        shared = begin.configuration.tp > 1
        self.tp: set[tuple[str, ...]] = {stage.devices for stage in begin.stages if shared}
        self.stages: dict[str, range] = {}
        if begin.configuration.pp > 1:
            self.stages = {name: stage.layers for stage in begin.stages for name in stage.devices}

    def do(self, step: object) -> None:
        match step.kind:  # type: ignore[attr-defined]
            case "add":
                assert not self.weights.keys() & set(step.devices)  # type: ignore[attr-defined]
                self.weights |= dict.fromkeys(step.devices, FULL)  # type: ignore[attr-defined]
            case "part":
                assert {self.weights[name] for name in step.devices} == {FULL}  # type: ignore[attr-defined]
                self.tp = {shared for shared in self.tp if not {*shared} & {*step.devices}}  # type: ignore[attr-defined]
                for name in step.devices:  # type: ignore[attr-defined]
                    self.stages.pop(name, None)
            case "restore" | "swap":
                for name, layers in zip(step.devices, step.layers, strict=True):  # type: ignore[attr-defined]
                    assert not any(name in shared for shared in self.tp)
                    assert layers == self.stages.get(name, range(LAYERS)), "each rank has a form for what it has"
                    assert FULL in (self.weights[name], step.weights or FULL), "variants are packed of full weights"  # type: ignore[attr-defined]
                    self.weights[name] = step.weights or FULL  # type: ignore[attr-defined]
            case "remove":
                assert not self.grouped(step.devices)  # type: ignore[attr-defined]
                for name in step.devices:  # type: ignore[attr-defined]
                    del self.weights[name]
                assert self.weights, "requests of the last rank have nowhere to go"
            case "share":
                assert {self.weights[name] for name in step.devices} == {FULL}  # type: ignore[attr-defined]
                self.tp.add(step.devices)  # type: ignore[attr-defined]
            case "drop":
                assert {self.weights[name] for name in step.devices} == {FULL}  # type: ignore[attr-defined]
                self.stages |= dict(zip(step.devices, step.layers, strict=True))  # type: ignore[attr-defined]

    def instances(self) -> Instances:
        """Stages of one begin with the first layer, in the order of the devices."""
        together = [{*shared} for shared in self.tp if shared[0] not in self.stages]
        for name, layers in self.stages.items():
            shares = together and any({name, *together[-1]} <= {*each} for each in self.tp)
            together = [*together[:-1], together[-1] | {name}] if layers.start or shares else [*together, {name}]
        together += [{name} for name in self.weights if not any(name in each for each in together)]
        first = {name: self.stages[name].start if name in self.stages else 0 for name in self.weights}
        return {frozenset((name, first[name]) for name in each): self.degrees(each) for each in together}

    def degrees(self, devices: set[str]) -> tuple[int, int]:
        tp = max((len(shared) for shared in self.tp if devices.issuperset(shared)), default=1)
        return tp, len(devices) // tp

    def seen(self, aim: Deployment, *plans: Deployment) -> Deployment:
        """What a deployment is taken for that was stopped on the way to a plan."""
        tp, pp = (max(degrees) for degrees in zip(*self.instances().values(), strict=True))
        others = sorted({*self.weights.values()} - {aim.configuration.weights})
        seen = Configuration(tp, pp, others[0] if others else aim.configuration.weights)
        return as_seen(seen, self.instances(), *plans)

    def grouped(self, devices: tuple[str, ...]) -> bool:
        return any({*devices} & {*each} for each in (*self.tp, self.stages))


@settings(max_examples=40)
@given(deployments(), deployments())
def test_steps_lead_from_any_configuration_to_any_other(now: Deployment, wanted: Deployment) -> None:
    ranks = Ranks(now)
    for step in steps_between(now, wanted):
        ranks.do(step)
    there = Ranks(wanted)
    assert (ranks.weights, ranks.tp, ranks.stages) == (there.weights, there.tp, there.stages)


def one_by_one(steps: tuple[TransitionStep, ...], now: Deployment) -> Iterator[TransitionStep]:
    """Steps of one rank each, or of one instance: what one may have done that was stopped."""
    for step in steps:
        if step.kind in ("share", "drop", "limit"):
            yield step
            continue
        kept = step.layers or (None,) * len(step.devices)
        layers = dict(zip(step.devices, kept, strict=True))
        together = [{name for stage in stages for name in stage.devices} for stages in now.instances]
        together = together if step.kind == "part" else [{name} for name in step.devices]
        for names in together:
            devices = tuple(name for name in step.devices if name in names)
            own = tuple(each for name in devices if (each := layers[name]) is not None)
            if devices:
                yield replace(step, devices=devices, layers=own)


@settings(max_examples=200)
@given(deployments(), deployments(), deployments(), st.integers(0, 20))
def test_steps_lead_on_from_wherever_a_change_was_stopped(
    now: Deployment, aim: Deployment, wanted: Deployment, done: int
) -> None:
    ranks = Ranks(now)
    for _, step in zip(range(done), one_by_one(steps_between(now, aim), now), strict=False):
        ranks.do(step)
    present, forms = ranks.seen(aim, now, aim), {name: {weights} for name, weights in ranks.weights.items()}
    assert sorted(present.devices) == sorted(ranks.weights)
    for step in steps_between(present, wanted, forms):
        ranks.do(step)
    there = Ranks(wanted)
    assert (ranks.weights, ranks.stages) == (there.weights, there.stages)
    assert set(map(frozenset, ranks.tp)) == set(map(frozenset, there.tp)), "in any order, where they shared before"


def test_a_stopped_change_of_replicas_leaves_those_that_stay_what_they_have() -> None:
    """It was recorded as the new plan, with its room for keys and values; others were taken for single ranks."""
    one, two = deployment(2, 1, FULL, "ab"), deployment(2, 1, FULL, "abcd")
    two = replace(two, stages=tuple(replace(stage, nbytes=50) for stage in two.stages))
    assert Ranks(two).seen(one, two, one).stages == two.stages, "one is to go, and has not"
    ranks = Ranks(one)
    for step in steps_between(one, two):
        assert ranks.seen(two, one, two).stages[0] == one.stages[0]
        ranks.do(step)
    assert ranks.seen(two, one, two).stages == (one.stages[0], two.stages[1]), "only the limits are left"


def test_an_instance_that_was_planned_with_other_weights_has_no_share_yet() -> None:
    packed, restored = deployment(1, 1, "int8", "ab"), deployment(1, 1, FULL, "ab")
    ranks = Ranks(packed)
    ranks.weights["a"] = FULL
    present = ranks.seen(restored, packed, restored)
    assert (present.configuration.weights, present.stages) == ("int8", packed.stages)
    ranks.weights["b"] = FULL
    present = ranks.seen(restored, packed, restored)
    assert (present.configuration.weights, [stage.nbytes for stage in present.stages]) == (FULL, [0, 0])


@settings(max_examples=40)
@given(deployments())
def test_where_nothing_changes_nothing_is_done(now: Deployment) -> None:
    assert same(now, now)
    assert steps_between(now, now) == ()


@settings(max_examples=40)
@given(deployments())
def test_ranks_begin_with_all_layers_and_get_their_configuration(wanted: Deployment) -> None:
    begun = whole(wanted)
    ranks = Ranks(begun)
    assert not ranks.tp
    assert not ranks.stages
    for step in steps_between(begun, wanted):
        assert step.kind not in ("add", "remove")
        ranks.do(step)
    there = Ranks(wanted)
    assert (ranks.weights, ranks.tp, ranks.stages) == (there.weights, there.tp, there.stages)


def test_an_instance_that_stays_is_not_touched_when_another_comes_or_goes() -> None:
    one, two = deployment(2, 1, FULL, "ab"), deployment(2, 1, FULL, "abcd")
    assert [(step.kind, step.devices) for step in steps_between(one, two)] == [
        ("add", ("c", "d")),
        ("share", ("c", "d")),
        ("limit", ("a", "b", "c", "d")),
    ]
    assert [(step.kind, step.devices) for step in steps_between(two, one)] == [
        ("part", ("c", "d")),
        ("remove", ("c", "d")),
        ("limit", ("a", "b")),
    ]
    assert two.instances == (one.stages, two.stages[1:])


def test_stages_in_a_variant_swap_what_they_have_and_take_full_weights_back_before_they_part() -> None:
    full, packed, alone = deployment(1, 2, FULL, "ab"), deployment(1, 2, "int8", "ab"), deployment(1, 1, "int8", "ab")
    own, every = (range(3), range(3, 6)), (range(6), range(6))
    for now, wanted, steps in (
        (full, packed, [("swap", own, "int8")]),
        (packed, deployment(1, 2, "int4", "ab"), [("restore", own, ""), ("swap", own, "int4")]),
        (alone, packed, [("restore", every, ""), ("drop", own, ""), ("swap", own, "int8")]),
        (packed, alone, [("restore", own, ""), ("part", (), ""), ("swap", every, "int8")]),
    ):
        told = [(step.kind, step.layers, step.weights) for step in steps_between(now, wanted)]
        assert told == [*steps, ("limit", (), "")]
