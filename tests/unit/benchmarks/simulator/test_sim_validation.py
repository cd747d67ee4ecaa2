"""The validation of the simulator: what it counts as a miss, and that it fails a simulator without attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import sim_validation
from sim_behaviour import Behaviour
from sim_fit import STAGE_LINKS, Fitted
from sim_runs import TimedStep
from sim_served import FIGURES, SYSTEMS, Measured, RealRun, calibration, load_of
from sim_validation import (
    LEAD_S,
    NULLS,
    PACED,
    TARGETS,
    Simulated,
    compared,
    errors,
    fitted_to,
    judged,
    rank_model,
    simulated_once,
    turned,
    verdicts,
)

from elastic.bench.traces.trace import Trace
from elastic.engines.core.step import Step
from elastic.planning.estimate.layer_cost import LayerCost
from elastic.sim.core import fleet
from elastic.sim.core.executor import LocalExecutor
from elastic.sim.core.host import HostSharing
from elastic.sim.core.instance import PlacePages
from elastic.sim.mechanisms.model import Links

PASSES: dict[str, Any] = {"missed": [], "turned": []}
MISSES = {**PASSES, "missed": ["kv_use"]}
TURNS = {**PASSES, "turned": ["kv_use: one and two, conv"]}


def run(system: str = "one", load: str = "conv", memory: str = "roomy", *, real: float = 1.0, **told: Any) -> Any:
    """A run whose figures are all `real`, and what simulators said of them: one number for all, or some of them."""
    figures = {
        name: {figure: value.get(figure, real) if isinstance(value, Mapping) else value for figure in FIGURES}
        for name, value in told.items()
    }
    run = {"system": system, "load": load, "memory": memory, "real": dict.fromkeys(FIGURES, real)}
    return {**run, **figures, "off": {name: {} for name in told}}


def test_errors_are_relative_to_the_real_figures_and_have_no_sign() -> None:
    found = errors(run(real=2.0, simulated={"kv_use": 1.5, "p95_ttft_s": 3.0}), "simulated")
    assert {figure: error for figure, error in found.items() if error} == {"kv_use": 0.25, "p95_ttft_s": 0.5}


@pytest.mark.parametrize(("figure", "most"), [item for item in TARGETS.items() if item[1] is not None])
def test_a_figure_is_missed_whose_mean_error_over_runs_is_above_its_target(figure: str, most: float) -> None:
    def told(*parts: float) -> list[str]:
        return judged([run(simulated={figure: 1 + part * most}) for part in parts], "simulated")["missed"]

    assert told(0.0, 1.9) == told(-0.99, 0.99) == []
    assert told(0.0, 2.1) == told(-1.01, 1.01) == [figure]


@pytest.mark.parametrize("figure", ["p99_ttft_s", "p99_tpot_s"])
def test_of_p99_any_error_is_told_and_none_is_missed(figure: str) -> None:
    found = judged([run(simulated={figure: 3.0})], "simulated")
    assert found["mean_error"][figure] == 2.0
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


# -- "real" runs of ranks whose cost is known

WITHOUT_ATTENTION = LayerCost(((1, 0.010), (256, 0.040)), chunk=2e-4, pair=0.0, prefix=0.0, seen=0.0, block=32)
WITH_ATTENTION = replace(WITHOUT_ATTENTION, pair=1.2e-7, seen=1e-5)
"""At 1,000 tokens attention takes as long as all else, as in the model that is served for the validation."""
NOISE, SECONDS = 0.05, 8.0
PLACES = {"roomy": PlacePages(4 * 2000, 0, 4), "tight": PlacePages(4 * 80, 0, 4)}


class RecordedExecutor(LocalExecutor):
    """Writes down its steps, as ranks do that are served for the validation."""

    def __init__(self, made: list[RecordedExecutor], *options: Any) -> None:
        super().__init__(*options)
        self.rank, self.steps = len(made), list[TimedStep]()
        made.append(self)

    def execute(self, step: Step) -> Any:
        chunks = tuple((chunk.start, len(chunk.tokens)) for chunk in step.chunks)
        begin_s, future = self._clock.now, super().execute(step)
        future.add_done_callback(lambda _: self.steps.append(TimedStep(self.rank, begin_s, self._clock.now, chunks)))
        return future


def served(
    cost: LayerCost, trace: Trace, system: str, load: str, memory: str, seed: int, links: Links = STAGE_LINKS
) -> RealRun:
    """A run as if it were real, of ranks with this cost and with noise of their own."""
    made: list[RecordedExecutor] = []
    known = Fitted(cost, HostSharing(), (), {}, stage_links=links)
    ranks = tuple(range(SYSTEMS[system].ranks))
    about = (load, load, memory, system, trace, PLACES[memory])
    asked = RealRun(*about, {}, [], ("before", "after"), LEAD_S, ranks, 0.0, Behaviour())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "LocalExecutor", lambda *options: RecordedExecutor(made, *options))
        told = simulated_once(asked, replace(rank_model(asked, known, 0.0), noise=NOISE), known, seed)
    steps = sorted((step for each in made for step in each.steps), key=lambda step: step.begin_s)
    return replace(asked, figures=told.figures, behaviour=told.behaviour, steps=steps)


def measured(cost: LayerCost) -> Measured:
    """Calibrations, and runs of other requests."""
    found = Measured(messages_s=[0.0])
    for seed, name in enumerate(("before", "after"), 100):
        trace = calibration(SECONDS / 2, 1, seed, None)
        found.alone[name] = served(cost, trace, "one", name, "roomy", seed).steps
    for load, memory in (("conv", "roomy"), ("code", "tight")):
        for seed, system in enumerate(("one", "two"), 200):
            trace = load_of(load, SYSTEMS[system].busy, SECONDS, cost).trace(7)
            trace = trace.with_tokens(1.0, most=PLACES["tight"].budget // 4 * 32 // 2)
            found.runs.append(served(cost, trace, system, load, memory, seed))
    return found


def test_what_was_served_several_times_counts_by_its_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace((), "conv", window=(0.0, SECONDS))

    asked = RealRun("", "conv", "roomy", "tp", trace, PLACES["roomy"], {}, [], (), 0.0, (), 0.0, Behaviour())

    def real(value: float, steps_s: float) -> RealRun:
        behaviour = Behaviour(bubbles=value / 10, shared_step_s=steps_s)
        return replace(asked, figures=dict.fromkeys(FIGURES, value), behaviour=behaviour)

    def told(real: RealRun, *_: Any) -> dict[str, list[Simulated]]:
        behaviour = Behaviour(bubbles=0.2, shared_step_s=2 * (real.behaviour.shared_step_s or 0.0))
        value = real.figures["kv_use"]
        return {"simulated": [Simulated(dict.fromkeys(FIGURES, value + more), behaviour) for more in (0, 1, 5)]}

    monkeypatch.setattr(sim_validation, "all_simulated", told)
    (run,) = compared(Measured(messages_s=[0.0], runs=[real(1.0, 1.0), real(2.0, 1.0), real(4.0, 3.0)]), {})
    assert {run["real"]["kv_use"], run["simulated"]["kv_use"]} == {2.0, 4.0}  # of 1, 2, 6; 2, 3, 7; 4, 5, 9
    assert run["again"]["kv_use"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert run["off"]["simulated"] == {"actions": 0.0, "bubbles": pytest.approx(0.2), "shared_step": pytest.approx(1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("attention", [True, False])
def test_a_simulator_without_the_attention_term_fails_where_the_right_one_passes(attention: bool) -> None:
    """It passes, too, where attention takes no time: that term is what it fails for."""
    found = measured(WITH_ATTENTION if attention else WITHOUT_ATTENTION)
    fitted = fitted_to(found)
    runs = compared(found, fitted)
    results = {name: judged(runs, name) for name in (*fitted, *PACED)}
    assert results["simulated"]["missed"] == results["simulated"]["turned"] == []
    assert bool(results["without attention"]["missed"]) == attention
    told = {name: verdict["tells_simulator_from_null"] for name, verdict in verdicts(results).items()}
    assert told == {"simulated": attention, "each step's pace": True, "each second's pace": attention}


@pytest.mark.parametrize("system", ["stages", "tp"])
def test_what_was_measured_between_stages_is_what_stages_take_and_no_others(system: str) -> None:
    trace = load_of("conv", SYSTEMS[system].busy, SECONDS, WITH_ATTENTION).trace(7)
    near, far = (
        served(WITH_ATTENTION, trace, system, "conv", "roomy", 1, replace(STAGE_LINKS, hop_s=hop_s, stage_s=hop_s))
        for hop_s in (0.0, 1e-2)
    )
    if system == "stages":  # some of which is hidden behind other batches
        assert far.figures["p50_tpot_s"] > near.figures["p50_tpot_s"] + 1e-2
    else:
        assert far.figures == near.figures


@pytest.mark.parametrize("system", ["two-killed", "tp-killed"])
def test_a_rank_is_killed_in_a_simulated_run_when_it_is_in_the_real_one(system: str) -> None:
    trace = load_of("conv", 0.3, SECONDS, WITH_ATTENTION).trace(7)
    found = served(WITH_ATTENTION, trace, system, "conv", "roomy", 0)
    assert found.kill_s == SYSTEMS[system].kill * trace.duration_s  # type: ignore[operator]
    lost = [at_s for kind, at_s in found.behaviour.actions if kind == "lost"]
    assert lost == [pytest.approx(found.kill_s, abs=0.01)]


def test_stages_of_a_simulated_run_have_bubbles() -> None:
    trace = load_of("conv", 0.3, SECONDS, WITH_ATTENTION).trace(7)
    bubbles = served(WITH_ATTENTION, trace, "stages", "conv", "roomy", 0).behaviour.bubbles
    assert bubbles is not None
    assert 0 < bubbles < 1
    assert served(WITH_ATTENTION, trace, "two", "conv", "roomy", 0).behaviour.bubbles is None
