"""The errors of Elastic.

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

from typing import Any


class ElasticError(Exception):
    """The root of every error that Elastic raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_was, (type(self), self.args, self.__dict__)  # its `__init__` may ask for more than `args`


def _as_it_was(kind: type[ElasticError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ElasticError:
    """Return an error as another process raised it."""
    error = BaseException.__new__(kind, *args)
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
