"""The document of `GET /elastic/status` of a server as records; unknown keys are left alone."""

from __future__ import annotations

import types
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from elastic.cluster.control.status import Wire
from elastic.controller.loop import ControllerHealth
from elastic.controller.snapshot import RequestStats
from elastic.engines.pipeline.turn import StageTimes
from elastic.server.routes import STATUS_VERSION
from elastic.types import KINDS, Event, Fetch, Status, Swap

LARGEST = 2**63
"""An exclusive bound on numbers, which also refuses what is not a number."""
_ACTIONS = {name: kind for kind, name in KINDS.items() if kind is not Fetch}
"""All but one that says more than a document has: where in another process's memory the weights are."""


class NotAStatus(ValueError):
    """The document is not the status of a server of Elastic; the message names the key."""


@dataclass(frozen=True)
class OtherEvent:
    """An action of a kind that this version does not know."""

    kind: str
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankDocument:
    """One process of a fleet, and what it last said of itself."""

    name: str
    state: str
    pid: int = 0
    host: str = ""
    launcher: str = ""
    places: tuple[str, ...] = ()
    beat_s: float | None = None
    """Seconds since it was last heard of."""
    why: str = ""
    dropped: tuple[int, ...] = ()
    """Layers of whose weights it has none, since other ranks compute them."""
    shards: tuple[int, ...] = ()
    """Of each layer, how many of its shards it has the weights of; (): all of them."""
    layers: tuple[str, ...] = ()
    status: Status | None = None
    events: tuple[Event, ...] = ()
    controller: ControllerHealth | None = None
    traffic: RequestStats | None = None
    times: StageTimes | None = None
    wires: tuple[Wire, ...] | None = None
    utilization: float | None = None


@dataclass(frozen=True)
class LoadDocument:
    """What an instance has to do."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


@dataclass(frozen=True)
class InstanceDocument:
    """One model that is served by ranks."""

    name: str
    ranks: tuple[str, ...]
    load: LoadDocument = LoadDocument()
    requests: int = 0
    freeness: float | None = None
    leader: str = ""
    epoch: int = 0
    """Counts its paths."""
    path: tuple[str, ...] = ()
    """Of each layer the rank that computes it, or those that share it, such as `r0+r1`; (): its leader computes all."""
    tp: int = 1
    """How many ranks share a layer, at the most."""


@dataclass(frozen=True)
class FleetEventDocument:
    """Something that happened to a fleet."""

    kind: str
    when_s: float
    rank: str = ""
    instance: str = ""
    request: str = ""
    requests: int = 0
    moved_bytes: int = 0
    recomputed_tokens: int = 0
    stalled_ms: float | None = None
    why: str = ""


@dataclass(frozen=True)
class FleetDocument:
    """What a fleet says of itself as a whole."""

    queued: int = 0
    totals: dict[str, int] = field(default_factory=dict, hash=False)
    policy: str = ""


@dataclass(frozen=True)
class LinkDocument:
    """Two devices whose ranks exchange what they compute."""

    devices: tuple[str, str]
    basis: str
    """Where the seconds are from that estimates have of it."""


@dataclass(frozen=True)
class DeploymentDocument:
    """A model that is deployed by an intent."""

    name: str
    configuration: str
    reason: str = ""
    """What re-planning said last."""
    changes: int = 0
    links: tuple[LinkDocument, ...] = ()


@dataclass(frozen=True)
class DeviceDocument:
    """A device that deployments share."""

    name: str
    memory_bytes: int
    free_bytes: int
    load: float = 0.0
    models: tuple[str, ...] = ()
    guest: str = ""
    """Of which model fingerprints are measured there now."""


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
    """The variant of each layer; empty for a model that is not wrapped."""
    status: Status | None = None
    events: tuple[Event, ...] = ()
    """The last events, oldest first."""
    controller: ControllerHealth | None = None
    ranks: tuple[RankDocument, ...] = ()
    """Of a fleet; empty for one model, and in documents of version 1."""
    instances: tuple[InstanceDocument, ...] = ()
    fleet_events: tuple[FleetEventDocument, ...] = ()
    fleet: FleetDocument | None = None
    deployments: tuple[DeploymentDocument, ...] = ()
    """Where models are deployed by intents."""
    devices: tuple[DeviceDocument, ...] = ()


def read_status(document: object) -> StatusDocument:
    """Read a document into a record. Raises `NotAStatus`."""
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > STATUS_VERSION:
        raise NotAStatus(f"its status is of version {version}; this Elastic reads {STATUS_VERSION}: update it")
    record: StatusDocument = read(StatusDocument, document, "the document")
    told = [record.status, *(rank.status for rank in record.ranks)]
    if any(place.page_bytes < 1 for status in told if status is not None for place in status.places):
        raise NotAStatus("a place has no page_bytes")
    return record


def read(kind: Any, value: object, key: str) -> Any:
    """Read a value of JSON as what an annotation says. Raises `NotAStatus`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        return _read_record(kind, value, key)
    if origin in (Union, types.UnionType):
        return _read_one_of(arguments, value, key)
    if origin is tuple and isinstance(value, list):
        return tuple(read(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {printable(name): read(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    if origin is Literal and value in arguments:
        return value
    if kind is str and isinstance(value, str):
        return printable(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (int, float) and type(value) in (int, kind) and abs(value) < LARGEST:  # type: ignore[arg-type]
        return kind(value)
    raise NotAStatus(f"{printable(key)} is {printable(repr(value)[:60])}")


def printable(text: str) -> str:
    """Return the text without characters that steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


_hints = cache(get_type_hints)


def _read_record(kind: Any, value: dict[Any, Any], key: str) -> Any:
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing = next((name for name in needed if name not in value), None)
    if missing is not None:
        raise NotAStatus(f"{printable(key)} has no {missing!r}")
    hints = _hints(kind).items()
    return kind(**{name: read(hint, value[name], f"{key}.{name}") for name, hint in hints if name in value})


def _read_one_of(kinds: tuple[Any, ...], value: object, key: str) -> Any:
    """Read an optional value, or an action by its kind."""
    if Swap in kinds:
        name = value.get("kind") if isinstance(value, dict) else None
        return read(_ACTIONS.get(name, OtherEvent) if isinstance(name, str) else OtherEvent, value, key)
    if value is None and type(None) in kinds:
        return None
    return read(kinds[0], value, key)
