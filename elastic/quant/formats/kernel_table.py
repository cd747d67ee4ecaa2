"""The table of kernels: the path of a product, measured once per kind of matrix and number of tokens, then frozen.

A `KernelTable` never changes an entry that it has, so that a model, a static copy of it and a replica in the same
process give the same numbers, and so that they can be given again later: the table is saved with the variant.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.base import Kernel, KernelTarget, MatrixShape, PackedTensors, config_from

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of tokens with an entry: a product goes by the next larger one, above 512 by 512."""
_PACKED = ("compiled", "packed", "marlin", "triton", "sparse", "dense")
PATHS = (*_PACKED, "expanded", "expanded_float32", "dynamic", "reference")
"""The names that a table may have."""
OPTIONAL = ("compiled", "triton", "sparse")
"""Paths that a machine without a compiler or with another torch lacks, whatever its table says: the default serves."""
FEW = 32
"""The most tokens for which a packed kernel is the default."""


@dataclass(frozen=True)
class MatmulSpec:
    """The key of a product in the table, apart from the number of tokens."""

    config: Any
    matrix: MatrixShape
    extras: tuple[str, ...]
    """The names of optional parts, sorted."""
    dtype: torch.dtype
    """The dtype of the activations."""
    target: KernelTarget

    @classmethod
    def of(
        cls, config: Any, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget, dtype: torch.dtype
    ) -> MatmulSpec:
        """Return the key of products of x: [tokens, inputs], of a dtype, with such parts."""
        return cls(config, matrix, tuple(sorted(parts.keys() - {"packed", "scales"})), dtype, target)


def bucket_of(tokens: int) -> int:
    """Return the number of tokens that stands for this one."""
    return _BUCKET_OF[tokens] if tokens < len(_BUCKET_OF) else BUCKETS[-1]


def default(paths: Mapping[str, Kernel], bucket: int) -> str:
    """Return the path where nothing was measured: a packed kernel for few tokens, expanded weights for more."""
    order = (*_PACKED, "expanded") if bucket <= FEW else ("expanded", *_PACKED)
    return next((name for name in order if name in paths), "reference")


class KernelTable:
    """A table (product, bucket of tokens) -> name of a path. Thread-safe; entries are added, never changed."""

    def __init__(self) -> None:
        self._entries: dict[MatmulSpec, dict[int, str]] = {}
        self._lock = threading.Lock()
        self._forced: str | None = None
        self.version = 0
        """A count that grows whenever `path` may answer otherwise."""

    def path(self, product: MatmulSpec, tokens: int, paths: Mapping[str, Kernel]) -> Kernel:
        """Choose one of a format's kernels for so many tokens.

        Raises `ConfigError` if the path is none of them: the table is from another build of torch, or a path is forced.
        """
        name = self._forced
        if name is None:
            bucket = bucket_of(tokens)
            entry = self._entries.get(product)
            name = (entry and entry.get(bucket)) or default(paths, bucket)
        if name in OPTIONAL and name not in paths:
            name = default(paths, bucket_of(tokens))
        if name not in paths:
            raise ConfigError(f"path {name!r} does not exist for {product}; there are: {', '.join(paths)}")
        return paths[name]

    def chosen(self, product: MatmulSpec) -> dict[int, str]:
        """Return the paths of a product by bucket, as far as they are decided."""
        return dict(self._entries.get(product, {}))

    def add(self, product: MatmulSpec, chosen: Mapping[int, str]) -> None:
        """Add what is not decided yet. Raises `ConfigError` for an unknown bucket or path."""
        for bucket, name in chosen.items():
            if bucket not in BUCKETS or name not in PATHS:
                raise ConfigError(f"{name!r} for {bucket!r} tokens is no entry; tokens: {BUCKETS}, paths: {PATHS}")
        with self._lock:
            self._entries[product] = {**chosen, **self._entries.get(product, {})}
            self.version += 1

    def merge(self, other: KernelTable) -> None:
        """Add the entries of another table, as far as they are not decided yet."""
        for product, chosen in list(other._entries.items()):
            self.add(product, chosen)

    def only(self, products: Iterable[MatmulSpec]) -> KernelTable:
        """Return a table of these products, as far as they are in this one."""
        table = KernelTable()
        table._entries = {product: self.chosen(product) for product in products if product in self._entries}
        return table

    @contextmanager
    def forced(self, name: str) -> Iterator[None]:
        """Take this path for every product, in all threads; for tests."""
        if name not in PATHS:
            raise ConfigError(f"path {name!r} does not exist; use one of: {', '.join(PATHS)}")
        before, self._forced = self._forced, name
        self.version += 1
        try:
            yield
        finally:
            self._forced = before
            self.version += 1

    def to_json(self) -> list[dict[str, Any]]:
        """Return the table as rows for `json.dumps`."""
        return [
            {
                "format": type(product.config).__name__,
                "config": asdict(product.config),
                "matrix": asdict(product.matrix),
                "extras": list(product.extras),
                "dtype": str(product.dtype).removeprefix("torch."),
                "target": asdict(product.target),
                "paths": {str(bucket): name for bucket, name in sorted(chosen.items())},
            }
            for product, chosen in list(self._entries.items())
        ]

    @classmethod
    def from_json(cls, rows: Any) -> KernelTable:
        """Read the rows of `to_json`. Raises `ConfigError` for anything else."""
        table = cls()
        for row in rows:
            try:
                dtype = getattr(torch, row["dtype"])
                if not isinstance(dtype, torch.dtype):
                    raise TypeError(row["dtype"])
                config, matrix = config_from(row["format"], row["config"]), MatrixShape(**row["matrix"])
                product = MatmulSpec(config, matrix, tuple(row["extras"]), dtype, KernelTarget(**row["target"]))
                chosen = {int(bucket): name for bucket, name in row["paths"].items()}
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ConfigError(f"{row!r} is no row of a path table: {error!r}") from error
            table.add(product, chosen)
        return table


paths = KernelTable()
"""The table of this process."""

_BUCKET_OF = tuple(BUCKETS[bisect_left(BUCKETS, tokens)] for tokens in range(BUCKETS[-1] + 1))
