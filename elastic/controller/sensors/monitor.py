"""The monitor: everything that a policy sees, put into one snapshot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.controller.snapshot import DeviceStats, HostStats, MemoryStats, PlaceReading, Snapshot
from elastic.types import Event

SENSORS_S = 1.0
"""NVML and host memory are read no more often: they are slow to ask, and slow to change."""


@dataclass(frozen=True)
class PlacementReadings:
    """The fields of a snapshot that say where layers are, and what was done lately."""

    residencies: tuple[tuple[str, ...], ...] = ()
    places: tuple[PlaceReading, ...] = ()
    events: tuple[Event, ...] = ()
    apart: tuple[int, ...] = ()


class Monitor:
    """Reads the instance at each snapshot, and the machine once a second."""

    def __init__(
        self,
        counters: RequestMetrics,
        kv: Callable[[], MemoryStats],
        layers: Callable[[], tuple[str, ...]],
        busy: Callable[[], bool],
        devices: Callable[[], tuple[DeviceStats, ...]],
        host: Callable[[], HostStats],
        clock: Callable[[], float] = time.monotonic,
        placed: Callable[[], PlacementReadings] = PlacementReadings,
    ) -> None:
        self.counters = counters
        self.kv = kv
        """What the KV cache has; an engine with a cache of its own may put its own count here."""
        self._layers = layers
        self._busy = busy
        self._devices = devices
        self._host = host
        self._clock = clock
        self._placed = placed
        self._machine: tuple[tuple[DeviceStats, ...], HostStats] = (), HostStats()
        self._machine_s: float | None = None
        self._asking = threading.Lock()

    def read(self) -> Snapshot:
        """Now."""
        now = self._clock()
        with self._asking:
            if self._machine_s is None or now - self._machine_s >= SENSORS_S:
                self._machine = self._devices(), self._host()
                self._machine_s = now
        busy = self._busy()  # before the layers: if nothing is under way, they are as they stay
        devices, host = self._machine
        traffic, kv, layers, placed = self.counters.read(), self.kv(), self._layers(), self._placed()
        places = _with_idle(placed.places, devices)
        seen = Snapshot(now, traffic, kv, layers, busy, devices, host, placed.residencies, places, placed.events)
        return replace(seen, apart=placed.apart)


def _with_idle(places: tuple[PlaceReading, ...], devices: tuple[DeviceStats, ...]) -> tuple[PlaceReading, ...]:
    used = {device.place: device.utilization for device in devices if device.utilization is not None}
    return tuple(replace(place, idle=1 - used[place.name]) if place.name in used else place for place in places)
