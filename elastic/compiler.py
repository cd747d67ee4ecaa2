"""Compiling C++ of this package for the processor at hand: once for a machine, as torch.compile does with its own.

No header of Python's or torch's is needed, so it takes two seconds and a C++ compiler: `CXX`, else c++, g++ or clang++.
"""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from elastic.directories import CACHE, cache_directory
from elastic.errors import ConfigError

logger = logging.getLogger(__name__)
DISABLE = "ELASTIC_DISABLE_COMPILE"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_MOST_S = 120
_DIGEST_BYTES = hashlib.sha256().digest_size
"""Behind each library in its file: loaders read no further than it says itself."""


class CompileError(Exception):
    """Nothing was compiled, and why."""


@cache
def compiled_library(source: Path, without: str, *functions: str) -> ctypes.CDLL | None:
    """Return the library of a C++ file; None: there is none, which is logged once, with what becomes of it.

    Nor is there one where its `is_supported` says that the processor lacks the instructions that it is written in.
    `functions` are those that it has for every processor.
    """
    try:
        library = load_compiled(source, *functions)
    except CompileError as error:
        logger.warning("%s: %s", without, error)
        return None
    return library if getattr(library, "is_supported", lambda: True)() else None


def load_compiled(source: Path, *functions: str) -> ctypes.CDLL:
    """Load the shared library of a C++ file; compile it where that was not done before.

    It lies in the directory for caches, one for each source, compiler and processor. Raises `CompileError`, also where
    it lacks one of these functions, or `ELASTIC_DISABLE_COMPILE` is 1.
    """
    if os.environ.get(DISABLE, "0") not in ("", "0"):
        raise CompileError(f"{DISABLE} is set")
    command = [*_compiler(), *_FLAGS]
    key = hashlib.sha256("\0".join([source.read_text(), *command, _processor()]).encode()).hexdigest()
    library = _private_directory() / f"{source.stem}-{key[:16]}.so"
    try:
        return _loaded(library, functions)
    except (OSError, AttributeError):  # there is none, or a damaged one
        _compile(command, source, library)
    try:
        return _loaded(library, functions)
    except (OSError, AttributeError) as error:
        made = f"what {command[0]} made of {source.name} cannot be loaded: {error}"
        raise CompileError(f"{made}; set CXX to another compiler") from error


def _loaded(path: Path, functions: Sequence[str]) -> ctypes.CDLL:
    """Load a library. Raises `OSError` where it is not what was written, `AttributeError` where it lacks a function."""
    content = path.read_bytes()
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        raise OSError(f"{path} is damaged")  # to load one that was cut off ends the process
    library = ctypes.CDLL(str(path))
    try:
        for function in functions:
            library[function]
    except AttributeError:
        _ctypes.dlclose(library._handle)  # else its path would stand for it for as long as the process lives
        raise
    return library


def _private_directory() -> Path:
    """Make the directory of libraries, which nobody else may write to: what lies there is run."""
    try:
        directory = cache_directory() / "kernels"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except ConfigError as error:
        raise CompileError(str(error)) from error
    except OSError as error:
        raise CompileError(f"{error}; set {CACHE} to a directory that can be written") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompileError(
            f"{directory} is another user's, or others may write to it; set {CACHE} to another directory"
        )
    return directory


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    if chosen:
        try:
            return shlex.split(chosen)
        except ValueError as error:
            raise CompileError(f"CXX={chosen!r}: {error}") from error
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [path]
    raise CompileError(f"there is no C++ compiler ({', '.join(_COMPILERS)}); install one, or set CXX")


def _compile(command: list[str], source: Path, library: Path) -> None:
    """Compile into a folder of its own, and move: other processes may do the same at this time."""
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            subprocess.run([*command, "-o", str(made), str(source)], check=True, capture_output=True, timeout=_MOST_S)
            with made.open("r+b") as file:
                file.write(hashlib.sha256(file.read()).digest())
            made.replace(library)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {error.returncode}"]
        raise CompileError(f"{command[0]} refuses {source.name}: {said[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} takes more than {_MOST_S} s for {source.name}") from error
    except OSError as error:  # no such compiler, no room
        raise CompileError(f"{error}; set CXX to a C++ compiler, {CACHE} to a directory with room") from error


def _processor() -> str:
    """Say what `-march=native` depends on: machines may share a directory for caches."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))
