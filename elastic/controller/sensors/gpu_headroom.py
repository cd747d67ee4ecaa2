"""The room of memory to grow beside the other processes of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic.controller.snapshot import DeviceStats, MemoryStats

KEPT_FREE_BYTES = 256 << 20
"""Bytes of each GPU that are left to the driver and to activations."""


def growth_bytes(devices: Sequence[DeviceStats], kept_free_bytes: int = KEPT_FREE_BYTES) -> int | None:
    """Return the bytes that we may still add on these devices, as all processes use them now. None: not known."""
    free: dict[str, int] = {}
    for device in devices:
        if device.total_bytes is None or device.used_bytes is None:
            return None
        gpu = device.place.partition("#")[0]
        free[gpu] = max(0, device.total_bytes - device.used_bytes - kept_free_bytes)
    return sum(free.values()) if free else None


def reachable(kv: MemoryStats, devices: Sequence[DeviceStats]) -> MemoryStats:
    """Bound the KV capacity by what can be had: less where other processes took what is not created yet."""
    growth = growth_bytes(devices)
    if growth is None or kv.created_bytes is None:
        return kv
    return replace(kv, capacity_bytes=min(kv.capacity_bytes, max(kv.used_bytes, kv.created_bytes) + growth))
