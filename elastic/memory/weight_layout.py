"""How the parameters of a layer lie in memory: side by side in one range, each in an order of its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from elastic.errors import ConfigError

ALIGNMENT = 256
"""Bytes. Every parameter begins at a multiple: what vector units and cuBLAS like best."""


@dataclass(frozen=True)
class ParameterLayout:
    """Where one parameter lies and how its elements are ordered there."""

    shape: tuple[int, ...]
    """The checkpoint's."""
    dtype: torch.dtype
    order: tuple[int, ...]
    """The dimensions as they are stored, the outermost first: `(1, 0)` is a transposed matrix."""
    padded: tuple[int, ...]
    """Stored size of each dimension, in the checkpoint's order; never below `shape`."""
    cuts: tuple[int, ...] = ()
    """The dimensions along which tensor parallelism may split it."""
    offset: int = 0
    """Bytes from the beginning of the range."""

    def __post_init__(self) -> None:
        dims = range(len(self.shape))
        if sorted(self.order) != list(dims) or len(self.padded) != len(self.shape):
            raise ConfigError(f"order={self.order}, padded={self.padded} do not fit a parameter of shape {self.shape}")
        if any(self.padded[d] < self.shape[d] for d in dims) or any(cut not in dims for cut in self.cuts):
            raise ConfigError(f"padded={self.padded} or cuts={self.cuts} are too small or too many for {self.shape}")

    @classmethod
    def like(cls, tensor: torch.Tensor) -> ParameterLayout:
        """As `tensor` lies now, without gaps."""
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda d: (-strides[d], -tensor.shape[d], d))
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, tuple(order), shape, cuts=tuple(range(tensor.ndim)))

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each dimension of the checkpoint's shape."""
        strides = dict.fromkeys(self.order, 1)
        step = 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= self.padded[dim]
        return tuple(strides[dim] for dim in range(len(self.shape)))

    @cached_property
    def nbytes(self) -> int:
        """Bytes stored, padding included."""
        return math.prod(self.padded) * self.dtype.itemsize

    def show(self, stored: torch.Tensor) -> torch.Tensor:
        """The parameter in the checkpoint's shape, a view of the stored elements (one dimension)."""
        return stored.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class LayerLayout:
    """The parameters of a layer by name, side by side."""

    parameters: Mapping[str, ParameterLayout]

    @classmethod
    def pack(cls, parameters: Mapping[str, ParameterLayout]) -> LayerLayout:
        """Place parameters one after another; their own offsets are ignored."""
        placed, offset = {}, 0
        for name, parameter in parameters.items():
            placed[name] = parameter if parameter.offset == offset else replace(parameter, offset=offset)
            offset += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(placed)

    def without(self, names: Collection[str]) -> LayerLayout:
        """The same places for the others: where these were is a gap."""
        return LayerLayout({name: p for name, p in self.parameters.items() if name not in names})

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the beginning of the range to the end of the last parameter."""
        return max((p.offset + p.nbytes for p in self.parameters.values()), default=0)

    def pages(self, page_bytes: int) -> set[int]:
        """The pages of the range, by number, that hold any of it."""
        return {page for p in self.parameters.values() for page in pages_under(p.offset, p.nbytes, page_bytes)}

    def page_count(self, page_bytes: int) -> int:
        """How many pages hold any of it."""
        if page_bytes not in self._page_counts:
            self._page_counts[page_bytes] = self._count_pages(page_bytes)
        return self._page_counts[page_bytes]

    @cached_property
    def _page_counts(self) -> dict[int, int]:
        return {}

    def _count_pages(self, page_bytes: int) -> int:
        count = reached = 0
        for parameter in self.parameters.values():  # in the order of their offsets
            under = pages_under(parameter.offset, parameter.nbytes, page_bytes)
            count += under.stop - max(reached, under.start)
            reached = under.stop
        return count


def pages_under(offset: int, nbytes: int, page_bytes: int) -> range:
    """The pages, by number, under a stretch of a range."""
    return range(offset // page_bytes, -(-(offset + nbytes) // page_bytes))
