"""Whether a record that another process sent has what its class says: unpickling looks at no field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import repeat
from reprlib import repr as shown  # raises nothing, of no value
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from elastic.errors import StateError


def require_record(message: Any, *kinds: type, sender: str = "it") -> Any:
    """Return a message of a sender that is a record of one of these dataclasses, and whole.

    Raises `StateError` for another message, and for a field whose value, however deep, is of another type.
    """
    for kind in kinds:
        if isinstance(message, kind):
            if fault := _fault(message, kind, kind.__name__):
                raise StateError(f"{sender} began with a {fault}; install the same version of elastic on both sides")
            return message
    raise StateError(f"{sender} began with a {type(message).__name__}; it must be another program")


def _fault(value: Any, kind: Any, name: str) -> str:
    """Say which part of a value, called `name`, is not of a type, as a hint has it; "": all is."""
    if get_origin(kind) in (Union, UnionType):
        fits = (each for each in get_args(kind) if _is_of(value, get_origin(each) or each))
        kind = next(fits, get_args(kind)[0])
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "" if isinstance(value, str) and value in arguments else f"{name} of {shown(value)}"
    if not _is_of(value, origin or kind):
        return f"{name} of {'nothing' if value is MISSING else shown(value)}"
    if origin is tuple and arguments[-1] is not Ellipsis and len(value) != len(arguments):
        return f"{name} of {len(value)} parts"
    return next((fault for part in _parts(value, kind, name) if (fault := _fault(*part))), "")


def _is_of(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _parts(value: Any, kind: Any, name: str) -> list[tuple[Any, Any, str]]:
    """List what a value of a type consists of: each with its type, and what it is called."""
    arguments = get_args(kind)
    if is_dataclass(kind):
        return [(getattr(value, f.name, MISSING), _hints(kind)[f.name], f"{name}.{f.name}") for f in fields(kind)]
    if isinstance(value, tuple) and arguments:
        kinds = repeat(arguments[0]) if arguments[-1] is Ellipsis else arguments
        return [(part, each, f"{name}[{i}]") for i, (part, each) in enumerate(zip(value, kinds, strict=False))]
    if isinstance(value, Mapping) and arguments:
        return [part for key, item in value.items() for part in ((key, arguments[0], name), (item, arguments[1], name))]
    return []


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
