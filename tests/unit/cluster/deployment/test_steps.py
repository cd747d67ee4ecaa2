"""The steps from any configuration to any other: what is wanted comes, and only full weights are shared or dropped."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.cluster.deployment.steps import same, steps_between, whole
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
