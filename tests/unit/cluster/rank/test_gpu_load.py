"""The load of a rank's GPUs, by readings of a sensor."""

from __future__ import annotations

import pytest

from elastic.cluster.rank import gpu_load
from elastic.cluster.rank.gpu_load import GPULoad
from elastic.controller.snapshot import DeviceStats
from elastic.planning.deployment.devices import WINDOW_S


def test_the_mean_of_the_busiest_gpu_is_the_load() -> None:
    readings = [
        (DeviceStats("cuda:0", 0.5), DeviceStats("cuda:1", 0.1)),
        (DeviceStats("cuda:0", 0.7), DeviceStats("cuda:1", None)),
    ]
    load = GPULoad(lambda: readings.pop(0))
    assert load.utilization is None
    assert load._look()
    assert load._look()
    assert load.utilization == pytest.approx(0.6)


def test_what_was_seen_is_not_told_when_the_window_is_over() -> None:
    readings = [(DeviceStats("cuda:0", 0.5),)]
    load = GPULoad(lambda: readings.pop() if readings else (DeviceStats("cuda:0", None),))
    load._look()
    for _ in range(WINDOW_S - 1):
        load._look()
        assert load.utilization == 0.5
    load._look()
    assert load.utilization is None


def test_it_looks_again_and_again_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_load, "EVERY_S", 0.001)
    seen, closed = [], []

    def read() -> tuple[DeviceStats, ...]:
        seen.append(None)
        if len(seen) == 3:
            load._ending.set()
        return (DeviceStats("cuda:0", 0.25),)

    load = GPULoad(read, lambda: closed.append(None))
    load.start()
    assert load._thread is not None
    load._thread.join(10)
    load.close()
    load.close()
    assert (len(seen), len(closed)) == (3, 2)
    assert load.utilization == 0.25


def test_without_a_gpu_there_is_no_thread_and_no_load() -> None:
    for load in (GPULoad.of({}), GPULoad(lambda: (DeviceStats("cuda:0"),))):
        load.start()
        assert load._thread is None
        assert load.utilization is None
        load.close()
