"""Layers on devices, and the policies: nothing over what is free, every layer once, the order that was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.deployment.assign import assign, cut_into_stages
from elastic.planning.deployment.devices import DeviceState, Stage, after
from elastic.planning.deployment.placing import Deployment, Refusal, place
from elastic.planning.deployment.policies import POLICIES, preferred
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.ranking import Estimate
from elastic.planning.sharding.share import even_stages


@dataclass(frozen=True)
class Sized:
    """An option of a model whose layers have such bytes; its seconds are made up."""

    configuration: Configuration
    weights: tuple[int, ...]
    fixed: int = 0
    kv: int = 0
    """Of one request in one layer."""
    running: int = 1
    most_even: int = 1 << 30
    """Layers of a stage above which twice as many requests have to run."""
    why_not: str = ""

    @property
    def layers(self) -> int:
        return len(self.weights)

    @property
    def estimate(self) -> Estimate:
        stages = even_stages(self.layers, self.configuration.pp)
        return Estimate(self.configuration, stages, (), "made up", self.why_not, 256, self.running, latency_s=1.0)

    def need(self, layers: range, requests: int) -> int:
        shared = sum(self.weights[layer] for layer in layers) // self.configuration.tp
        return self.fixed + shared + requests * self.kv * len(layers)

    def judge(self, stages: Sequence[Stage], requests: int) -> Estimate:
        needed = self.running * (2 if max(len(stage.layers) for stage in stages) > self.most_even else 1)
        if requests < needed:
            return replace(self.estimate, why_not=f"serves less with {requests}", running=0)
        return self.estimate

    def busy(self, stages: Sequence[Stage], requests: int) -> tuple[float, ...]:
        return tuple(0.01 * len(stage.layers) for stage in stages)


def states(*free: int, load: Sequence[float] = ()) -> list[DeviceState]:
    return [DeviceState(f"d{n}", nbytes, load[n] if load else 0.0) for n, nbytes in enumerate(free)]


configurations = st.builds(Configuration, st.sampled_from([1, 2, 4]), st.integers(1, 4))
options = st.builds(
    Sized,
    configurations,
    st.lists(st.integers(1, 30), min_size=1, max_size=10).map(tuple),
    st.integers(0, 20),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(1, 10),
)
devices = st.lists(st.tuples(st.integers(0, 200), st.floats(0, 1.5)), min_size=1, max_size=8).map(
    lambda each: [DeviceState(f"d{n}", free, load) for n, (free, load) in enumerate(each)]
)


@given(option=options, on=devices, policy=st.sampled_from(POLICIES), theta=st.floats(0, 1))
def test_a_deployment_has_every_layer_once_side_by_side_and_nothing_is_over_what_is_free(
    option: Sized, on: list[DeviceState], policy: str, theta: float
) -> None:
    placed = place([option], on, policy, theta)  # type: ignore[arg-type]
    if isinstance(placed, Refusal):
        assert placed.reasons[0][1]
        return
    assert [layer for stage in placed.stages for layer in stage.layers] == list(range(option.layers))
    assert all(len(stage.devices) == option.configuration.tp for stage in placed.stages)
    assert len(set(placed.devices)) == option.configuration.ranks
    assert all(stage.nbytes == option.need(stage.layers, placed.requests) for stage in placed.stages)
    left = after(on, placed.stages, placed.busy, "m")
    assert all(state.free_bytes >= 0 for state in left)
    assert sum(state.free_bytes for state in on) - sum(state.free_bytes for state in left) == placed.nbytes
    assert {state.name for state in left if "m" in state.models} == set(placed.devices)
    assert all(state.load <= 1 for state in left if state.name in placed.devices)


@given(option=options, on=devices, policy=st.sampled_from(POLICIES), replicas=st.integers(1, 4))
def test_replicas_have_every_layer_once_each_and_no_device_in_common(
    option: Sized, on: list[DeviceState], policy: str, replicas: int
) -> None:
    placed = place([option], on, policy, replicas=replicas)  # type: ignore[arg-type]
    if isinstance(placed, Refusal):
        assert replicas == 1 or f" of {replicas}: " in placed.reasons[0][1]
        return
    every = list(range(option.layers))
    assert [[n for stage in each for n in stage.layers] for each in placed.instances] == [every] * replicas
    assert len(set(placed.devices)) == len(placed.devices) == replicas * option.configuration.ranks
    left = after(on, placed.stages, placed.busy, "m")
    assert all(state.free_bytes >= 0 for state in left)


@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    rooms=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    fixed=st.integers(0, 5),
)
@example(weights=[9, 1, 1, 1], rooms=[9, 1, 2], fixed=0)
@example(weights=[1, 1, 1, 2, 1], rooms=[1, 2, 1, 3], fixed=0)
def test_layers_are_cut_whenever_any_cut_fits(weights: list[int], rooms: list[int], fixed: int) -> None:
    def need(layers: range) -> int:
        return fixed + sum(weights[layer] for layer in layers)

    inner = itertools.combinations(range(1, len(weights)), len(rooms) - 1)
    bounds = ([0, *cut, len(weights)] for cut in inner)
    every = [[range(a, b) for a, b in itertools.pairwise(each)] for each in bounds]
    possible = [c for c in every if all(need(s) <= room for s, room in zip(c, rooms, strict=True))]
    found = cut_into_stages(len(weights), rooms, need)
    assert (list(found) in possible) if found is not None else possible == []


@given(layers=st.integers(1, 40), count=st.integers(1, 8))
def test_stages_are_even_where_there_is_room(layers: int, count: int) -> None:
    found = cut_into_stages(layers, [layers] * count, len)
    assert found == (even_stages(layers, count) if layers >= count else None)


def test_stages_are_uneven_where_room_is() -> None:
    """Falcon-7B's 32 layers on four GPUs in section 8.5: 10, 9, 7 and 6."""
    option = Sized(Configuration(1, 4), (10,) * 32)
    stages = assign(option, states(69, 105, 97, 75, 12))
    assert not isinstance(stages, str)
    assert [(stage.devices, len(stage.layers)) for stage in stages] == [
        (("d1",), 10),
        (("d2",), 9),
        (("d3",), 7),
        (("d0",), 6),
    ]
    assert isinstance(assign(option, states(69, 105, 97, 59)), str)


def test_a_shortage_says_what_is_needed_and_what_is_there() -> None:
    option = Sized(Configuration(2, 1), (4 << 30,) * 2, kv=1 << 20)
    assert assign(option, states(1 << 30)) == "2 devices are needed, of 1"
    words = assign(option, states(5 << 30, 3 << 30), 8)
    assert words == (
        "an even share of the layers needs 4.02 GiB with room for 8 requests at a time; of the 2 devices with the most "
        "room d1 has 3.00 GiB, and uneven shares do not fit either"
    )


def test_room_for_keys_and_values_is_part_of_the_plan() -> None:
    """What fits without them does not fit with them, and the next configuration is taken."""
    alone = Sized(Configuration(1, 1), (10,) * 4, kv=1, running=4)
    pair = replace(alone, configuration=Configuration(1, 2))
    placed = place([alone, pair], states(50, 50))
    assert isinstance(placed, Deployment)
    assert placed.configuration == pair.configuration
    assert [stage.nbytes for stage in placed.stages] == [28, 28]
    assert placed.passed_over[0][0] == alone.configuration
    assert "4 requests at a time" in placed.passed_over[0][1]
    without = place([replace(alone, kv=0), pair], states(50, 50))
    assert isinstance(without, Deployment)
    assert without.configuration == alone.configuration


def test_uneven_stages_get_room_for_the_requests_that_their_rate_needs() -> None:
    option = Sized(Configuration(1, 2), (10,) * 4, kv=1, running=3, most_even=2)
    even, uneven = (place([option], states(*free)) for free in ((60, 60), (60, 16)))
    assert isinstance(even, Deployment)
    assert isinstance(uneven, Deployment)
    assert even.requests == 3
    assert (uneven.requests, [stage.nbytes for stage in uneven.stages]) == (6, [48, 16])


def test_least_loaded_spreads_packing_packs_and_hybrid_does_either() -> None:
    option = Sized(Configuration(1, 1), (10,))
    on = states(100, 100, 100, 100, load=(0.9, 0.0, 0.3, 0.6))

    def chosen(policy: str, free: Sequence[DeviceState] = on) -> str:
        placed = place([option], free, policy, 0.5)  # type: ignore[arg-type]
        assert isinstance(placed, Deployment)
        return placed.devices[0]

    assert [chosen(policy) for policy in ("least-loaded", "packing", "hybrid")] == ["d1", "d0", "d2"]
    full = [replace(state, free_bytes=5 if state.load < 0.5 else 100) for state in on]
    assert [chosen(policy, full) for policy in ("least-loaded", "packing", "hybrid")] == ["d3", "d0", "d3"]


def test_a_device_that_would_compute_more_than_all_of_its_time_is_passed_over() -> None:
    """Eight layers take .08 of the time, four of them .04."""
    option, on = Sized(Configuration(1, 1), (10,) * 8), states(100, 100, 100, load=(0.95, 0.91, 0.0))
    for policy, device in (("packing", "d1"), ("hybrid", "d2"), ("least-loaded", "d2")):
        assert getattr(place([option], on, policy), "devices", None) == (device,)  # type: ignore[arg-type]
    halves, busy = replace(option, configuration=Configuration(1, 2)), states(100, 100, load=(0.95, 0.94))
    placed = place([option, halves], busy, "packing")
    assert isinstance(placed, Deployment)
    assert placed.passed_over == ((option.configuration, "d0 would compute 1.03 of the time"),)
    refused = str(place([option], busy))
    assert refused == "none of 1 configurations fits; TP1 PP1 full: d1 would compute 1.02 of the time"


def test_a_load_is_the_time_that_a_device_is_busy_not_how_many_models_it_has() -> None:
    """Three idle models of little memory on one device, one busy model on the other."""
    on = [DeviceState("many", 80, 0.05, ("a", "b", "c")), DeviceState("busy", 90, 0.85, ("d",))]
    placed = [place([Sized(Configuration(1, 1), (10,))], on, policy) for policy in ("least-loaded", "hybrid")]
    assert [each.devices for each in placed if isinstance(each, Deployment)] == [("many",), ("many",)]


@given(on=devices, theta=st.floats(0, 1.5))
def test_hybrid_tries_what_is_below_theta_by_packing_and_then_the_others_by_spreading(
    on: list[DeviceState], theta: float
) -> None:
    lists = preferred(on, "hybrid", theta)
    packable = [state for state in on if state.load < theta]
    loads = [[state.load for state in each] for each in lists]
    if packable:
        assert loads[0] == sorted((state.load for state in packable), reverse=True)
    if len(packable) < len(on):
        assert loads[bool(packable)] == sorted(state.load for state in on if state.load >= theta)
    assert {state.name for state in lists[-1]} == {state.name for state in on}
    assert preferred(on, "hybrid", 2) == preferred(on, "packing")
    assert preferred(on, "hybrid", 0) == preferred(on, "least-loaded")


def test_links_are_between_ranks_that_share_layers_and_from_each_stage_to_the_next() -> None:
    def links(*stages: Stage) -> tuple[tuple[str, str], ...]:
        estimate = Estimate(Configuration(), (), (), "assumed", "", 1)
        return Deployment(Configuration(), stages, 1, estimate, ()).links

    first, second, third = Stage(range(2), ("a", "b"), 1), Stage(range(2, 4), ("c", "d"), 1), range(4, 6)
    assert links(Stage(range(4), ("a",), 1)) == ()
    assert links(first, second) == (("a", "b"), ("c", "d"), ("a", "c"), ("b", "d"))
    assert links(*(replace(first, devices=(name,)) for name in "ab")) == (), "each has all layers: two replicas"
    alone = [replace(stage, devices=(stage.devices[0],)) for stage in (first, second)]
    assert links(*alone, Stage(third, ("e",), 1)) == (("a", "c"), ("c", "e"), ("e", "a")), "tokens go back"
    assert links() == links(second) == (), "no instance has all layers"


def test_what_cannot_be_says_why() -> None:
    option = Sized(Configuration(1, 1), (10,), why_not="layers in a variant are not shared")
    refused = place([option], states(100))
    assert isinstance(refused, Refusal)
    assert str(refused) == "none of 1 configurations fits; TP1 PP1 full: layers in a variant are not shared"
    assert str(place([], states(100))) == "there is no configuration to try"
    with pytest.raises(ConfigError, match="policy='random' is not known"):
        place([option], states(100), "random")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="theta=-1 is no load"):
        place([option], states(100), "hybrid", -1)
    with pytest.raises(ConfigError, match="free bytes and its load are 0 or more"):
        DeviceState("d", -1)
