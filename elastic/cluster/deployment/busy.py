"""The share of time in which ranks compute on devices, of the last two minutes and of the last seconds. (iServe, 6)"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from elastic.planning.deployment.devices import WINDOW_S

NOW_S = 3.0
"""The last seconds, of which it is asked how busy a device is now."""


class BusyShares:
    """Shares from seconds that ranks say they have computed, and from what NVML says. Thread-safe.

    Both are told about every second. NVML sees all programs on a device, and the ranks among them.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._told: dict[tuple[str, str], deque[tuple[float, float]]] = {}  # (device, model) -> (when, seconds so far)
        self._last: dict[tuple[str, str, str], tuple[float, float]] = {}
        """(Device, model, rank) -> when it was heard last, within the window, and what it said."""
        self._utilization: dict[str, float] = {}  # device -> of the window, whoever used it
        self._lock = threading.Lock()

    def tell(
        self,
        now_s: float,
        busy_s: Mapping[tuple[str, str, str], float],
        utilization: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Note how long each rank has computed since it began, by its device, its model and its name.

        What a rank computed while it could not be asked counts when it is heard again.
        `utilization`: of devices of which it is known, the share of the window in which anybody used them.
        """
        with self._lock:
            self._utilization = dict(utilization)
            gained: dict[tuple[str, str], float] = {}
            for (device, model, rank), seconds in busy_s.items():
                _, before = self._last.get((device, model, rank), (now_s, 0.0))
                gained[device, model] = gained.get((device, model), 0.0) + max(0.0, seconds - before)
            self._last |= {rank: (now_s, seconds) for rank, seconds in busy_s.items()}
            self._last = {rank: last for rank, last in self._last.items() if now_s - last[0] <= self._window_s}
            for key in gained.keys() | self._told.keys():
                told = self._told.setdefault(key, deque())
                told.append((now_s, told[-1][1] + gained.get(key, 0.0) if told else 0.0))
                while len(told) > 2 and now_s - told[1][0] > self._window_s:
                    told.popleft()
                if key not in gained and told[0][1] == told[-1][1]:  # its ranks have gone
                    del self._told[key]

    def shares(self, without: str = "") -> dict[str, float]:
        """Return the share of the window in which each device was busy, `without` a model's ranks.

        Several ranks may compute at once.
        """
        ranks, others = self.of_ranks(self._window_s, without), self.others()
        return {device: ranks.get(device, 0.0) + others.get(device, 0.0) for device in ranks | others}

    def others(self) -> dict[str, float]:
        """Return the share of the window in which other programs than ranks used devices of which that is known."""
        ranks = self.of_ranks(self._window_s)
        with self._lock:
            return {device: max(0.0, used - ranks.get(device, 0.0)) for device, used in self._utilization.items()}

    def of_ranks(self, seconds: float, without: str = "") -> dict[str, float]:
        """Return the share of the last seconds in which ranks of each device computed, `without` a model's ranks."""
        with self._lock:
            shares = {device: 0.0 for device, _ in self._told}
            for (device, model), told in self._told.items():
                if model != without:
                    shares[device] += _share(told, seconds)
            return shares

    def settled(self, device: str) -> bool:
        """Return whether a device was looked at for long enough to say how busy it is; one without ranks is idle."""
        with self._lock:
            told = [each for (name, _), each in self._told.items() if name == device]
            return all(each[-1][0] - each[0][0] >= NOW_S for each in told)


def _share(told: deque[tuple[float, float]], seconds: float) -> float:
    last_s, total = told[-1]
    begin_s, before = next(each for each in told if last_s - each[0] <= seconds)
    if begin_s == last_s and len(told) > 1:
        begin_s, before = told[-2]
    return (total - before) / (last_s - begin_s) if last_s > begin_s else 0.0
