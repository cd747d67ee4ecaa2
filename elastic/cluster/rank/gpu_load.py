"""How busy the GPUs of a rank are, by NVML, whoever uses them: looked at every second. (iServe, section 6)"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence

from elastic.controller.sensors.nvml import NVMLSensor
from elastic.controller.snapshot import DeviceStats
from elastic.planning.deployment.devices import WINDOW_S

EVERY_S = 1.0


class GPULoad:
    """The mean utilization of the busiest of some GPUs over the last two minutes. Without a GPU it does nothing."""

    def __init__(self, read: Callable[[], Sequence[DeviceStats]], close: Callable[[], None] = lambda: None) -> None:
        self._read, self._close_sensor = read, close
        self._readings: deque[dict[str, float]] = deque(maxlen=round(WINDOW_S / EVERY_S))
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, ordinals: dict[str, int]) -> GPULoad:
        """Make one of places on CUDA: place -> CUDA ordinal."""
        sensor = NVMLSensor(ordinals)
        return cls(sensor.read if ordinals else tuple, sensor.close)

    @property
    def utilization(self) -> float | None:
        """Of the busiest, from 0 to 1; None where NVML does not tell, or there is no GPU."""
        readings = list(self._readings)
        places = {place for reading in readings for place in reading}
        means = [statistics.fmean(r[place] for r in readings if place in r) for place in places]
        return max(means, default=None)

    def start(self) -> None:
        """Begin to look, unless the first look shows that there is nothing to see."""
        if self._look():
            self._thread = threading.Thread(target=self._run, name="elastic-gpu-load", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look no more. Can be called twice."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        self._close_sensor()

    def _run(self) -> None:
        while not self._ending.wait(EVERY_S):
            self._look()

    def _look(self) -> bool:
        """Note a reading; return whether NVML told anything."""
        seen = {each.place: each.utilization for each in self._read() if each.utilization is not None}
        self._readings.append(seen)  # also where there is nothing: what was seen before grows old
        return bool(seen)
