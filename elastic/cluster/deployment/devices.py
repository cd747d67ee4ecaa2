"""What deployments have reserved of devices, and how busy these are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from elastic.cluster.deployment.busy import BusyShares
from elastic.errors import CapacityError, ConfigError
from elastic.planning.deployment.devices import DeviceState
from elastic.planning.estimate.devices import Device


class DeviceBook:
    """Bytes of devices by who has reserved them. Thread-safe.

    A reservation is all that a deployment may have there: weights, its limit of keys and values, activations. Memory
    is lent to a guest, who has it as long as no deployment wants it.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = {device.name: device for device in devices}
        self.busy = BusyShares()
        self._memory = {device.name: device.memory_bytes for device in devices}
        self._reserved: dict[str, dict[str, int]] = {}
        self._recalls: dict[str, Callable[[], object]] = {}  # guest -> ends it
        self._lock = threading.Lock()

    def memory(self, device: str) -> int:
        """Return what all deployments together may have of a device."""
        with self._lock:
            return self._memory[device]

    def resize(self, device: str, nbytes: int) -> None:
        """Have more or less of a device from now on. Raises `ConfigError` for an unknown one."""
        with self._lock:
            if not isinstance(device, str) or device not in self._memory:
                raise ConfigError(f"there is no device {device!r}; there are: {', '.join(self._memory)}")
            if nbytes < 0:
                raise ConfigError(f"{device}={nbytes} bytes cannot be; give 0 or more")
            self._memory[device] = nbytes

    def free(self, without: str = "") -> dict[str, int]:
        """Return the bytes of each device that nobody has reserved; `without` one, what it could have: those of its
        own and of guests count as free then."""
        with self._lock:
            return {name: max(0, self._left(name, without)) for name in self._memory}

    def reserve(self, who: str, nbytes: Mapping[str, int], recall: Callable[[], object] | None = None) -> None:
        """Have so many bytes of devices, instead of what `who` had; guests whose they were are ended.

        With `recall` it is a guest, who has them until a deployment wants them: that is called then, and gives them
        back. Raises `CapacityError`; then all is as before.
        """
        with self._lock:
            for device, wanted in nbytes.items():
                left = self._left(device, who)
                if wanted > left and wanted > self._reserved.get(who, {}).get(device, 0):
                    raise CapacityError(
                        f"{device} has {max(0, left):,} bytes left for {who!r}, which needs {wanted:,} there; deploy "
                        "it with an intent that takes less, or remove another model",
                        requested_bytes=wanted,
                        free_bytes=max(0, left),
                        total_bytes=self._memory[device],
                    )
            self._reserved[who] = {device: wanted for device, wanted in nbytes.items() if wanted}
            short = {device for device in nbytes if self._left(device, "") < 0}
            recalls = [call for guest, call in self._recalls.items() if short & self._reserved[guest].keys()]
            if recall is not None:
                self._recalls[who] = recall
        for end in recalls:
            end()

    def reserve_all(self, who: str, devices: Sequence[str]) -> None:
        """Have all that is free on some devices, besides what `who` has of others."""
        free = self.free(who)
        self.reserve(who, {**self.reserved(who), **{name: free[name] for name in devices}})

    def lacking(self, who: str) -> str:
        """Say on which device others, or nobody, left less than `who` has reserved; "" where that is not so."""
        free, reserved = self.free(who), self.reserved(who)
        short = next((name for name, nbytes in reserved.items() if nbytes > free.get(name, 0)), None)
        return f"{short} has {free.get(short, 0):,} bytes for it, of {reserved[short]:,}" if short is not None else ""

    def reserved(self, who: str) -> dict[str, int]:
        """Return what somebody has of each device."""
        with self._lock:
            return dict(self._reserved.get(who, {}))

    def release(self, who: str) -> None:
        """Give back all that somebody has. Nothing happens where that is nothing."""
        with self._lock:
            self._reserved.pop(who, None)
            self._recalls.pop(who, None)

    def states(self, without: str = "", kept_bytes: int = 0) -> tuple[DeviceState, ...]:
        """Return the devices as a planner of placements sees them; `kept_bytes` of each are not told."""
        loads, free = self.busy.shares(without), self.free(without)
        return tuple(
            DeviceState(name, max(0, free[name] - kept_bytes), loads.get(name, 0.0), self.models(name, without))
            for name in free
        )

    def models(self, device: str, without: str = "") -> tuple[str, ...]:
        """Return who has reserved something of a device."""
        with self._lock:
            return tuple(who for who, each in self._reserved.items() if device in each and who != without)

    def _left(self, device: str, without: str) -> int:
        ignored = {without, *self._recalls} if without else set[str]()
        taken = sum(each.get(device, 0) for who, each in self._reserved.items() if who not in ignored)
        return self._memory[device] - taken
