"""How far memory can grow, and whether the driver and the ledger agree about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic.controller.snapshot import DeviceStats, MemoryStats
from elastic.errors import IntegrityError

KEPT_FREE_BYTES = 256 << 20
"""Of each GPU, left to the driver and to activations."""
OVERHEAD_BYTES = 2 << 30
"""What a process has on a GPU beside the ledger at most: the CUDA context, kernels, libraries' workspaces, and what
torch's allocator keeps for activations."""


def growth_bytes(devices: Sequence[DeviceStats], kept_free_bytes: int = KEPT_FREE_BYTES) -> int | None:
    """By how many bytes we may still grow on these devices, as all processes use them now. None: not known."""
    known = [(d.place.partition("#")[0], d.total_bytes, d.used_bytes) for d in devices]
    if not known or any(total is None or used is None for _, total, used in known):
        return None
    free = {gpu: max(0, (total or 0) - (used or 0) - kept_free_bytes) for gpu, total, used in known}
    return sum(free.values())


def reachable(kv: MemoryStats, devices: Sequence[DeviceStats]) -> MemoryStats:
    """The KV cache with the capacity that can be had: less where other processes have taken what is not created yet."""
    growth = growth_bytes(devices)
    if growth is None or kv.created_bytes is None:
        return kv
    return replace(kv, capacity_bytes=min(kv.capacity_bytes, max(kv.used_bytes, kv.created_bytes) + growth))


def require_agreement(device: DeviceStats, ledger_bytes: int, overhead_bytes: int = OVERHEAD_BYTES) -> None:
    """Raise `IntegrityError` unless NVML sees what the ledger says is created on a GPU.

    At least the ledger's bytes must be in use, and by this process no more than `overhead_bytes` beside them, as far
    as NVML tells (in containers it often does not know processes).
    """
    if device.used_bytes is not None and device.used_bytes < ledger_bytes:
        raise IntegrityError(f"{device.place}: the ledger has {ledger_bytes:,} bytes, NVML sees {device.used_bytes:,}")
    if device.own_bytes is not None and not 0 <= device.own_bytes - ledger_bytes <= overhead_bytes:
        raise IntegrityError(
            f"{device.place}: the ledger has {ledger_bytes:,} bytes, NVML sees {device.own_bytes:,} of this process; "
            f"{overhead_bytes:,} more are expected at most"
        )
