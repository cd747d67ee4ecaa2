"""What `GET /elastic/status` of a server says, read into records; keys that are not known are left alone."""

from __future__ import annotations

import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from elastic.controller.snapshot import RequestStats
from elastic.types import Event, Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Status, Swap

VERSION = 1
KINDS = {
    "swap": Swap,
    "restore": Restore,
    "release": Release,
    "resize_kv": ResizeKV,
    "migrate": Migrate,
    "migrate_kv": MigrateKV,
    "replicate": Replicate,
    "evict": Evict,
}
LARGEST = 2**63
"""What a number is below; not a number is below nothing."""


class NotAStatus(ValueError):
    """The document is not what a server of Elastic says; the message names the key."""


@dataclass(frozen=True)
class Fault:
    """Something that went wrong in the controller."""

    text: str
    times: int = 1


@dataclass(frozen=True)
class HealthReport:
    """How the server's controller is."""

    running: bool = False
    ticks: int = 0
    last_reason: str = ""
    last_figures: str = ""
    actions: int = 0
    cost: float = 0.0
    """Its CPU time as a share of time."""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class OtherEvent:
    """An action of a kind that is not known here."""

    kind: str
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class StatusDocument:
    """One status document."""

    version: int
    model: str
    at_s: float
    """Seconds since the epoch, by the server's clock."""
    traffic: RequestStats
    state: str = "serving"
    uptime_s: float = 0.0
    layers: tuple[str, ...] = ()
    """The variant of each; empty for a model that is not wrapped."""
    status: Status | None = None
    events: tuple[Event, ...] = ()
    """Oldest first."""
    controller: HealthReport | None = None


def moment(document: object) -> StatusDocument:
    """The document as a record. Raises `NotAStatus`."""
    if isinstance(document, dict) and isinstance(document.get("version"), int) and document["version"] > VERSION:
        raise NotAStatus(f"its status is of version {document['version']}; this Elastic reads {VERSION}: update it")
    found = read(StatusDocument, document, "the document")
    assert isinstance(found, StatusDocument)
    if found.status is not None and any(place.page_bytes < 1 for place in found.status.places):
        raise NotAStatus("a place has no page_bytes")
    return found


def read(kind: Any, value: object, where: str) -> Any:
    """A value of JSON as what an annotation says. Raises `NotAStatus`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        return _record(kind, value, where)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {_printable(key): read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal and value in arguments:
        return value
    if kind is str and isinstance(value, str):
        return _printable(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, float) and type(value) in (int, kind) and abs(value) < LARGEST:  # type: ignore[arg-type]
        return kind(value)
    raise NotAStatus(f"{_printable(where)} is {_printable(repr(value)[:60])}")


def _record(kind: Any, value: dict[Any, Any], where: str) -> Any:
    hints = _hints(kind)
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing = next((name for name in needed if name not in value), None)
    if missing is not None:
        raise NotAStatus(f"{_printable(where)} has no {missing!r}")
    return kind(**{name: read(hint, value[name], f"{where}.{name}") for name, hint in hints.items() if name in value})


def _one_of(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    """One of several: by being null, or, for actions, by the kind."""
    if Swap in kinds:
        of = value.get("kind") if isinstance(value, dict) else None
        return read(KINDS.get(of, OtherEvent) if isinstance(of, str) else OtherEvent, value, where)
    if value is None and type(None) in kinds:
        return None
    return read(kinds[0], value, where)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _printable(text: str) -> str:
    """The text without what steers a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
