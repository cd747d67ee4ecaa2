"""Which path a product takes: measured once per kind of matrix and number of tokens, then frozen.

A `PathTable` never changes an entry that it has, so that a model, a static copy of it and a replica in the same process
give the same numbers, and so that they can be given again later: the table is saved with the variant (`to_json`).
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from elastic.errors import ConfigError
from elastic.quant.codes import Integers
from elastic.quant.formats import Matrix, Parts, Path, Target, format_of

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of tokens that are measured. A product takes the path of the next larger one; above 512, that of 512."""
PATHS = ("packed", "expanded", "expanded_float32", "dynamic", "triton", "reference")
"""All that a table may name."""
HOPELESS = 3.0
"""A path this many times slower than the best is not tried for more tokens."""


@dataclass(frozen=True)
class Product:
    """What decides on a path, but for the number of tokens."""

    config: Any
    matrix: Matrix
    extras: tuple[str, ...]
    """Optional parts, sorted."""
    dtype: torch.dtype
    """Of the activations."""
    target: Target

    @classmethod
    def of(cls, config: Any, matrix: Matrix, parts: Parts, dtype: torch.dtype, target: Target) -> Product:
        return cls(config, matrix, tuple(sorted(parts.keys() - {"packed", "scales"})), dtype, target)


def bucket_of(tokens: int) -> int:
    """The number of tokens that was measured for this one."""
    return BUCKETS[min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)]


_BUCKET_OF = tuple(bucket_of(tokens) for tokens in range(BUCKETS[-1] + 1))


class PathTable:
    """(product, bucket of tokens) -> the name of a path."""

    def __init__(self) -> None:
        self._entries: dict[Product, dict[int, str]] = {}
        self._lock = threading.Lock()
        self._forced: str | None = None

    def path(self, product: Product, tokens: int, paths: Mapping[str, Path]) -> Path:
        """The path to take. What was never measured goes by `default`."""
        if self._forced is not None:
            return paths[self._forced]
        entry = self._entries.get(product)
        bucket = _BUCKET_OF[tokens] if tokens <= BUCKETS[-1] else BUCKETS[-1]
        name = entry.get(bucket) if entry else None
        return paths[name if name in paths else default(paths, bucket)]
