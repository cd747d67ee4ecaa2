"""Tables of a scenario file, read key by key: what is unknown, or of another type, is an error in words."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from elastic.config import is_number
from elastic.errors import ConfigError, nearest

_MISSING = object()
_MOST = 2**63 - 1
"""Of any number: the largest whole one that TOML promises."""
LIKE = 0.75
"""How alike two keys are, from 0 to 1, of which one may stand for the other."""


class Table:
    """One table of a TOML file. `done` raises `ConfigError` for keys that nobody has read."""

    def __init__(self, values: dict[str, Any], name: str) -> None:
        self.name = name
        self._values = dict(values)
        self._known: list[str] = []
        self._absent: list[str] = []
        self._inner: list[Table] = []

    def __contains__(self, key: str) -> bool:
        if key not in self._values:
            self._absent.append(key)
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._values))

    def number(
        self, key: str, default: float | object | None = _MISSING, *, least: float = 0.0, most: float = _MOST
    ) -> float:
        """Take a number. Raises `ConfigError` where it is missing without a default, below `least`, or above `most`."""
        value = self._take(key, default)
        if not is_number(value) or not least <= value <= most:
            raise self.wrong(key, value, f"a number, at least {least:g}", most)
        return float(value)

    def whole(self, key: str, default: int | object = _MISSING, *, least: int = 1, most: int = _MOST) -> int:
        """Take a whole number."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, value, f"a whole number, at least {least}", most)
        return value

    def optional(self, key: str, *, least: int = 1) -> int | None:
        """Take a whole number; None where there is none."""
        if key not in self:
            self._known.append(key)
            return None
        return self.whole(key, least=least)

    def text(self, key: str, default: str | object = _MISSING, *, among: Sequence[str] = ()) -> str:
        """Take text, one of some."""
        value = self._take(key, default)
        if not isinstance(value, str) or (among and value not in among):
            raise self.wrong(key, value, f"one of {', '.join(among)}" if among else "text")
        return value

    def flag(self, key: str) -> bool:
        """Take true or false; false where there is neither."""
        value = self._take(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def numbers(self, key: str, count: int | None = None) -> tuple[float, ...]:
        """Take a list of numbers, so many of them."""
        value = self._take(key, _MISSING)
        good = isinstance(value, list) and all(is_number(each) and abs(each) <= _MOST for each in value)
        if not good or (count is not None and len(value) != count):
            raise self.wrong(key, value, f"a list of {count} numbers" if count else "a list of numbers")
        return tuple(map(float, value))

    def table(self, key: str) -> Table:
        """Take a table within; an empty one where there is none."""
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a table")
        self._inner.append(Table(value, self._path(key)))
        return self._inner[-1]

    def tables(self, key: str) -> list[Table]:
        """Take a list of tables; none where there is none."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self.wrong(key, value, f"[[{key}]] tables")
        tables = [Table(each, f"{self._path(key)}[{number}]") for number, each in enumerate(value)]
        self._inner += tables
        return tables

    def texts(self, key: str, *, among: Sequence[str] = ()) -> tuple[str, ...]:
        """Take a list of texts, each one of some; none where there is none."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(
            isinstance(each, str) and each in (among or [each]) for each in value
        ):
            raise self.wrong(key, value, f"a list of {', '.join(among) or 'texts'}")
        return tuple(value)

    @property
    def left(self) -> bool:
        """Whether there is a key that was not taken."""
        return bool(self._values)

    def rest(self) -> dict[str, Any]:
        """Take all that is left, as it is."""
        left, self._values = self._values, {}
        return left

    def expect(self, key: str) -> None:
        """Take note of a key that is read later: it stands for no other one."""
        self._known.append(key)

    def done(self) -> None:
        """Raise `ConfigError` for a key that was not taken."""
        for key in self._values:
            raise ConfigError(f"{self._path(key)} is not known; {nearest(key, self._known)}")

    def misspelt(self) -> str:
        """Return words on a key, here or within, that nobody has read and that is like one that is not there; or ""."""
        for key in self._values:
            if key not in self._known and (near := difflib.get_close_matches(key, self._absent, 1, LIKE)):
                return f"; {self._path(key)} is there: did you mean {near[0]!r}?"
        return next(filter(None, (table.misspelt() for table in self._inner)), "")

    def wrong(self, key: str, value: object, wanted: str, most: float = math.inf) -> ConfigError:
        """Return the error for a value; where it is above `most` it tells so."""
        said = "is missing: give" if value is _MISSING else f"= {reprlib.repr(value)} must be"
        limit = f", at most {most:,}" if isinstance(value, int | float) and value > most else ""
        return ConfigError(f"{self._path(key)} {said} {wanted}{limit}")

    def _take(self, key: str, default: object) -> Any:
        self._known.append(key)
        return self._values.pop(key) if key in self else default

    def _path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key
