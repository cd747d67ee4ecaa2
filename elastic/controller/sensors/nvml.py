"""The GPUs of places as NVML sees them. Neither its absence nor that of any field is an error."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.controller.snapshot import DeviceStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """The names of a CUDA device in NVML, whose ordinals are others than CUDA's; None: not known."""

    ordinal: int
    uuid: str | None = None
    """In the form `GPU-…`, also of a part of a GPU (MIG), which NVML knows as `MIG-…`."""
    bus_id: str | None = None
    """In the form `00000000:3B:00.0`."""


def identify(ordinal: int) -> Identity:
    """Return the identity of a CUDA device of this process."""
    import torch

    properties: Any = torch.cuda.get_device_properties(ordinal)
    uuid = getattr(properties, "uuid", None)
    bus = [getattr(properties, name, -1) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return Identity(
        ordinal,
        None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}",
        None if -1 in bus else "{:08X}:{:02X}:{:02X}.0".format(*bus),
    )


class NVMLSensor:
    """The GPUs of places: `{"cuda:0#a": 0}`, place -> CUDA ordinal. Opened at the first reading, closed by `close`."""

    def __init__(self, ordinals: Mapping[str, int], identity: Callable[[int], Identity] = identify) -> None:
        self._ordinals = dict(ordinals)
        self._identity = identity
        self._handles: dict[int, Any] = {}
        self._unsupported: set[tuple[int, str]] = set()
        self._nvml: Any = None
        self._opened = False
        self.absence = ""
        """The reason why there is no NVML, in words."""

    def read(self) -> tuple[DeviceStats, ...]:
        """Return one record for each place; None where NVML does not tell. Takes some 40 ms, most of them asleep."""
        if not self._opened:
            self._open()
        readings = {ordinal: self._read(ordinal) for ordinal in dict.fromkeys(self._ordinals.values())}
        return tuple(DeviceStats(place, **readings[ordinal]) for place, ordinal in self._ordinals.items())

    def close(self) -> None:
        """Shut NVML down. Can be called twice."""
        if self._nvml is not None:
            self._ask(-1, "shutdown", self._nvml.nvmlShutdown)
        self._nvml, self._handles = None, {}

    def _open(self) -> None:
        self._opened = True
        if not self._ordinals:
            return
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception as error:  # no library, no driver, a driver of another version: each raises its own
            self.absence = f"{type(error).__name__}: {error}"
            logger.info("no NVML: %s", self.absence)
            return
        self._nvml = nvml
        for ordinal in dict.fromkeys(self._ordinals.values()):
            handle = self._find(ordinal)
            if handle is not None:
                self._handles[ordinal] = handle

    def _find(self, ordinal: int) -> Any:
        """Look up a device by the UUID, else the bus id, else the ordinal: CUDA's where none are hidden or sorted.

        A part of a GPU has the bus id of all of it, whose memory is not its own.
        """
        try:
            identity = self._identity(ordinal)
        except Exception as error:  # whatever CUDA raises: NVML may still know the ordinal
            logger.info("CUDA device %d cannot be identified: %s", ordinal, str(error))
            identity = Identity(ordinal)
        nvml, part = self._nvml, identity.uuid and identity.uuid.replace("GPU-", "MIG-")
        ways: Iterable[tuple[Any, Callable[[Any], Any]]] = (
            (identity.uuid, lambda uuid: nvml.nvmlDeviceGetHandleByUUID(uuid)),
            (part, lambda uuid: nvml.nvmlDeviceGetHandleByUUID(uuid)),
            (identity.bus_id, lambda bus_id: nvml.nvmlDeviceGetHandleByPciBusId(bus_id)),
            (ordinal, lambda index: nvml.nvmlDeviceGetHandleByIndex(index)),
        )
        for name, look_up in ways:
            handle = None if name is None else self._ask(ordinal, f"handle by {name}", look_up, name)
            if handle is not None:
                return handle
        return None

    def _read(self, ordinal: int) -> dict[str, Any]:
        handle, nvml = self._handles.get(ordinal), self._nvml
        if handle is None:
            return {}
        rates = self._ask(ordinal, "utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory = self._ask(ordinal, "memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        sent, received = (
            self._ask(ordinal, way, lambda way=way: nvml.nvmlDeviceGetPcieThroughput(handle, getattr(nvml, way)))
            for way in ("NVML_PCIE_UTIL_TX_BYTES", "NVML_PCIE_UTIL_RX_BYTES")
        )
        own = self._ask(
            ordinal,
            "processes",
            lambda: [
                process.usedGpuMemory
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                if process.pid == os.getpid()
            ],
        )
        return {
            "utilization": None if rates is None else rates / 100,
            "used_bytes": None if memory is None else int(memory.used),
            "total_bytes": None if memory is None else int(memory.total),
            "own_bytes": int(own[0]) if own and own[0] is not None else None,
            "pcie_tx_bytes_per_s": None if sent is None else sent * 1024.0,  # NVML has KiB/s
            "pcie_rx_bytes_per_s": None if received is None else received * 1024.0,
        }

    def _ask(self, ordinal: int, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Return NVML's answer, or None. What a device does not support is not asked for again."""
        if (ordinal, what) in self._unsupported:
            return None
        try:
            return call(*args)
        except Exception as error:  # NVML has an error class for each code; a field that is absent is no error
            logger.debug("NVML does not tell %s of device %d: %s", what, ordinal, str(error))
            not_supported = getattr(self._nvml, "NVMLError_NotSupported", ())
            if isinstance(error, (AttributeError, not_supported)):
                self._unsupported.add((ordinal, what))
            return None
