"""Checks of what is given on the command line, before a model is loaded."""

from __future__ import annotations

import errno
import math
import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from elastic.config import Place
from elastic.errors import ConfigError
from elastic.memory.places import require_memory

TOKEN = "ELASTIC_TOKEN"
"""Has the token for actions, where no file was named."""


def require_characters(text: str, option: str) -> str:
    """Return a text that is not blank. Raises `ConfigError`, also for bytes that were no UTF-8: they are surrogates."""
    if not text.strip():
        raise ConfigError(f"{option} {text!r} is empty; give some text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{option} {text[:40]!r} is not UTF-8 text from character {error.start + 1} on") from error
    return text


def parse_place(text: str | None, default: str = "cpu") -> Place:
    """Read `--place`; None: the option was not given. Raises `ConfigError` for more memory than its device has."""
    place = Place.parse(default if text is None else text)
    require_memory([place])
    return place


def is_given(value: object) -> bool:
    """Tell whether an option was given, as 0 too: its value is not what is there without it."""
    return value is not None and value is not False and value not in ([], "", "auto")


def refuse(options: Namespace, names: Iterable[str], why: str) -> None:
    """Raise `ConfigError` for the first of these options that was given."""
    for name in names:
        if is_given(getattr(options, name)):
            raise ConfigError(f"--{name.replace('_', '-')} {why}")


def require_at_least(least: float, value: float | None, option: str, unit: str = "") -> None:
    """Raise `ConfigError` for a number that is below, infinite or NaN; None was not given."""
    if value is not None and not least <= value < math.inf:
        finite = " and finite" if value == math.inf else ""
        raise ConfigError(f"{option} {value:g} must be at least {least:g}{unit}{finite}")


def require_file_to_write(path: str | None, option: str) -> None:
    """Raise `ConfigError` where no file can be written; None was not given."""
    if path is None:
        return
    if not path or os.path.isdir(path):
        raise ConfigError(f"{option} {path!r} is no file to write to; give its name")
    if not os.path.isdir(folder := os.path.dirname(os.path.abspath(path))):
        raise ConfigError(f"{option} {path}: there is no such directory")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written: {os.strerror(errno.EACCES)}")


def write_text(path: str, text: str, option: str) -> None:
    """Write a text file. Raises `ConfigError`, such as for a full disk."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from error


def read_text(path: str, option: str) -> str:
    """Read a text file. Raises `ConfigError`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path} is not UTF-8 text from byte {error.start + 1} on") from error


def read_secret(option: str, path: str | None, variable: str) -> str | None:
    """Read a secret from a file, or else from the environment. Raises `ConfigError` for one that no header can have."""
    if path is None and variable not in os.environ:
        return None
    source = variable if path is None else f"{option} {path}"
    secret = (os.environ[variable] if path is None else read_text(path, option)).strip()
    if not secret:
        raise ConfigError(f"{source} is empty; put the secret there, or do without it")
    if not secret.isprintable():
        raise ConfigError(f"{source} has a line break or another character that cannot be sent; put one line there")
    return secret
