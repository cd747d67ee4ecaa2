"""Elastic's records as JSON and back: what goes between the user's process and the workers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from operator import index
from typing import Any

from elastic import errors, types
from elastic.controller import snapshot
from elastic.controller.loop import ControllerFault, ControllerHealth

_TAG = "$"
_RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (*vars(types).values(), *vars(snapshot).values(), ControllerFault, ControllerHealth)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


def encode(value: Any) -> str:
    """Return a value of records, tuples, texts and numbers as JSON. Raises `ConfigError` for anything else."""
    return json.dumps(_plain(value), default=_whole)


def decode(text: str) -> Any:
    """Undo `encode`. Raises `KeyError` for a record that is none of `elastic.types`."""
    return _made(json.loads(text))


def encode_error(error: BaseException) -> str:
    """Return an error as JSON: its text, and, if it is one of ours, its type and attributes."""
    if not isinstance(error, errors.ElasticError):
        return json.dumps({"type": "", "text": str(error), "attributes": {}})
    attributes = {name: value for name, value in vars(error).items() if not name.startswith("__")}
    return json.dumps({"type": type(error).__name__, "text": str(error), "attributes": attributes}, default=str)


def decode_error(text: str) -> Exception:
    """Undo `encode_error`; an error that is not ours is a `RuntimeError`."""
    fields = json.loads(text)
    return errors.as_it_was(getattr(errors, fields["type"], RuntimeError), (fields["text"],), fields["attributes"])


def _plain(value: Any) -> Any:
    if type(value).__name__ in _RECORDS:
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_TAG: type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _whole(value: Any) -> int:
    """Return a whole number of another library, such as NumPy's."""
    try:
        return index(value)
    except TypeError:
        raise errors.ConfigError(
            f"{value!r} cannot be sent to the workers; give numbers, names, and actions of elastic.types"
        ) from None


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_made, value))
    if isinstance(value, dict):
        kind = value.pop(_TAG, None)
        made = {key: _made(item) for key, item in value.items()}
        return made if kind is None else _RECORDS[kind](**made)
    return value
