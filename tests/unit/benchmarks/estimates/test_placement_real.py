"""Policies of placement for real: all get the same requests, and are compared within rounds."""

from __future__ import annotations

import pytest
from placement_real import WAVES, Setting, compared

from elastic.planning.deployment.policies import POLICIES
from elastic.planning.estimate.performance import Load


def test_requests_rise_and_fall_at_the_same_times_for_each_policy() -> None:
    setting = Setting(Load(8, 8, rate=5.0), 10.0, 120.0)
    times = setting.arrivals()
    assert times == setting.arrivals()
    assert 0 < times[0] < times[-1] < 120
    assert len(times) == pytest.approx(5.0 * 120, rel=0.15)
    wave_s = 120 / WAVES
    inside = sum(0.25 < at_s % wave_s / wave_s < 0.75 for at_s in times)
    assert inside > 0.7 * len(times), "most come at the height of a wave"


def test_latencies_are_compared_with_those_of_the_same_round() -> None:
    def rounds(hybrid_places: int, hybrid_s: float) -> list[dict[str, dict[str, float]]]:
        figures = {"hybrid": (hybrid_places, hybrid_s), "packing": (1, 3.0), "least-loaded": (4, 1.0)}
        return [
            {name: {"places": n, "p50_s": pace * s, "p95_s": 2 * pace * s} for name, (n, s) in figures.items()}
            for pace in (1.0, 5.0, 0.5)
        ]

    rows = compared(rounds(2, 1.2))
    assert set(rows) == set(POLICIES)
    assert (rows["hybrid"]["p50_s"], rows["hybrid"]["p95_s"]) == (pytest.approx(1.2), pytest.approx(1.2))
    assert (rows["packing"]["share"], rows["least-loaded"]["p50_s"]) == (0.25, 1.0)
    assert [compared(rounds(*each))["hybrid"]["met"] for each in ((2, 1.2), (3, 1.2), (2, 1.3))] == [True, False, False]
