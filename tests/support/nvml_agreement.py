"""NVML and the ledger of a place compared: what tests on CUDA hold against each other."""

from __future__ import annotations

from elastic.controller.snapshot import DeviceStats
from elastic.errors import IntegrityError

OVERHEAD_BYTES = 2 << 30
"""What a process has on a GPU beside the ledger at most: the CUDA context, kernels, libraries' workspaces, and what
torch's allocator keeps for activations."""


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
