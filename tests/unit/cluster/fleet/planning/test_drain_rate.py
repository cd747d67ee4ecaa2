"""How long a queue lasts, from how fast requests have ended lately."""

from __future__ import annotations

from elastic.cluster.fleet.planning.drain_rate import DrainRate


def test_a_longer_queue_takes_longer_and_a_faster_fleet_less() -> None:
    slow, fast = DrainRate(), DrainRate()
    for i in range(20):
        slow.note(i * 2.0)
        fast.note(38 + i * 0.1)
    assert slow.wait_s(10, 40.0) == 20.0
    assert slow.wait_s(20, 40.0) == 40.0
    assert fast.wait_s(100, 40.0) == 10.0
    assert fast.wait_s(100, 80.0) > 60 - 1e-9  # nothing has ended for long


def test_it_is_a_second_at_least_and_a_minute_at_most() -> None:
    rate = DrainRate()
    assert rate.wait_s(1000, 0.0) == 1.0
    rate.note(0.0)
    rate.note(0.0)
    assert rate.wait_s(1, 0.0) == 1.0
    assert rate.wait_s(10**9, 1.0) == 60.0
