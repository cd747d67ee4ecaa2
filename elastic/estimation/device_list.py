"""Devices from text: places of a budget, or so many of a data sheet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from elastic.config import Place, parse_bytes
from elastic.errors import ConfigError
from elastic.memory.places import free_bytes
from elastic.planning.assumed_speeds import ASSUMED
from elastic.planning.estimate.devices import SHEETS, Device, DeviceKind, near, of_cpu, require_memory, several, sheet

_SHEET = re.compile(r"(?:(?P<count>\d+)\*)?(?P<kind>[\w-]+)(?:=(?P<size>.+))?", re.ASCII)


def parse_devices(devices: str | Sequence[str | Device], kind: str | None = None) -> list[Device]:
    """Return the devices that are named: by text such as "cuda:0=80GiB,cuda:1=80GiB", "cpu#a=1GiB" or "8*h100=70GiB".

    `kind` is the data sheet of places on CUDA. Raises `ConfigError` for what is none, or named twice.
    """
    items = [part.strip() for part in devices.split(",")] if isinstance(devices, str) else devices
    if not isinstance(items, Sequence) or not all(isinstance(item, str | Device) for item in items):
        raise ConfigError(f"devices={devices!r} are none; write such as '8*h100' or 'cuda:0=80GiB'")
    parsed: list[Device] = []
    for item in items:
        parsed += [item] if isinstance(item, Device) else _parse(item, kind, parsed)
    if kind is not None and not any(device.is_place and device.kind.type == "cuda" for device in parsed):
        raise ConfigError(f"kind={kind!r} is the data sheet of places on CUDA; {devices!r} has none: leave it out")
    twice = [name for name, count in Counter(device.name for device in parsed).items() if count > 1]
    if not parsed or twice:
        of_sheet = next((device.kind.name for device in parsed if not device.is_place), "h100")
        raise ConfigError(
            f"devices={twice[:3]} names none, or one twice; write such as '2*{of_sheet}' or 'cuda:0=80GiB'"
        )
    return parsed


def _parse(text: str, kind: str | None, before: Sequence[Device]) -> list[Device]:
    """Return what a part of a list names; those of a sheet that is there with another size are numbered on."""
    match = _SHEET.fullmatch(text)
    if match is not None and match["kind"] in SHEETS:
        size = None if match["size"] is None else parse_bytes(match["size"], option=f"devices: {text!r}")
        digits = (match["count"] or "1").lstrip("0")
        if not digits or len(digits) > 4 or int(digits) > 4096:
            raise ConfigError(f"devices: {text[:40]!r} are {digits[:8] or 0} devices; use 1 to 4096")
        described = sheet(match["kind"], option="devices")
        require_memory(described, size or 0, f"devices: {text!r}")
        alike = [device.memory_bytes for device in before if device.kind is described and not device.is_place]
        again = (described.memory_bytes if size is None else size) in alike
        return several(described, int(digits), size, first=0 if again else len(alike))
    try:
        place = Place.parse(text)
    except ConfigError as error:
        is_place = text.startswith(("cpu", "cuda"))
        hint = f": {error}" if is_place else near(text.rpartition("*")[2].partition("=")[0].strip())
        raise ConfigError(
            f"devices: {text!r} is neither a data sheet ({', '.join(SHEETS)}) nor a place{hint}"
        ) from error
    if place.page_bytes is not None:
        raise ConfigError(f"devices: {text!r} names a page size, and what is estimated has the usual one; leave it out")
    return [_of_place(place, kind)]


def _of_place(place: Place, kind: str | None) -> Device:
    """Return the device of a place; without a budget, one of a data sheet has all of its memory, a CPU what is free."""
    if place.device.type == "cpu":
        nbytes = free_bytes(place.device) if place.budget_bytes is None else place.budget_bytes
        speed = ASSUMED["cpu"]
        return Device(place.name, of_cpu(nbytes, speed.flops, speed.memory, speed.link), nbytes)
    if kind is None:
        raise ConfigError(
            f"devices: what {place.name} is cannot be seen; name its data sheet, one of {', '.join(SHEETS)}"
        )
    device_kind: DeviceKind = sheet(kind, option="kind")
    nbytes = device_kind.memory_bytes if place.budget_bytes is None else place.budget_bytes
    require_memory(device_kind, nbytes, f"devices: {place.name}")
    return Device(place.name, device_kind, nbytes)
