"""Which kernel computes one new token: measured once for each shape and range of lengths, then always the same.

What is the fastest depends on the processor, the dtype, the grouping of heads, the order in memory and the number of
tokens held: the best kernel of one CPU takes twice the time of the stock kernel on another
(docs/performance/decoding.md).
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from elastic.directories import replacing
from elastic.errors import ConfigError
from elastic.kvcache.attention_heads import attention_heads
from elastic.kvcache.decode_kernels import KERNELS, sdpa
from elastic.kvcache.decode_timing import DEFAULT, DecodeShape, fastest, processor
from elastic.kvcache.storage.layout import HEAD_MAJOR, KVLayout
from elastic.memory.backends.streams import capturing
from elastic.weights.decoder import context_length

UP_TO = (256, 1024, 4096)
"""Tokens held up to which lengths count as alike; above the last one all do."""
MEASURED_AT = (128, 512, 2048, 8192)
"""The length that stands for each range."""
FILE = "elastic-attention.json"
"""Where the table is kept in a directory, beside packed variants."""


class DecodeKernelTable:
    """(shape, range of lengths) -> kernel. Thread-safe; entries are measured or come from a file, and never change."""

    def __init__(self) -> None:
        self._entries: dict[DecodeShape, dict[int, str]] = {}
        self._lock = threading.Lock()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
    ) -> torch.Tensor:
        """Attend by the kernel for this shape and length, measured if it is the first of its kind.

        query: [batch, kv_heads, n, dim], key: [batch, kv_heads, k, dim], value: [batch, kv_heads, k, value_dim], mask:
        [batch or 1, 1, 1, k] or None; all of one dtype, on one device. Returns [batch, kv_heads, n, value_dim].
        """
        batch, kv_heads, tokens, dim = key.shape
        heads_apart = key.stride(0) != kv_heads * key.stride(1) or value.stride(0) != kv_heads * value.stride(1)
        if batch > 1 and heads_apart:  # as [batch * kv_heads, k, dim], which kernels see, they would be copies
            return sdpa(query, key, value, mask, scaling)
        queries, value_dim = query.shape[2], value.shape[3]
        order = "head_major" if key.stride(2) == dim else "token_major"
        shape = DecodeShape(processor(query.device), query.dtype, queries, dim, value_dim, order)
        kernel = self.choose(shape, tokens, query.device, kv_heads)
        return KERNELS[kernel](query, key, value, mask, scaling)

    def choose(self, shape: DecodeShape, tokens: int, device: torch.device, kv_heads: int) -> str:
        """Return the name of the kernel for so many tokens, after measuring it if need be."""
        bucket = MEASURED_AT[bisect_left(UP_TO, tokens)]
        entry = self._entries.get(shape)
        if entry is not None and bucket in entry:
            return entry[bucket]
        if device.type == "cuda" and capturing():
            return DEFAULT
        with self._lock:
            entry = self._entries.setdefault(shape, {})
            if bucket not in entry:
                entry[bucket] = fastest(shape, bucket, device, kv_heads)
            return entry[bucket]

    def save(self, path: Path, processors: Iterable[str]) -> None:
        """Write the entries for these processors beside those that the file has for others.

        Raises `ConfigError` where it cannot be written, or is no such file.
        """
        mine = set(processors)
        rows = [row for row in (_read(path) if os.path.exists(path) else []) if row.get("processor") not in mine]
        for shape, entry in list(self._entries.items()):
            if shape.processor in mine:
                kernels = {str(tokens): name for tokens, name in sorted(entry.items())}
                dtype = str(shape.dtype).removeprefix("torch.")
                rows.append(shape._asdict() | {"dtype": dtype, "kernels": kernels, "among": list(KERNELS)})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                partial.write_text(json.dumps(rows, indent=1))
        except OSError as error:
            raise ConfigError(f"variant_cache: {path} cannot be written: {error}") from error

    def load(self, path: Path) -> None:
        """Add what `save` wrote, where this table has no entry yet; what was chosen among others is measured anew.

        Raises `ConfigError` for anything else.
        """
        for row in _read(path):
            try:
                shape, kernels = _from_row(row)
                with self._lock:
                    self._entries[shape] = kernels | self._entries.get(shape, {})
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ConfigError(
                    f"{path}: {row!r} is no row of a table of attention kernels ({error!r}); delete the file, it is "
                    "made anew"
                ) from error


table = DecodeKernelTable()
"""The table of this process."""


def measure_ahead(config: Any, dtype: torch.dtype, layouts: Mapping[torch.device, KVLayout]) -> None:
    """Measure what the attention of a model will ask for, as far as its text config tells: the rest at first use.

    `layouts` has the devices that attention may run on.
    """
    longest: Any = context_length(config) or MEASURED_AT[-1]
    for heads in dict.fromkeys(attention_heads(config)):
        if not all(isinstance(n, int) and n > 0 for n in (*heads, longest)) or heads.queries < heads.keys:
            continue
        for device, layout in layouts.items():
            order = "head_major" if layout is HEAD_MAJOR else "token_major"
            group = heads.queries // heads.keys
            shape = DecodeShape(processor(device), dtype, group, heads.key_dim, heads.value_dim, order)
            for tokens in (1, *(end + 1 for end in UP_TO if end < longest)):
                table.choose(shape, tokens, device, heads.keys)


def _from_row(row: dict[str, Any]) -> tuple[DecodeShape, dict[int, str]]:
    fields = {name: row[name] for name in DecodeShape._fields} | {"dtype": getattr(torch, row["dtype"])}
    if not isinstance(fields["dtype"], torch.dtype):
        raise ValueError(row["dtype"])
    kernels = {int(tokens): name for tokens, name in row["kernels"].items() if int(tokens) in MEASURED_AT}
    if row.get("among") != list(KERNELS):  # another version's
        return DecodeShape(**fields), {}
    if unknown := set(kernels.values()) - KERNELS.keys():
        raise ValueError(f"{', '.join(sorted(unknown))}: not among the kernels")
    return DecodeShape(**fields), kernels


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: the table of attention kernels cannot be read: {error}; delete it") from error
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("processor"), str) for row in rows
    ):
        raise ConfigError(f"{path} is no table of attention kernels; delete it")
    return rows
