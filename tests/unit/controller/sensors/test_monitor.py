# ruff: noqa: N802
"""NVML and host memory: every field, each field missing, no library, no driver."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from elastic.controller.sensors import monitor as monitoring
from elastic.controller.sensors.host_memory import read_host
from elastic.controller.sensors.monitor import InstanceReadings, Monitor
from elastic.controller.sensors.nvml import Identity, NVMLSensor
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.controller.snapshot import DeviceStats, HostStats, MemoryStats

EVERYTHING = {
    "utilization": 0.37,
    "used_bytes": 600,
    "total_bytes": 1000,
    "own_bytes": 450,
    "pcie_tx_bytes_per_s": 5 * 1024.0,
    "pcie_rx_bytes_per_s": 7 * 1024.0,
}
FIELDS = {
    "nvmlDeviceGetUtilizationRates": ["utilization"],
    "nvmlDeviceGetMemoryInfo": ["used_bytes", "total_bytes"],
    "nvmlDeviceGetComputeRunningProcesses": ["own_bytes"],
    "nvmlDeviceGetPcieThroughput": ["pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"],
}


class FakeNvml:
    """Knows the devices that it is given, by their UUID, bus id and index; counts its calls."""

    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801
        pass

    def __init__(self, devices: list[tuple[str, str]], init_fails: bool = False) -> None:
        self.devices = devices
        self.failing: dict[str, Exception] = {}
        self.calls: list[str] = []
        self.asked: list[int] = []
        self.init_fails = init_fails

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]

    def nvmlInit(self) -> None:
        self.call("nvmlInit")
        if self.init_fails:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.call("nvmlShutdown")

    def find(self, name: str, index: int, value: Any) -> int:
        self.call(name)
        for number, device in enumerate(self.devices):
            if (*device, number)[index] == value:
                self.asked.append(number)
                return number
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self.find("nvmlDeviceGetHandleByUUID", 0, uuid)

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> int:
        return self.find("nvmlDeviceGetHandleByPciBusId", 1, bus_id)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return self.find("nvmlDeviceGetHandleByIndex", 2, index)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.call("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self.call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=600, total=1000, free=400)

    def nvmlDeviceGetPcieThroughput(self, handle: int, way: int) -> int:
        self.call("nvmlDeviceGetPcieThroughput")
        return (5, 7)[way]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        self.call("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=1, usedGpuMemory=150), SimpleNamespace(pid=os.getpid(), usedGpuMemory=450)]


UUIDS = [("GPU-aa", "00000000:0A:00.0"), ("GPU-bb", "00000000:0B:00.0")]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(UUIDS)
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def sensor(identity: Identity | None = None, places: dict[str, int] | None = None) -> NVMLSensor:
    return NVMLSensor(
        places or {"cuda:0": 0}, lambda ordinal: identity or Identity(ordinal, "GPU-bb", "00000000:0B:00.0")
    )


def test_all_fields_are_read(nvml: FakeNvml) -> None:
    assert sensor().read() == (DeviceStats("cuda:0", **EVERYTHING),)


@pytest.mark.parametrize("function", FIELDS)
@pytest.mark.parametrize("error", ["NVMLError", "NVMLError_NotSupported", "absent"])
def test_any_field_may_be_missing(nvml: FakeNvml, function: str, error: str) -> None:
    nvml.failing[function] = AttributeError("old library") if error == "absent" else getattr(nvml, error)("no")
    one = sensor()
    expected = {**EVERYTHING, **dict.fromkeys(FIELDS[function])}
    assert one.read() == one.read() == (DeviceStats("cuda:0", **expected),)
    asked = nvml.calls.count(function)
    once = len(FIELDS[function]) if function == "nvmlDeviceGetPcieThroughput" else 1
    assert asked == (2 * once if error == "NVMLError" else once)  # what is not supported is not asked for again
    if error == "NVMLError":
        nvml.failing.clear()
        assert one.read() == (DeviceStats("cuda:0", **EVERYTHING),)


@pytest.mark.parametrize(
    ("identity", "found"),
    [
        (Identity(0, "GPU-bb", "00000000:0A:00.0"), 1),
        (Identity(0, None, "00000000:0B:00.0"), 1),
        (Identity(0, "MIG-cc", "00000000:0B:00.0"), 1),
        (Identity(1), 1),
        (Identity(0), 0),
    ],
)
def test_a_device_is_found_by_uuid_then_bus_then_ordinal(nvml: FakeNvml, identity: Identity, found: int) -> None:
    assert NVMLSensor({"cuda:0": identity.ordinal}, lambda ordinal: identity).read()[0].used_bytes == 600
    assert nvml.asked == [found]


def test_a_part_of_a_gpu_is_not_taken_for_all_of_it(nvml: FakeNvml) -> None:
    nvml.devices = [*UUIDS, ("MIG-cc", "none")]
    sensor(Identity(0, "GPU-cc", "00000000:0B:00.0")).read()
    assert nvml.asked == [2]


def test_a_device_that_nvml_does_not_know_tells_nothing(nvml: FakeNvml) -> None:
    assert sensor(Identity(7, "GPU-zz", "none"), {"cuda:7": 7}).read() == (DeviceStats("cuda:7"),)


def test_a_device_that_cannot_be_identified_is_found_by_its_ordinal(nvml: FakeNvml) -> None:
    def fails(ordinal: int) -> Identity:
        raise RuntimeError("no CUDA")

    assert NVMLSensor({"cuda:1": 1}, fails).read() == (DeviceStats("cuda:1", **EVERYTHING),)
    assert nvml.asked == [1]


def test_places_on_one_device_share_a_reading(nvml: FakeNvml) -> None:
    found = sensor(places={"cuda:0#a": 0, "cuda:0#b": 0}).read()
    assert found == (DeviceStats("cuda:0#a", **EVERYTHING), DeviceStats("cuda:0#b", **EVERYTHING))
    assert nvml.calls.count("nvmlDeviceGetMemoryInfo") == 1


def test_a_process_that_is_not_listed_is_not_known(nvml: FakeNvml) -> None:
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: []  # type: ignore[method-assign]
    assert sensor().read()[0].own_bytes is None


def test_no_library_and_no_driver_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    one = sensor()
    assert one.read() == (DeviceStats("cuda:0"),)
    assert "pynvml" in one.absence
    fake = FakeNvml(UUIDS, init_fails=True)
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    one = sensor()
    assert one.read() == one.read() == (DeviceStats("cuda:0"),)
    assert one.absence == "NVMLError: Driver Not Loaded"
    assert fake.calls == ["nvmlInit"]  # once
    one.close()


def test_without_places_on_cuda_nothing_is_opened(nvml: FakeNvml) -> None:
    assert NVMLSensor({}).read() == ()
    assert nvml.calls == []


def test_close_can_be_called_twice_and_a_failing_shutdown_does_not_matter(nvml: FakeNvml) -> None:
    one = sensor()
    one.close()
    one.read()
    nvml.failing["nvmlShutdown"] = nvml.NVMLError("gone")
    one.close()
    one.close()
    assert nvml.calls.count("nvmlShutdown") == 1
    assert one.read() == (DeviceStats("cuda:0"),)


def test_the_real_library_has_what_is_asked_for() -> None:
    import pynvml

    fake = {name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))}
    assert fake <= set(dir(pynvml))


def test_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    host = read_host()
    assert host.available_bytes is not None
    assert host.total_bytes is not None
    assert 0 < host.available_bytes <= host.total_bytes
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert read_host() == HostStats()


def test_the_monitor_asks_the_machine_once_a_second_and_whether_it_is_busy_before_the_layers() -> None:
    now, order, read = [5.0], [], []

    def note(what: str, value: Any) -> Any:
        order.append(what)
        return value

    def machine() -> tuple[tuple[DeviceStats, ...], HostStats]:
        read.append(now[0])
        return (DeviceStats("cuda:0"),), HostStats(1, 2)

    monitor = Monitor(
        RequestMetrics(),
        lambda: note("layers", InstanceReadings(MemoryStats(1, 2, 3), ("int4",))),
        lambda: note("busy", True),
        machine,
        lambda: now[0],
    )
    for now[0] in (5.0, 5.5, 5.9, 6.0, 6.5):
        seen = monitor.read()
    assert read == [5.0, 6.0]
    assert order[:2] == ["busy", "layers"]
    assert (seen.at_s, seen.layers, seen.busy, seen.kv.use) == (6.5, ("int4",), True, 0.5)
    assert (seen.devices, seen.host) == ((DeviceStats("cuda:0"),), HostStats(1, 2))


@pytest.mark.parametrize("error", [OSError(), KeyError(b"MemTotal:"), ValueError("x"), psutil.AccessDenied()])
def test_whatever_psutil_raises_host_memory_is_not_known_then(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(psutil, "virtual_memory", fail)
    assert read_host() == HostStats()


def monitor_of(machine: Any, now: list[float]) -> Monitor:
    readings = InstanceReadings(MemoryStats(1, 2, 3), ("int4",))
    return Monitor(RequestMetrics(), lambda: readings, lambda: False, machine, lambda: now[0])


def test_the_last_reading_of_a_machine_stays_where_it_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    now: list[float] = [0.0]
    answers: list[Any] = [HostStats(1, 2), KeyError("a"), KeyError("a"), KeyError("b"), HostStats(2, 2)]

    def machine() -> tuple[tuple[DeviceStats, ...], HostStats]:
        answer = answers[int(now[0])]
        if isinstance(answer, Exception):
            raise answer
        return (), answer

    monitor, hosts = monitor_of(machine, now), []
    for now[0] in (0.0, 1.0, 1.5, 2.0, 3.0, 4.0):
        hosts.append(monitor.read().host.available_bytes)
    assert hosts == [1, 1, 1, 1, 1, 2]
    assert [record.getMessage()[-13:] for record in caplog.records] == ["KeyError: 'a'", "KeyError: 'b'"]


def test_nobody_waits_for_a_sensor_that_hangs_in_another_thread() -> None:
    now, hang, go = [0.0], threading.Event(), threading.Event()

    def machine() -> tuple[tuple[DeviceStats, ...], HostStats]:
        if now[0]:
            hang.set()
            go.wait(30)
        return (), HostStats(1, 2)

    monitor = monitor_of(machine, now)
    monitor.read()
    now[0] = 5.0
    thread = threading.Thread(target=monitor.read)
    thread.start()
    hang.wait()
    asked = threading.Thread(target=monitor.read)
    asked.start()
    asked.join(10)
    waits = asked.is_alive()
    go.set()
    thread.join()
    asked.join()
    assert not waits


def test_a_sensor_that_hangs_keeps_nobody_and_its_last_reading_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now, go, asked = [0.0], threading.Event(), []

    def machine() -> tuple[tuple[DeviceStats, ...], HostStats]:
        asked.append(now[0])
        if now[0] == 5.0:
            go.wait(5)
        return (), HostStats(len(asked), 9)

    monitor = monitor_of(machine, now)
    seen = [monitor.read().host.available_bytes]
    monkeypatch.setattr(monitoring, "ANSWER_S", 0.01)
    for now[0] in (5.0, 50.0, 500.0):
        seen.append(monitor.read().host.available_bytes)
    assert seen == [1, 1, 1, 1]
    assert asked == [0.0, 5.0]  # not again before it has answered
    go.set()
    while monitor.read().host.available_bytes != 3:
        time.sleep(0.001)
    assert asked == [0.0, 5.0, 500.0]


def test_a_sensor_that_hangs_keeps_no_model_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "ANSWER_S", 0.01)
    go = threading.Event()

    def machine() -> tuple[tuple[DeviceStats, ...], HostStats]:
        go.wait(30)
        return (), HostStats()

    monitor = monitor_of(machine, [0.0])
    monitor.read()
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None
    go.set()


def test_without_threads_the_last_reading_stays_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monitor = monitor_of(lambda: ((), HostStats(int(now[0]), 9)), now)
    assert monitor.read().host.available_bytes == 0

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        now[0] = 5.0
        assert monitor.read().host.available_bytes == 0
    assert "can't start new thread" in caplog.text
    now[0] = 10.0
    assert monitor.read().host.available_bytes == 10
