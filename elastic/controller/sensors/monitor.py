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
ANSWER_S = 1.0
"""For so long their answer is waited for."""


@dataclass(frozen=True)
class InstanceReadings:
    """The fields of a snapshot that the instance itself tells."""

    kv: MemoryStats
    layers: tuple[str, ...]
    residencies: tuple[tuple[str, ...], ...] = ()
    places: tuple[PlaceReading, ...] = ()
    events: tuple[Event, ...] = ()
    apart: tuple[int, ...] = ()


Machine = tuple[tuple[DeviceStats, ...], HostStats]


class MachineReader:
    """Asks the machine once a second at the most, on a thread of its own: a sensor may hang for good.

    Whoever asks waits a second at the most, and not at all for what another one waits for already, but for the first
    answer. Until there is an answer, and where there is none, the last one stays. The thread knows nothing else.
    """

    def __init__(self, ask: Callable[[], Machine]) -> None:
        self.last: Machine = ((), HostStats())
        self._ask = ask
        self._asked_s: float | None = None
        self._answered = False
        self._fault = ""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def read(self, now: float) -> Machine:
        """Return the last reading, as of a time in seconds."""
        if self._lock.acquire(timeout=ANSWER_S):  # or a fork has left it to a thread that is not here
            try:
                thread = self._asked(now)
            finally:
                self._lock.release()
            if thread is not None:
                thread.join(ANSWER_S)
        return self.last

    def _asked(self, now: float) -> threading.Thread | None:
        """Ask, if the reading is old and nobody asks; return the thread that is to be waited for."""
        fresh = self._asked_s is not None and now - self._asked_s < SENSORS_S
        if fresh or (self._thread is not None and self._thread.is_alive()):
            return self._thread if fresh and not self._answered else None
        self._asked_s = now
        thread = threading.Thread(target=self._run, name="elastic-sensors", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are no threads to be had
            self._note(error_text(error))
            return None
        self._thread = thread
        return thread

    def _run(self) -> None:
        fault = ""
        try:
            self.last = self._ask()
        except Exception as error:  # of whatever kind: policies go by the instance's own readings too
            fault = error_text(error)
        self._note(fault)
        self._answered = True

    def _note(self, fault: str) -> None:
        """Log a fault when its text changes."""
        if fault and fault != self._fault:
            logger.warning("the machine cannot be read, and its last reading stays: %s", fault)
        self._fault = fault


class Monitor:
    """Reads the instance at each snapshot, and the machine by a `MachineReader`."""

    def __init__(
        self,
        counters: RequestMetrics,
        instance: Callable[[], InstanceReadings],
        busy: Callable[[], bool],
        machine: Callable[[], Machine],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = counters
        self._instance = instance
        self._busy = busy
        self._machine = MachineReader(machine)
        self._clock = clock

    def read(self) -> Snapshot:
        """Return the snapshot of now."""
        now = self._clock()
        devices, host = self._machine.read(now)
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
