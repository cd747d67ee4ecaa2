"""Options of how layers change their rank, and the numbers of a fleet's policies."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

from elastic.config import Lengths, Overload
from elastic.errors import ConfigError

EXCHANGE = ("exchange", "uncoordinated", "layers_per_step")
"""Options of how layers change their rank."""
_FORM = ("exchange", "coordinated", "layers_per_step")
"""What they are of `Overload`, and of `Fleet.drop`."""
WORDS = {"on": True, "off": False}
Numbers = TypeVar("Numbers", Overload, Lengths)


def add_exchange(command: ArgumentParser, when: str | None = None) -> None:
    """Add the options of how layers change their rank; `when` says when they count."""
    group = command.add_argument_group("how layers change their rank", when)
    group.add_argument(
        "--exchange", choices=("live", "stall"), help="stall: instances stop for all of it, to measure against (live)"
    )
    group.add_argument(
        "--uncoordinated", action="store_true", help="have copies let nothing pass that computes, to measure against"
    )
    group.add_argument(
        "--layers-per-step", type=int, metavar="N", help="layers that change at a pause (as many as there is room for)"
    )


def exchange_form(options: Namespace) -> dict[str, Any]:
    """Return what was said of it, by the names that `Fleet.drop` and `Overload` have."""
    form: dict[str, Any] = {"coordinated": False} if options.uncoordinated else {}
    given = {name: getattr(options, name) for name in ("exchange", "layers_per_step")}
    return form | {name: value for name, value in given.items() if value is not None}


def read_numbers(kind: type[Numbers], given: Sequence[str], option: str, **others: Any) -> Numbers:
    """Return a policy's numbers, of `NAME=VALUE` each; `others` have options of their own. Raises `ConfigError`."""
    hints = {f.name: get_type_hints(kind)[f.name] for f in fields(kind) if f.name not in (*_FORM, *others)}
    numbers: dict[str, Any] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in hints or name in numbers:
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE, each name once; there are: {', '.join(hints)}")
        numbers[name] = _read(hints[name], value, f"{option} {text!r}")
    return kind(**numbers, **others)


def _read(hint: Any, value: str, option: str) -> Any:
    kinds = get_args(hint) or (hint,)
    if bool in kinds:
        if value not in WORDS:
            raise ConfigError(f"{option}: {value!r} is neither on nor off")
        return WORDS[value]
    try:
        return int(value) if int in kinds else float(value) if float in kinds else value
    except ValueError:
        raise ConfigError(f"{option}: {value!r} is no {'whole number' if int in kinds else 'number'}") from None
