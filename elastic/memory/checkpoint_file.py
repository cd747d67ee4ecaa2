"""Parameters in safetensors files, by mmap: read when they are needed, shared by all processes of a host."""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from elastic.errors import ConfigError, require_path

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100 << 20
_files: weakref.WeakValueDictionary[tuple[int, ...], CheckpointFile] = weakref.WeakValueDictionary()


class CheckpointFile:
    """One safetensors file, mapped copy-on-write. It must not be changed while tensors of it are alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self._entries, self.metadata, self._start = _read_header(path, file, self.size)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self._entries.items()}
        """Of its entries, by name."""

    def tensor(self, name: str) -> torch.Tensor | None:
        """Map a tensor, [shape of its entry], as a storage of its own; None for an unknown dtype."""
        entry = self._entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        first, last = entry["data_offsets"]
        if dtype is None or first == last or (self._start + first) % dtype.itemsize:
            return None
        count = (last - first) // dtype.itemsize
        with torch.inference_mode(False):
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._start + first).view(
                self.shapes[name]
            )

    def forget(self, name: str) -> None:
        """Have the bytes of a tensor, read so far, in memory of this process no more: they are read anew if needed."""
        first, last = self._entries[name]["data_offsets"]
        start = (self._start + first) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, start, self._start + last - start)


class Checkpoint:
    """The tensors of one safetensors file, or of all those in a directory."""

    def __init__(self, path: str | Path) -> None:
        path = require_path(path, "checkpoint")
        files = sorted(path.glob("*.safetensors")) if os.path.isdir(path) else [path]
        if not files or not all(map(os.path.isfile, files)):
            raise ConfigError(f"checkpoint={str(path)!r} is no safetensors file and no directory with such files")
        self._files = {name: file for file in map(_open, files) for name in file.shapes}
        self.names = list(self._files)
        self.blocks: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        """Of parameters that are not there by their names: the entries that have them, and where each begins."""

    def find(self, name: str) -> torch.Tensor | None:
        """Map the tensor [shape in the file] of a parameter: by its name, or the longest end of it that there is.

        A model inside another (an adapter, a head) has longer names than its checkpoint. Whether the bytes are those
        of the parameter is for the caller to find out.
        """
        located = self.locate(name)
        return None if located is None else located[0].tensor(located[1])

    def locate(self, name: str) -> tuple[CheckpointFile, str] | None:
        """Return the file that `find` would read from, and the name that the tensor has there."""
        end = next((end for end in _ends(name) if end in self._files), None)
        return None if end is None else (self._files[end], end)

    def find_blocks(self, name: str) -> list[tuple[str, tuple[int, ...]]]:
        """Return the entries of a parameter that `blocks` has by its name, or by the longest end of it; none: empty."""
        return next((self.blocks[end] for end in _ends(name) if end in self.blocks), [])


def _ends(name: str) -> Iterator[str]:
    """Yield the ends of a parameter's name, itself first."""
    parts = name.replace(".base_layer", "").split(".")
    yield from (".".join(parts[start:]) for start in range(len(parts)))


def _open(path: Path) -> CheckpointFile:
    """Open a file, or return its one mapping in this process."""
    stat = path.stat()
    key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    file = _files.get(key)
    if file is None:
        file = _files[key] = CheckpointFile(path)
    return file


def _read_header(path: Path, file: Any, size: int) -> tuple[dict[str, Any], dict[str, str], int]:
    """Return the entries by name, the metadata, and the offset of the data. Raises `ConfigError`."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(_LONGEST_HEADER, size - 8):
        raise ConfigError(f"{path} is no safetensors file: its header would be {length:,} bytes long")
    try:
        entries = json.loads(file.read(length))
        metadata = dict(entries.pop("__metadata__", None) or {})
        for entry in entries.values():
            _check_entry(entry, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: its header cannot be read ({error})") from error
    return entries, metadata, 8 + length


def _check_entry(entry: dict[str, Any], size: int) -> None:
    first, last = entry["data_offsets"]
    shape, dtype = entry["shape"], _DTYPES.get(entry["dtype"])
    expected = last - first if dtype is None else math.prod(shape) * dtype.itemsize
    are_sizes = all(type(number) is int and number >= 0 for number in (first, last, *shape))
    if not are_sizes or not first <= last <= size or expected != last - first:
        raise ValueError(f"an entry does not fit the file: {entry}")
