"""The loads by which the simulator's speed is told are the same whichever steps are events."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

import sim_speed


def test_a_load_has_as_many_requests_and_steps_in_fewer_events_where_steps_are_taken_together() -> None:
    each, together = (sim_speed.timed(sim_speed.load(40, 1, stretch_s), 1) for stretch_s in sim_speed.STRETCHES_S)
    assert each["requests"] == together["requests"] > 20
    steps, same = (row["steps_per_s"] * row["seconds"] for row in (each, together))
    assert abs(same - steps) < 0.01 * steps
    events, fewer = (row["events_per_s"] * row["seconds"] for row in (each, together))
    assert fewer < events / 2
