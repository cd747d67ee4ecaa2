"""What intents choose of the same candidates, and what their bounds leave out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from elastic.errors import ConfigError
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.intent import OBJECTIVES, Intent
from elastic.planning.estimate.performance import InstanceCost, Load
from elastic.planning.estimate.ranking import Candidate, Estimate, RankBytes, rank
from elastic.planning.pipeline.chunk_cost import ChunkCost

GIB = 1 << 30
LOAD = Load(prompt=1, new=100)


def candidate(configuration: Configuration, gib: float, step_s: float, loss: float | None = 0.0) -> Candidate:
    """Ranks of so much memory in all, and a second for a hundred steps of 10 ms."""
    cost = InstanceCost((((ChunkCost(0, 0, 0, step_s, step_s), 1),),))
    count = configuration.ranks
    ranks = tuple(RankBytes(f"d{n}", 80 * GIB, int(gib * GIB / count), 0, 0, 0, 0) for n in range(count))
    return Candidate(configuration, (range(1),), ranks, 8, 0, cost, "made up", quality_loss=loss)


WIDE = candidate(Configuration(4), 60, 0.010)
PAIR = candidate(Configuration(2), 34, 0.012)
ALONE = candidate(Configuration(), 20, 0.030)
SMALL = candidate(Configuration(1, 1, "int4"), 8, 0.060, loss=0.04)
ALL = (WIDE, PAIR, ALONE, SMALL)


def fitting(intent: Intent | str) -> list[str]:
    return [str(each.configuration) for each in rank(ALL, LOAD, intent) if each.fits]  # type: ignore[arg-type]


def test_each_of_the_papers_intents_chooses_what_is_the_least_of_its_own() -> None:
    first = {objective: rank(ALL, LOAD, objective)[0] for objective in OBJECTIVES}
    chosen = {objective: str(each.configuration) for objective, each in first.items()}
    assert chosen == {
        "latency": "TP4 PP1 full",
        "cost": "TP2 PP1 full",
        "memory": "TP1 PP1 int4",
        "gpu_hours": "TP2 PP1 full",
    }
    assert fitting(Intent()) == fitting("cost")
    everything = rank(ALL, LOAD)
    assert all(first[o].value(o) == min(each.value(o) for each in everything) for o in OBJECTIVES)


def test_bounds_leave_out_what_exceeds_them_and_say_so() -> None:
    ranked = rank(ALL, LOAD, Intent(latency_s=2.0))
    assert [str(each.configuration) for each in ranked if each.fits] == ["TP2 PP1 full", "TP4 PP1 full"]
    assert ranked[-1].why_not == "a request takes 6 s, above the 2 s of the intent"
    assert math.isclose(ranked[-1].latency_s, 6.0)
    assert Intent(latency_s=2.0).objective == "cost"
    assert fitting(Intent(minimize="memory", latency_s=2.0))[0] == "TP2 PP1 full"


def test_a_budget_is_spent_on_latency() -> None:
    assert Intent(cost=62).objective == "latency"
    assert fitting(Intent(cost=62)) == ["TP4 PP1 full", "TP2 PP1 full", "TP1 PP1 full", "TP1 PP1 int4"]
    assert fitting(Intent(cost=50)) == ["TP2 PP1 full", "TP1 PP1 int4"]
    assert fitting(Intent("memory", cost=50)) == ["TP1 PP1 int4", "TP2 PP1 full"]


def test_what_is_as_good_goes_by_its_memory() -> None:
    """1.0 s of 60 GiB, 1.2 s of 34, 3.0 s of 20, 6.0 s of 8."""
    every = ["TP4 PP1 full", "TP2 PP1 full", "TP1 PP1 full", "TP1 PP1 int4"]
    assert fitting(Intent("latency", tolerance=0.19)) == every
    assert fitting(Intent("latency", tolerance=0.21)) == [every[1], every[0], *every[2:]]
    assert fitting(Intent("latency", tolerance=1.0)) == [every[1], every[0], every[3], every[2]]
    assert fitting(Intent("latency", tolerance=9.0)) == every[::-1]


def test_quality_that_may_not_be_lost_rules_out_what_loses_it_and_what_was_not_measured() -> None:
    assert "TP1 PP1 int4" in fitting(Intent(quality_loss=0.05))
    assert "TP1 PP1 int4" not in fitting(Intent(quality_loss=0.03))
    (lossy,) = rank([SMALL], LOAD, Intent(quality_loss=0.03))
    assert lossy.why_not == "int4 loses 0.04 nats a token, above the 0.03 of the intent"
    unknown = candidate(Configuration(1, 1, "int4", "int8"), 8, 0.06, loss=None)
    (refused,) = rank([unknown], LOAD, Intent(quality_loss=1.0))
    assert "what int4, KV int8 loses of the quality is not known" in refused.why_not
    (full,) = rank([ALONE], LOAD, Intent(quality_loss=0))
    assert full.fits
    (free,) = rank([unknown], LOAD, Intent("memory"))
    assert free.fits


def test_an_intent_that_cannot_be_is_refused_in_words() -> None:
    for options, words in (
        ({"minimize": "speed"}, "minimize='speed' is not known"),
        ({"latency_s": 0}, "latency_s=0 cannot be met"),
        ({"latency_s": math.nan}, "latency_s=nan cannot be met"),
        ({"cost": -1.0}, "cost=-1.0 cannot be met"),
        ({"quality_loss": -0.1}, "quality_loss=-0.1 cannot be"),
        ({"tolerance": -0.1}, "tolerance=-0.1 cannot be"),
    ):
        with pytest.raises(ConfigError, match=words):
            Intent(**options)  # type: ignore[arg-type]


def test_a_misfit_stays_one_whatever_the_intent() -> None:
    full = Candidate(Configuration(), (range(1),), (RankBytes("d", 1, 2, 0, 0, 0, 0),), 0, 0, WIDE.cost, "made up")
    found: tuple[Estimate, ...] = rank([full], LOAD, Intent(latency_s=1e9))
    assert "d lacks" in found[0].why_not


@pytest.mark.parametrize(
    "make",
    [
        lambda: Load("1024", 256),  # type: ignore[arg-type]
        lambda: Load(1.5, 256),  # type: ignore[arg-type]
        lambda: Load(1, True),
        lambda: Load(1, 1, math.nan),
        lambda: Load(1, 1, "2"),  # type: ignore[arg-type]
        lambda: Intent(latency_s="1.5"),  # type: ignore[arg-type]
        lambda: Intent(cost=math.nan),
        lambda: Intent(quality_loss="0"),  # type: ignore[arg-type]
        lambda: Intent(tolerance=None),  # type: ignore[arg-type]
        lambda: Intent(["cost"]),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_is_refused_in_words(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()
