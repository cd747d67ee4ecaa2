"""The errors of Elastic, and checks of options that raise them.

ElasticError
├── ConfigError          an option is wrong: the caller must change it
│   └── NotFound         it names what is not there: a rank, a request, a deployment, a transaction
├── CapacityError        not enough memory: ask for less, or again later
├── StateError           the wrong moment: closed, already wrapped, inside a forward pass
│   └── RankLost         a process of a fleet ended or hung while it was asked
├── BackendUnavailable   a package or a driver is missing
├── IntegrityError       a bug in Elastic: two counts of the same thing differ
└── Overloaded           too much work is waiting: try again after `retry_after_s`
"""

from __future__ import annotations

import difflib
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any


class ElasticError(Exception):
    """The root of every error that Elastic raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return as_it_was, (type(self), self.args, self.__dict__)  # its `__init__` may ask for more than `args`


def as_it_was(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    """Return an error as another process raised it: without `__init__`, which adds figures to its text."""
    error: Exception = BaseException.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ConfigError(ElasticError, ValueError):
    """An option has a value that cannot work; the message names the option, the value and what is allowed."""


class NotFound(ConfigError):
    """A name stands for nothing that is there; the message says what is, or who gives names."""


class CapacityError(ElasticError, MemoryError):
    """Memory does not suffice now.

    Attributes are bytes: `requested_bytes` asked for, `free_bytes` still to be had, `total_bytes` of the whole budget.
    0 requested bytes: it is no sum of one budget that lacks, and the message says what.
    """

    def __init__(self, message: str, *, requested_bytes: int, free_bytes: int, total_bytes: int) -> None:
        sums = f" (requested {requested_bytes:,} bytes, free {free_bytes:,}, total {total_bytes:,})"
        super().__init__(message + sums * (requested_bytes > 0))
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes


class StateError(ElasticError, RuntimeError):
    """The call is right, the moment is not."""


class RankLost(StateError):
    """A rank of a fleet ended, hung or was cut off; the message says what becomes of its requests. `rank` names it."""

    def __init__(self, message: str, *, rank: str) -> None:
        super().__init__(message)
        self.rank = rank


class BackendUnavailable(ElasticError, ImportError):
    """A package, driver or device that was asked for is absent; the message names what to install."""


class IntegrityError(ElasticError, AssertionError):
    """A recount of Elastic's own books failed. This is a bug in Elastic; the message has both sides of the sum."""


class Overloaded(ElasticError):
    """More work is waiting than was allowed; `retry_after_s` says when to come back."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(f"{message} (retry after {retry_after_s:.1f} s)")
        self.retry_after_s = retry_after_s


def is_number(value: object) -> bool:
    """Return whether a value is a number that is finite as a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_list(value: object, holds: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list or tuple, for each entry of which that holds."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(holds, value))


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raises `ConfigError` naming an option, its value and what is allowed, unless that holds."""
    if not holds:
        raise ConfigError(f"{name}={value!r} cannot be; it must be {allowed}")


def require_whole(value: Any, name: str, *, least: int = 1) -> None:
    """Raises `ConfigError` naming an option, unless its value is a whole number, and at least that."""
    require(is_integer(value) and value >= least, name, value, f"a whole number, at least {least}")


def require_count(value: Any, name: str) -> None:
    """Raises `ConfigError` naming an option, unless its value is a whole number, at least 1, or None."""
    require(value is None or (is_integer(value) and value >= 1), name, value, "a whole number, at least 1, or None")


def require_seconds(value: Any, name: str) -> None:
    """Raises `ConfigError` naming an option, unless its value is a number of seconds, at least 0."""
    require(is_number(value) and value >= 0, name, value, "a number of seconds, at least 0")


def require_period(value: Any, name: str) -> None:
    """Raises `ConfigError` naming an option, unless its value is a number of seconds above 0."""
    possible = is_number(value) and 0 < value <= threading.TIMEOUT_MAX
    require(possible, name, value, "a number of seconds above 0, and one that can be waited for")


def require_share(value: Any, name: str) -> None:
    """Raises `ConfigError` naming an option, unless its value is a number from 0 to 1."""
    require(is_number(value) and 0 <= value <= 1, name, value, "a share from 0 to 1")


def require_flag(value: object, name: str) -> None:
    """Raises `ConfigError` naming an option, unless its value is True or False."""
    require(isinstance(value, bool), name, value, "True or False")


def require_path(value: object, name: str, allowed: str = "a path") -> Path:
    """Return the path of an option, `~` as the user's home. Raises `ConfigError` naming it, unless it is one."""
    is_path = isinstance(value, str | Path) and value != "" and "\0" not in str(value)
    require(is_path, name, value, allowed)
    expanded = os.path.expanduser(str(value))
    require(not expanded.startswith("~"), name, value, "a path; there is no such user")
    return Path(expanded)


def require_path_or_none(value: object, name: str) -> Path | None:
    """Return what `require_path` does, or None."""
    return None if value is None else require_path(value, name, "a path, or None")


def nearest(name: object, names: Collection[str]) -> str:
    """Return what an error says of a name that is none of some: the one that it may stand for, or which there are."""
    near = difflib.get_close_matches(str(name), names, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(names))}"
