"""Which path a product takes: measured once per kind of matrix and number of tokens, then frozen.

A `DecodeKernelTable` never changes an entry that it has, so that a model, a static copy of it and a replica in the same
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
"""Numbers of tokens that are told apart: a product goes by the next larger one, above 512 by 512."""
PATHS = ("packed", "marlin", "triton", "expanded", "expanded_float32", "dynamic", "reference")
"""All that a table may name."""
FEW = 32
"""Tokens up to which a packed kernel is the default."""


@dataclass(frozen=True)
class MatmulSpec:
    """What decides on a path, apart from the number of tokens. Keep it: its hash is computed once."""

    config: Any
    matrix: MatrixShape
    extras: tuple[str, ...]
    """Optional parts, sorted."""
    dtype: torch.dtype
    """Of the activations."""
    target: KernelTarget

    def __post_init__(self) -> None:
        key = (self.config, self.matrix, self.extras, self.dtype, self.target)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Hashes of strings differ between processes."""
        return MatmulSpec, (self.config, self.matrix, self.extras, self.dtype, self.target)

    @classmethod
    def of(
        cls, config: Any, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget, dtype: torch.dtype
    ) -> MatmulSpec:
        return cls(config, matrix, tuple(sorted(parts.keys() - {"packed", "scales"})), dtype, target)


def bucket_of(tokens: int) -> int:
    """The number of tokens that stands for this one."""
    return _BUCKET_OF[tokens] if tokens < len(_BUCKET_OF) else BUCKETS[-1]


def default(paths: Mapping[str, Kernel], bucket: int) -> str:
    """The path where nothing was measured: a packed kernel for few tokens, expanded weights for more."""
    packed = ("packed", "marlin", "triton")
    order = (*packed, "expanded") if bucket <= FEW else ("expanded", *packed)
    return next((name for name in order if name in paths), "reference")


class KernelTable:
    """(product, bucket of tokens) -> the name of a path. Thread-safe; entries are added, never changed."""

    def __init__(self) -> None:
        self._entries: dict[MatmulSpec, dict[int, str]] = {}
        self._lock = threading.Lock()
        self._forced: str | None = None
        self.version = 0
        """Another number whenever `path` may answer otherwise."""

    def path(self, product: MatmulSpec, tokens: int, paths: Mapping[str, Kernel]) -> Kernel:
        """The path to take, out of those of a format.

        Raises `ConfigError` if that is none of them: the table is from another build of torch, or a path is forced.
        """
        name = self._forced
        if name is None:
            bucket = bucket_of(tokens)
            entry = self._entries.get(product)
            name = entry.get(bucket) if entry is not None else None
            if name is None:
                name = default(paths, bucket)
        if name not in paths:
            raise ConfigError(f"path {name!r} does not exist for {product}; there are: {', '.join(paths)}")
        return paths[name]

    def chosen(self, product: MatmulSpec) -> dict[int, str]:
        """Bucket -> path, as far as it is decided."""
        return dict(self._entries.get(product, {}))

    def add(self, product: MatmulSpec, chosen: Mapping[int, str]) -> dict[int, str]:
        """Add what is not decided yet. Returns the entries that were there and say something else."""
        for bucket, name in chosen.items():
            if bucket not in BUCKETS or name not in PATHS:
                raise ConfigError(f"{name!r} for {bucket!r} tokens is no entry; tokens: {BUCKETS}, paths: {PATHS}")
        with self._lock:
            old = self._entries.get(product, {})
            self._entries[product] = {**chosen, **old}
            self.version += 1
        return {bucket: name for bucket, name in old.items() if chosen.get(bucket, name) != name}

    def merge(self, other: KernelTable) -> list[MatmulSpec]:
        """Add what another table has. Returns the products for which this one had decided otherwise, and still does."""
        return [product for product, chosen in list(other._entries.items()) if self.add(product, chosen)]

    def only(self, products: Iterable[MatmulSpec]) -> KernelTable:
        """A table of these products, as far as they are in this one."""
        part = KernelTable()
        part._entries = {product: self.chosen(product) for product in products if product in self._entries}
        return part

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
        """For `json.dumps`."""
        return [_to_json(product, dict(chosen)) for product, chosen in list(self._entries.items())]

    @classmethod
    def from_json(cls, rows: Any) -> KernelTable:
        """What `to_json` gave. Raises `ConfigError` where it did not."""
        table = cls()
        for row in rows:
            try:
                product, chosen = _from_json(row)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ConfigError(f"{row!r} is no row of a path table: {error!r}") from error
            table.add(product, chosen)
        return table


paths = KernelTable()
"""The table of this process."""

_BUCKET_OF = tuple(BUCKETS[bisect_left(BUCKETS, tokens)] for tokens in range(BUCKETS[-1] + 1))


def _to_json(product: MatmulSpec, chosen: dict[int, str]) -> dict[str, Any]:
    return {
        "format": type(product.config).__name__,
        "config": asdict(product.config),
        "matrix": asdict(product.matrix),
        "extras": list(product.extras),
        "dtype": str(product.dtype).removeprefix("torch."),
        "target": asdict(product.target),
        "paths": {str(bucket): chosen[bucket] for bucket in sorted(chosen)},
    }


def _from_json(row: Any) -> tuple[MatmulSpec, dict[int, str]]:
    dtype = getattr(torch, row["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(row["dtype"])
    config = config_from(row["format"], row["config"])
    product = MatmulSpec(
        config, MatrixShape(**row["matrix"]), tuple(row["extras"]), dtype, KernelTarget(**row["target"])
    )
    return product, {int(bucket): name for bucket, name in row["paths"].items()}
