"""What a user can set: sizes, places, policies."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import torch

from elastic.errors import (
    ConfigError,
    is_integer,
    require_flag,
    require_period,
    require_seconds,
    require_share,
    require_whole,
)
from elastic.errors import is_number as is_number  # others import these two from here
from elastic.errors import require as require

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
_LARGEST = 2**63
_LARGEST_INDEX = 127
"""Of a device: torch takes larger ones modulo 256."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", re.ASCII)
_PLACE = re.compile(
    r"(?a)(?P<device>cpu|cuda)(?::(?P<index>\d{1,3}))?(?:#(?P<label>\w+))?(?:=(?P<budget>[^/]+))?(?:/(?P<page>.+))?"
)


def parse_bytes(size: int | str, *, option: str = "size") -> int:
    """Bytes from an integer or from text such as `"4GiB"`, `"512 MB"` or `"65536"`.

    Raises `ConfigError` naming `option` for anything else, and for sizes below zero.
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    nbytes = -1
    if is_integer(size):
        nbytes = int(size)
    elif match is not None and match[2] in _UNITS:
        nbytes = int(Decimal(match[1]) * _UNITS[match[2]])
    if not 0 <= nbytes < _LARGEST:
        raise ConfigError(f"{option}={size!r} is not a size; use bytes as an integer or text such as '4GiB' or '512MB'")
    return nbytes


def parse_limit(size: int | str, *, option: str) -> int | None:
    """Bytes of a limit, as `parse_bytes`; None, the maximum, from `"max"`. Raises `ConfigError`."""
    return None if size == "max" else parse_bytes(size, option=option)


@dataclass(frozen=True)
class Place:
    """Memory on one device that Elastic may use. Several may share a device (`cuda:0#a`), each with its own pages."""

    name: str
    device: torch.device
    budget_bytes: int | None = None
    """None: chosen when the place is opened, from the memory that is free then."""
    page_bytes: int | None = None
    """None: 64 KiB on a CPU, where multiples of 2 MiB are huge pages if the system makes such; on CUDA the driver's
    granularity, usually 2 MiB, and a multiple makes super-pages."""

    @classmethod
    def parse(cls, text: str | Place) -> Place:
        """A place from text: `"cuda:0"`, `"cuda:1=20GiB"`, `"cpu#0=1GiB"`; with the size of pages `"cpu=9GiB/2MiB"`."""
        if isinstance(text, Place):
            return text
        match = _PLACE.fullmatch(text.strip()) if isinstance(text, str) else None
        index = int(match["index"] or 0) if match is not None else 0
        if match is None or (match["device"] == "cpu" and match["index"]) or index > _LARGEST_INDEX:
            examples = "'cpu', 'cpu#0=1GiB', 'cuda:0', 'cuda:0#a=30GiB' or, with the size of pages, 'cpu=60GiB/2MiB'"
            raise ConfigError(f"places: {text!r} is not a place; write {examples}")
        device = match["device"] if match["device"] == "cpu" else f"cuda:{match['index'] or 0}"
        name = device + (f"#{match['label']}" if match["label"] else "")
        budget = parse_bytes(match["budget"], option=f"budget of place {name}") if match["budget"] else None
        page = parse_bytes(match["page"], option=f"page size of place {name}") if match["page"] else None
        return cls(name, torch.device(device), budget, page)

    def __post_init__(self) -> None:
        device = self.device
        require(
            isinstance(device, torch.device), f"device of place {self.name}", device, "such as torch.device('cuda:0')"
        )
        if device == torch.device("cuda"):
            object.__setattr__(self, "device", torch.device("cuda:0"))  # as in text
        pages = "whole bytes above 0, a multiple of 4096 on a CPU, of 2 MiB on CUDA, or None, which has it chosen"
        for name, value, least, allowed in (
            ("budget", self.budget_bytes, 0, "whole bytes, at least 0, or None"),
            ("page_bytes", self.page_bytes, 1, pages),
        ):
            good = value is None or (is_integer(value) and value >= least)
            require(good, f"{name} of place {self.name}", value, allowed)


@dataclass(frozen=True)
class SLO:
    """What requests are promised. None: nothing."""

    ttft_s: float | None = None
    """Time to first token, seconds from arrival."""
    tpot_s: float | None = None
    """Time per output token after the first, seconds."""
    e2e_s: float | None = None
    """From arrival to the last token, seconds."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value is None or (is_number(value) and value > 0), name, value, "seconds above 0, or None")


@dataclass(frozen=True)
class Policy:
    """When layers are swapped, how many, and when they return. The defaults are those of `balanced`.

    A tick is one look of the controller. Use is the used share of the KV capacity, from 0 to 1.
    """

    tick_s: float = 0.1
    """Seconds between two ticks."""
    layers_per_action: int = 2
    """Layers that one action swaps or restores at most."""
    max_layers: int = 8
    """Layers that are swapped at the same time at most; more than the model has: all of them."""
    levels: tuple[str, ...] = ()
    """Variants from fine to coarse: every layer is in the first before one goes on to the second. (): all variants of
    the model, from the largest to the smallest."""
    kv_high: float = 0.85
    """Pressure: use of the KV capacity at or above this,"""
    queue_high_s: float = 0.1
    """or the oldest waiting request waits so many seconds,"""
    queue_kv: float = 0.5
    """provided that KV use is at least this: below, requests wait for something that swapping does not give."""
    pressure_ticks: int = 3
    """Ticks of pressure in a row before layers are swapped."""
    kv_low: float = 0.65
    """Recovery: use of the capacity that is left when all layers are back, at or below this,"""
    queue_low_s: float = 0.025
    """and a queue no longer than this."""
    recovery_ticks: int = 5
    """Ticks of recovery in a row before layers are restored."""
    ema_alpha: float = 0.25
    """Weight of the newest reading in the moving averages of KV bytes and queueing; 1: no smoothing."""
    margin: float = 0.1
    """A restore must leave KV use at least so far below `kv_high`."""
    cooldown_s: float = 0.5
    """Seconds between two actions at least."""
    dwell_s: float = 5.0
    """Seconds from the last swap, or the last sign of pressure, to the first restore at least."""
    idle_s: float = 2.0
    """Seconds without any request after which all layers are restored at once."""
    action_bytes: int = 1 << 30
    """Bytes that one action copies at most, if it moves more than one layer."""

    def __post_init__(self) -> None:
        _check_fields(self, require_period, "tick_s", "idle_s")
        _check_fields(self, require_seconds, "queue_high_s", "queue_low_s", "cooldown_s", "dwell_s")
        counts = ("layers_per_action", "max_layers", "pressure_ticks", "recovery_ticks", "action_bytes")
        _check_fields(self, require_whole, *counts)
        _check_fields(self, require_share, "kv_high", "kv_low", "queue_kv", "margin")
        weight = is_number(self.ema_alpha) and 0 < self.ema_alpha <= 1
        require(weight, "ema_alpha", self.ema_alpha, "above 0 and at most 1")
        names = isinstance(self.levels, tuple) and all(isinstance(level, str) for level in self.levels)
        once = names and len(set(self.levels)) == len(self.levels)
        require(once, "levels", self.levels, "a tuple of names of variants, each once")
        high = self.kv_high - self.margin
        require(self.kv_low <= high + 1e-9, "kv_low", self.kv_low, f"at most kv_high - margin = {high:.3g}")
        low_s, high_s = self.queue_low_s, self.queue_high_s
        require(low_s <= high_s, "queue_low_s", low_s, f"at most queue_high_s = {high_s}")

    @classmethod
    def named(cls, mode: str) -> Policy:
        """One of the modes: `accuracy` swaps few layers, late; `performance` many, early; `balanced` is between.

        Raises `ConfigError` for another name.
        """
        require(isinstance(mode, str) and mode in MODES, "policy", mode, "one of " + ", ".join(MODES))
        return cls(**MODES[mode])

    @classmethod
    def from_file(cls, path: str | Path) -> Policy:
        """Read a TOML or JSON file of fields; `mode` names the mode that the others come from (`balanced`).

        Raises `ConfigError` for a file that cannot be read, and for keys and values that make no sense.
        """
        fields = _read(Path(path))
        mode = fields.pop("mode", "balanced")
        allowed = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in allowed:
                near = difflib.get_close_matches(key, [*allowed, "mode"], n=1, cutoff=0.0)[0]
                raise ConfigError(f"{path}: {key!r} is no field of a policy; the nearest is {near!r}")
        if "action_bytes" in fields:
            fields["action_bytes"] = parse_bytes(fields["action_bytes"], option="action_bytes")
        if isinstance(fields.get("levels"), list):
            fields["levels"] = tuple(fields["levels"])
        try:
            return replace(cls.named(mode), **fields)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Scale:
    """When layers are replicated, moved, and taken back: the policy `scale`. (CoCoServe, section 4)"""

    tick_s: float = 0.2
    """Seconds between two ticks."""
    t_up: float = 0.4
    """T_up: a place with a larger share of its memory and compute free is used for replicas."""
    t_down: float = 0.05
    """T_down: modules leave a place when a larger share of the requests misses an SLO,"""
    kv_high: float = 0.85
    """or when a place's KV cache is as full as this."""
    margin: float = 0.1
    """Share of each place's memory and compute that planning leaves alone."""
    delta: int = 5
    """Rows by which the batch shrinks at a time, when nothing else helps."""
    offload: bool = True
    """Whether layers may be released, and the KV cache limited, when nothing else helps."""
    least_gain: float = 0.05
    """Replicas must make a step faster by this share at least."""
    pressure_ticks: int = 3
    """Ticks of a shortage in a row, before anything leaves."""
    vacancy_ticks: int = 10
    """Ticks without one in a row, before anything is replicated."""
    cooldown_s: float = 1.0
    """Seconds between two decisions at least."""
    dwell_s: float = 10.0
    """Seconds from the last shortage to the first replica at least; it doubles with each that must leave soon."""
    action_bytes: int = 1 << 30
    """Bytes that one plan copies at most, if it moves more than one layer."""
    group: str = ""
    """Models of this process with the same name here are planned together: they lend each other their places."""
    patience_s: float = 5.0
    """Seconds that the others of the group have to take replicas away when they are asked to."""

    def __post_init__(self) -> None:
        require_period(self.tick_s, "tick_s")
        _check_fields(self, require_share, "t_up", "t_down", "kv_high", "margin", "least_gain")
        _check_fields(self, require_whole, "delta", "pressure_ticks", "vacancy_ticks", "action_bytes")
        _check_fields(self, require_seconds, "cooldown_s", "dwell_s", "patience_s")
        require_flag(self.offload, "offload")
        require(isinstance(self.group, str), "group", self.group, "a name, or '' for none")
        require(self.margin < self.kv_high, "margin", self.margin, f"below kv_high = {self.kv_high}")


@dataclass(frozen=True)
class Overload:
    """When instances of a fleet merge and drop layers, and when they part again. (KunServe, sections 4.1 and 4.4)

    Use is the share of the KV capacity that live requests have or are promised, from 0 to 1.
    """

    tick_s: float = 0.1
    """Seconds between two ticks."""
    kv_high: float = 0.95
    """Overload: requests wait that need more KV than is free, and use is at or above this,"""
    queue_high_s: float = 0.25
    """or the oldest of them waits so many seconds,"""
    queue_kv: float = 0.5
    """provided that use is at least this: below, they wait for something that a drop does not give."""
    pressure_ticks: int = 3
    """Ticks of overload in a row before layers are dropped."""
    restore_below: float = 0.5
    """Restore: use of the capacity that is left when all layers are back, at or below this, and nothing waits."""
    recovery_ticks: int = 5
    """Ticks of that in a row before layers are restored."""
    margin: float = 0.1
    """A drop frees this share of the capacity besides what is needed, if it can; a restore must leave the use of each
    instance so far below `kv_high`."""
    cooldown_s: float = 0.5
    """Seconds between two actions on an instance at least; it doubles with each that comes to nothing."""
    dwell_s: float = 5.0
    """Seconds from the last drop or overload to a restore at least; doubled by each restore that was too early."""
    idle_s: float = 2.0
    """Seconds without any request after which layers are restored at once."""
    partial: bool = False
    """Whether only as many layers are dropped as are needed; else all that two groups both have, as the paper does.
    A small drop copies less, but an overload that grows needs another one, for which requests wait anew."""
    best_effort: bool = True
    """Whether layers are dropped, too, where that is not enough for all that wait; the paper drops none then."""
    most_stages: int = 4
    """Instances that serve requests together at most."""
    scale_out: int = 0
    """Instances that may be added in all where no drop frees enough; 0: none is."""
    lookahead: bool = False
    """Whether steps of a pipeline cost the same, instead of having as many tokens; ranks measure that before."""
    exchange: Literal["live", "stall"] = "live"
    coordinated: bool = True
    layers_per_step: int | None = None
    """How keys, values and weights go from rank to rank; see `Fleet.drop`. (KunServe, section 4.2)"""

    def __post_init__(self) -> None:
        require_period(self.tick_s, "tick_s")
        _check_fields(self, require_share, "kv_high", "queue_kv", "restore_below", "margin")
        _check_fields(self, require_whole, "pressure_ticks", "recovery_ticks")
        require_whole(self.most_stages, "most_stages", least=2)
        require_whole(self.scale_out, "scale_out", least=0)
        if self.layers_per_step is not None:
            require_whole(self.layers_per_step, "layers_per_step")
        _check_fields(self, require_seconds, "queue_high_s", "cooldown_s", "dwell_s", "idle_s")
        require(self.exchange in ("live", "stall"), "exchange", self.exchange, "'live' or 'stall'")
        _check_fields(self, require_flag, "partial", "best_effort", "lookahead", "coordinated")
        below, high = self.restore_below, self.kv_high - self.margin
        require(below <= high, "restore_below", below, f"at most kv_high - margin = {high:.3g}")


@dataclass(frozen=True)
class Lengths:
    """When instances become one, of more ranks, for requests that none can hold, and part again. (AMOEBA, section 3.3)

    The degree of an instance is the number of ranks that share each of its layers.
    """

    tick_s: float = 0.1
    """Seconds between two ticks."""
    step: int = 2
    """The degree grows by this factor at least; a power of two."""
    most_ranks: int = 4
    """Ranks of an instance at most; a power of two."""
    free_to_shrink: float = 0.5
    """An instance parts when this share of its KV is free, after what live requests are promised."""
    patience_s: float = 30.0
    """Seconds that an instance takes no new requests at most, so that it can part; then it takes some for as long."""
    wait_s: float = 60.0
    """Seconds that a request waits for room at instances that can hold it at all, before others become one for it."""
    dwell_s: float = 5.0
    """Seconds from the last request that needs an instance's degree until it parts at least; it doubles each time that
    instances become one soon after."""
    queue_high_s: float = 5.0
    """An instance takes new requests again when more wait than before it took none, and one of them for so long."""
    cooldown_s: float = 1.0
    """Seconds until something that was asked for, and did not come, is asked for again."""
    layers_per_step: int | None = None
    """Layers of an instance that change their ranks at one pause at most; see `Fleet.reshard`."""

    def __post_init__(self) -> None:
        for name in ("step", "most_ranks"):
            power = is_integer(value := getattr(self, name)) and value >= 2 and not value & (value - 1)
            require(power, name, value, "a power of two, at least 2")
        if self.layers_per_step is not None:
            require_whole(self.layers_per_step, "layers_per_step")
        require(self.step <= self.most_ranks, "step", self.step, f"at most most_ranks = {self.most_ranks}")
        require_period(self.tick_s, "tick_s")
        require_share(self.free_to_shrink, "free_to_shrink")
        _check_fields(self, require_seconds, "patience_s", "wait_s", "dwell_s", "queue_high_s", "cooldown_s")


MODES: dict[str, dict[str, Any]] = {
    "accuracy": {"layers_per_action": 1, "max_layers": 4, "kv_high": 0.92, "queue_high_s": 0.2},
    "balanced": {},
    "performance": {
        "layers_per_action": 4,
        "max_layers": 16,
        "kv_high": 0.75,
        "kv_low": 0.55,
        "queue_high_s": 0.05,
        "dwell_s": 10.0,
    },
}
"""How the modes differ from the defaults. Numbers of layers and `balanced` are those of a reconstruction of MorphServe
(section 3); the rest was settled on simulated traces, see docs/controller.md."""


def _check_fields(settings: object, check: Callable[[Any, str], None], *names: str) -> None:
    for name in names:
        check(getattr(settings, name), name)


def _read(path: Path) -> dict[str, Any]:
    """The fields in a TOML or JSON file, by its name."""
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
    require(path.suffix in readers, "policy", str(path), "a file named *.toml or *.json")
    try:
        fields = readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"policy file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"policy file {path} is no {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"policy file {path} has a {type(fields).__name__}; it must have names and values")
    return fields
