"""Kinds of devices, from their data sheets. What is predicted with them was not measured.

Rates are peaks: of dense products in 16 bits, of the device's memory, and of its link to another one, in one direction
(half of what sheets call bidirectional). Sizes are decimal, as printed. Latencies are on no sheet: `LINK_LATENCY_S` is
assumed of all.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.errors import ConfigError

LINK_LATENCY_S = 2e-5
PAGE_BYTES = {"cpu": 64 << 10, "cuda": 2 << 20}
"""Type of a device -> the usual size of a page there."""


@dataclass(frozen=True)
class DeviceKind:
    """What is known of a device before anything runs on it."""

    name: str
    type: str
    """"cpu" or "cuda"."""
    instructions: str
    """What packed weights are laid out for, such as "sm90"; "": what this machine has."""
    memory_bytes: int
    flops_s: float
    bytes_s: float
    link_bytes_s: float
    source: str
    """Where the figures are from."""


def _cuda(
    name: str, instructions: str, memory_gb: int, tflops: float, gb_s: float, link_gb_s: float, source: str
) -> DeviceKind:
    nbytes = memory_gb * 10**9
    return DeviceKind(name, "cuda", instructions, nbytes, tflops * 1e12, gb_s * 1e9, link_gb_s * 1e9, source)


_A100 = "NVIDIA A100 data sheet (1758950 r4), SXM: 312 of 624 TFLOPS with sparsity; NVLink 600 GB/s both ways"
_A6000 = "NVIDIA Ampere GA102 white paper 2.0, appendix C: 154.8 of 309.7 TFLOPS with sparsity; PCIe 4.0 x16"
_L40S = "NVIDIA L40S data sheet: 362.05 of 733 TFLOPS with sparsity; PCIe 4.0 x16, 64 GB/s both ways"
_HOPPER = "SXM: half of 1,979 TFLOPS with sparsity (989.4 in the white paper); NVLink 900 GB/s both ways"
# Read in publications that quote these documents, two for each kind, which agree: A100 glennklockwood.com and the PC2
# of Paderborn; A6000 servethehome.com and llmperf.net (NVLink joins two cards at most, at 112.5 GB/s both ways); L40S
# mullet.se and omegaco.ae; H100 archive-lib.hpctech.co.jp and glennklockwood.com; H200 NVIDIA's own system file in
# MLPerf Inference 4.1 (memory, NVLink) and aiminingco.com (rate of memory). The documents themselves were not at hand.
SHEETS: Mapping[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        _cuda("a100-40gb", "sm80", 40, 312, 1555, 300, _A100),
        _cuda("a100-80gb", "sm80", 80, 312, 2039, 300, _A100),
        _cuda("a6000", "sm86", 48, 154.8, 768, 32, _A6000),
        _cuda("l40s", "sm89", 48, 362.05, 864, 32, _L40S),
        _cuda("h100", "sm90", 80, 989.4, 3350, 450, f"NVIDIA H100 data sheet, {_HOPPER}"),
        _cuda("h200", "sm90", 141, 989.4, 4800, 450, f"NVIDIA H200 data sheet, {_HOPPER}"),
    )
}
"""By name."""


@dataclass(frozen=True)
class Device:
    """One device that a model may be put on."""

    name: str
    kind: DeviceKind
    memory_bytes: int
    """What the model may have of it, with keys and values and activations."""

    @property
    def is_place(self) -> bool:
        """Whether it is a place of a machine; else no more of it is known than its data sheet."""
        return self.kind.type == "cpu" or self.name.partition("#")[0] != self.kind.name


def sheet(name: str, *, option: str) -> DeviceKind:
    """Return a kind of device by its name. Raises `ConfigError` for an unknown one."""
    if name not in SHEETS:
        raise ConfigError(f"{option}={name!r} is no known kind of device; there are {', '.join(SHEETS)}{near(name)}")
    return SHEETS[name]


def near(name: str) -> str:
    """Ask whether kinds were meant whose names begin so, or the one that is most alike; "": none is."""
    lower = name.lower()
    begin = [kind for kind in SHEETS if lower and kind.startswith(lower)]
    meant = begin or difflib.get_close_matches(lower, SHEETS, 1)
    return f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def require_memory(kind: DeviceKind, nbytes: int, option: str) -> None:
    """Raise `ConfigError` for more memory than a device of a kind has; 80 GB of a sheet may be 80 GiB."""
    if nbytes * 10**9 > kind.memory_bytes * 2**30:
        there, wanted = shown_bytes(kind.memory_bytes), shown_bytes(nbytes)
        raise ConfigError(f"{option}: a device of {kind.name} has {there}, not {wanted}; give less")


def of_cpu(memory_bytes: int, flops_s: float, bytes_s: float, link_bytes_s: float) -> DeviceKind:
    """Return the kind of this machine's processor, whose rates are assumed."""
    return DeviceKind("cpu", "cpu", "", memory_bytes, flops_s, bytes_s, link_bytes_s, "assumed of one core")


def several(kind: DeviceKind, count: int, memory_bytes: int | None = None, first: int = 0) -> list[Device]:
    """Return so many devices of a kind, numbered from the first, each with so much memory; None: all that it has."""
    nbytes = kind.memory_bytes if memory_bytes is None else memory_bytes
    return [Device(f"{kind.name}#{number}", kind, nbytes) for number in range(first, first + count)]


def shown_bytes(nbytes: int) -> str:
    """Return a size for a person to read, in GiB or MiB."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"
