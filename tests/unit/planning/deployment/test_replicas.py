"""How many instances a deployment has for a load, and for one that none serve."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.deployment.devices import Stage
from elastic.planning.deployment.placing import Deployment, Refusal
from elastic.planning.deployment.replicas import ReplicaRange, best_deployment, most_served
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.intent import OBJECTIVES, Objective
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate

ranges = st.tuples(st.integers(1, 6), st.integers(0, 6)).map(lambda pair: ReplicaRange(pair[0], sum(pair)))
LATENCY_S = 2.0


def chooser(served: float, devices: int) -> Callable[[int, Load], Deployment | Refusal]:
    """Choose instances that each serve so many requests a second, on a device each."""

    def choose(count: int, load: Load) -> Deployment | Refusal:
        if count > devices or load.rate > count * served:
            return Refusal(((Configuration(), f"{count} do not"),))
        return instances(count)

    return choose


def instances(count: int, latency_s: float = LATENCY_S, each: int = 1) -> Deployment:
    """So many, of `each` ranks."""
    configuration = Configuration(each)
    estimate = Estimate(configuration, (), (), "assumed", "", 1, latency_s=latency_s, memory_bytes=each * 2**30)
    stages = (Stage(range(2), tuple(f"cpu#{number}.{rank}" for rank in range(each)), 1) for number in range(count))
    return Deployment(configuration, tuple(stages), 1, estimate, ())


def test_a_range_is_a_number_or_text() -> None:
    assert ReplicaRange.of(3) == ReplicaRange.of("3") == ReplicaRange(3, 3)
    assert ReplicaRange.of("2-5") == ReplicaRange(2, 5)
    assert [str(ReplicaRange(*each)) for each in ((3, 3), (2, 5))] == ["3", "2-5"]
    assert ReplicaRange(2, 10**6).within(4) == ReplicaRange(2, 4)
    assert ReplicaRange(3, 9).within(2) == ReplicaRange(3, 3), "whose refusal says what is lacking"


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "", "0-2", "3-2", "1-", "-2", "1-2-3", "many", "٣", None])
def test_what_is_no_range_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="replicas="):
        ReplicaRange.of(wrong)  # type: ignore[arg-type]


@given(ranges, st.floats(0.1, 10), st.floats(0, 100), st.integers(0, 12), st.sampled_from(OBJECTIVES))
def test_of_instances_that_are_alike_there_are_as_few_as_serve_the_load(
    replicas: ReplicaRange, served: float, rate: float, devices: int, objective: Objective
) -> None:
    outcome = best_deployment(replicas, Load(8, 8, rate), objective, chooser(served, devices))
    serve = [count for count in range(replicas.least, replicas.most + 1) if count <= devices and count * served >= rate]
    if serve:
        assert isinstance(outcome, Deployment)
        assert len(outcome.instances) == serve[0]
    else:
        assert isinstance(outcome, Refusal)
        assert outcome.reasons[0][1] == f"{replicas.most} do not", "of the most that there may be"


@pytest.mark.parametrize(
    ("objective", "each", "latencies", "count"),
    [
        ("latency", 1, (1.0, 0.86), 1),
        ("latency", 1, (1.0, 0.84), 2),
        ("latency", 1, (1.0, 0.84, 0.83), 2),
        ("cost", 1, (1.0, 0.84), 1),
        ("gpu_hours", 1, (1.0, 0.42), 2),
        ("latency", 4, (1.0, 1.1), 2),
        ("latency", 4, (1.0, 1.2), 1),
    ],
)
def test_more_instances_must_pay(objective: Objective, each: int, latencies: tuple[float, ...], count: int) -> None:
    """The first is of one instance of `each` ranks, the others are of ranks that are alone."""

    def choose(number: int, load: Load) -> Deployment:
        return instances(number, latencies[number - 1], each if number == 1 else 1)

    outcome = best_deployment(ReplicaRange(1, len(latencies)), Load(8, 8), objective, choose)
    assert isinstance(outcome, Deployment)
    assert len(outcome.instances) == count


@given(st.floats(0.1, 10), st.floats(0, 60), st.integers(1, 6))
def test_fewer_than_there_are_must_have_something_to_spare(served: float, rate: float, present: int) -> None:
    choose, within = chooser(served, 6), ReplicaRange(1, 6)
    outcome = best_deployment(within, Load(8, 8, rate), "cost", choose, present=present, slack=0.2)
    if isinstance(outcome, Deployment) and len(outcome.instances) < present:
        now = len(outcome.instances)
        assert now * served >= 1.2 * rate
        more = best_deployment(within, Load(8, 8, 1.1 * rate), "cost", choose, present=now, slack=0.2)
        assert isinstance(more, Deployment)
        assert len(more.instances) <= now, "a tenth more does not take it back"


@given(ranges, st.floats(0.1, 10), st.integers(0, 12), st.integers(1, 12), st.floats(1.01, 1000))
def test_a_load_that_none_serves_gets_all_there_is_room_for(
    replicas: ReplicaRange, served: float, devices: int, present: int, over: float
) -> None:
    rates: list[float] = []
    choose = chooser(served, devices)

    def noted(count: int, load: Load) -> Deployment | Refusal:
        outcome = choose(count, load)
        if isinstance(outcome, Deployment):
            rates.append(load.rate)
        return outcome

    outcome = most_served(replicas, Load(8, 8, over * served * replicas.most), noted, present)
    room = min(replicas.most, devices)
    if room < replicas.least or room <= present:
        assert outcome is None
    else:
        assert outcome is not None
        assert len(outcome.instances) == room
        assert 0.98 * room * served <= max(rates) <= room * served, "as much as they serve"
