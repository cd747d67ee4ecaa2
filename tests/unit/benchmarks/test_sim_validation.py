"""The validation of the simulator: what it counts as a miss, and when it says that it passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from sim_served import FIGURES
from sim_validation import NULLS, TARGETS, errors, judged, turned, verdicts

PASSES: dict[str, Any] = {"missed": [], "turned": []}
MISSES = {**PASSES, "missed": ["kv_use"]}
TURNS = {**PASSES, "turned": ["kv_use: one and two, conv"]}


def run(system: str = "one", load: str = "conv", memory: str = "roomy", *, real: float = 1.0, **told: Any) -> Any:
    """A run whose figures are all `real`, and what simulators said of them: one number for all, or some of them."""
    figures = {
        name: {figure: value.get(figure, real) if isinstance(value, Mapping) else value for figure in FIGURES}
        for name, value in told.items()
    }
    return {"system": system, "load": load, "memory": memory, "real": dict.fromkeys(FIGURES, real), **figures}


def test_errors_are_relative_to_the_real_figures_and_have_no_sign() -> None:
    found = errors(run(real=2.0, simulated={"kv_use": 1.5, "p95_ttft_s": 3.0}), "simulated")
    assert {figure: error for figure, error in found.items() if error} == {"kv_use": 0.25, "p95_ttft_s": 0.5}


@pytest.mark.parametrize(("figure", "most"), [item for item in TARGETS.items() if item[1] is not None])
def test_a_figure_is_missed_whose_mean_error_over_runs_is_above_its_target(figure: str, most: float) -> None:
    def told(*parts: float) -> list[str]:
        return judged([run(simulated={figure: 1 + part * most}) for part in parts], "simulated")["missed"]

    assert told(0.0, 1.9) == told(-0.99, 0.99) == []
    assert told(0.0, 2.1) == told(-1.01, 1.01) == [figure]


def test_of_p99_any_error_is_told_and_none_is_missed() -> None:
    found = judged([run(simulated={"p99_ttft_s": 3.0})], "simulated")
    assert found["mean_error"]["p99_ttft_s"] == 2.0
    assert found["missed"] == []


def test_each_simulator_is_judged_by_its_own_figures() -> None:
    runs = [run(simulated=1.0, null=1.2)]
    assert judged(runs, "simulated")["missed"] == []
    assert judged(runs, "null")["missed"] == [figure for figure, most in TARGETS.items() if most]


@pytest.mark.parametrize(
    ("real", "told", "counted"),
    [
        (1.06, 1.3, False),  # the same order, whatever the distance
        (1.06, 0.99, True),
        (0.9, 1.01, True),
        (0.9, 1.0, True),
        (1.06, 1.0, True),  # the simulator sees no difference where there is one
        (1.04, 0.9, False),  # too close for an order
    ],
)
def test_an_order_is_turned_where_systems_differ_and_the_simulator_says_otherwise(
    real: float, told: float, counted: bool
) -> None:
    runs = [run("two", real=real, simulated=told), run("one", simulated=1.0)]
    assert turned(runs, "simulated") == [f"{figure}: one and two, conv" for figure in FIGURES[:4] if counted]
    assert judged(runs, "simulated")["turned"] == turned(runs, "simulated")


@pytest.mark.parametrize("other", [{"load": "code"}, {"memory": "tight"}])
def test_only_systems_with_the_same_requests_and_memory_are_compared(other: dict[str, str]) -> None:
    assert not turned([run("one", simulated=2.0), run("two", real=1.5, simulated=1.0, **other)], "simulated")


@pytest.mark.parametrize("simulator", NULLS)
@pytest.mark.parametrize("fails", [MISSES, TURNS])
def test_a_simulator_is_told_from_its_null_if_it_passes_and_the_null_does_not(
    simulator: str, fails: dict[str, Any]
) -> None:
    null = NULLS[simulator]
    for own, of_null in ((PASSES, fails), (PASSES, PASSES), (fails, fails), (fails, PASSES)):
        assert verdicts({simulator: own, null: of_null}) == {
            simulator: {
                "simulator_passes": own is PASSES,
                "null_fails": of_null is fails,
                "tells_simulator_from_null": own is PASSES and of_null is fails,
            }
        }
