"""What a user can set: sizes, places, policies."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from elastic.errors import ConfigError

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", re.ASCII)
_PLACE = re.compile(r"(?P<device>cpu|cuda)(?::(?P<index>\d+))?(?:#(?P<label>\w+))?(?:=(?P<budget>.+))?", re.ASCII)


def parse_bytes(size: int | str, *, option: str = "size") -> int:
    """Bytes from an integer or from text such as `"4GiB"`, `"512 MB"` or `"65536"`.

    Raises `ConfigError` naming `option` for anything else, and for sizes below zero.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{option}={size!r} is not a size; use bytes as an integer or text such as '4GiB' or '512MB'")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True)
class Place:
    """Memory on one device that Elastic may use: a name, a torch device and a budget.

    Several places may share a device (`cuda:0#a`, `cuda:0#b`): each has pages of its own.
    """

    name: str
    device: torch.device
    budget_bytes: int | None = None
    """None: chosen when the place is opened, from the memory that is free then."""
    page_bytes: int | None = None
    """None: 64 KiB on a CPU, the driver's granularity (usually 2 MiB) on CUDA. A multiple makes super-pages."""

    @classmethod
    def parse(cls, text: str | Place) -> Place:
        """A place from text: `"cuda:0"`, `"cuda:1=20GiB"`, `"cpu#0=1GiB"`, `"cuda:0#a=30GiB"`."""
        if isinstance(text, Place):
            return text
        match = _PLACE.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or (match["device"] == "cpu" and match["index"]):
            raise ConfigError(
                f"places: {text!r} is not a place; write 'cpu', 'cpu#0=1GiB', 'cuda:0' or 'cuda:0#a=30GiB'"
            )
        device = match["device"] if match["device"] == "cpu" else f"cuda:{match['index'] or 0}"
        name = device + (f"#{match['label']}" if match["label"] else "")
        budget = parse_bytes(match["budget"], option=f"budget of place {name}") if match["budget"] else None
        return cls(name, torch.device(device), budget)

    def with_budget(self, budget_bytes: int) -> Place:
        """The same place with a budget, in bytes."""
        return replace(self, budget_bytes=budget_bytes)


@dataclass(frozen=True)
class SLO:
    """What a request may take at most, in seconds; None: as long as it likes."""

    ttft_s: float | None = None
    """From its arrival to its first token."""
    tpot_s: float | None = None
    """For each token after the first, on average."""
