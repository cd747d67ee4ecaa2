"""The monitor: all that a policy sees, put into one snapshot."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.controller.decision import error_text
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.controller.snapshot import DeviceStats, HostStats, MemoryStats, PlaceReading, Snapshot
from elastic.types import Event

logger = logging.getLogger(__name__)
SENSORS_S = 1.0
"""NVML and host memory are read no more often: they are slow to ask, and slow to change."""


@dataclass(frozen=True)
class InstanceReadings:
    """The fields of a snapshot that the instance itself tells."""

    kv: MemoryStats
    layers: tuple[str, ...]
    residencies: tuple[tuple[str, ...], ...] = ()
    places: tuple[PlaceReading, ...] = ()
    events: tuple[Event, ...] = ()
    apart: tuple[int, ...] = ()


class Monitor:
    """Reads the instance at each snapshot, and the machine once a second.

    Nobody waits for a machine that another thread is asking, but for the first answer, and that a second at the most: a
    sensor may hang. Where the machine cannot be read its last reading stays.
    """

    def __init__(
        self,
        counters: RequestMetrics,
        instance: Callable[[], InstanceReadings],
        busy: Callable[[], bool],
        machine: Callable[[], tuple[tuple[DeviceStats, ...], HostStats]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = counters
        self._instance = instance
        self._busy = busy
        self._machine = machine
        self._clock = clock
        self._devices: tuple[DeviceStats, ...] = ()
        self._host = HostStats()
        self._machine_s: float | None = None
        self._machine_fault = ""
        self._reading = threading.Lock()

    def read(self) -> Snapshot:
        """Return the snapshot of now."""
        now = self._clock()
        if self._reading.acquire(timeout=SENSORS_S if self._machine_s is None else 0):
            try:
                self._read_machine(now)
            finally:
                self._reading.release()
        devices, host = self._devices, self._host
        busy = self._busy()  # before the instance: if nothing is under way, layers are as they stay
        traffic, instance = self.counters.read(), self._instance()
        used = {device.place: device.utilization for device in devices if device.utilization is not None}
        return Snapshot(
            at_s=now,
            traffic=traffic,
            kv=instance.kv,
            layers=instance.layers,
            busy=busy,
            devices=devices,
            host=host,
            residencies=instance.residencies,
            places=tuple(replace(p, idle=1 - used[p.name]) if p.name in used else p for p in instance.places),
            events=instance.events,
            apart=instance.apart,
        )

    def _read_machine(self, now: float) -> None:
        """Read the machine if its reading is old. A fault is logged when its text changes."""
        if self._machine_s is not None and now - self._machine_s < SENSORS_S:
            return
        fault = ""
        try:
            self._devices, self._host = self._machine()
        except Exception as error:  # of whatever kind: policies go by the instance's own readings too
            fault = error_text(error)
            if fault != self._machine_fault:
                logger.warning("the machine cannot be read, and its last reading stays: %s", fault)
        self._machine_s, self._machine_fault = now, fault
