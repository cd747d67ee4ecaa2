"""The layout of a layer's parameters in memory: side by side in one range, each in an order of its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b

import torch

from elastic.errors import ConfigError

ALIGNMENT = 256
"""Bytes. Every parameter begins at a multiple: what vector units and cuBLAS like best."""


@dataclass(frozen=True)
class ParameterLayout:
    """The offset of one parameter and the order of its elements."""

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
    alignment: int = ALIGNMENT
    """Bytes. The offset is a multiple; a page for what comes and goes in parts."""

    def __post_init__(self) -> None:
        dims = range(len(self.shape))
        if sorted(self.order) != list(dims) or len(self.padded) != len(self.shape):
            raise ConfigError(f"order={self.order}, padded={self.padded} do not fit a parameter of shape {self.shape}")
        if any(self.padded[d] < self.shape[d] for d in dims) or any(cut not in dims for cut in self.cuts):
            raise ConfigError(f"padded={self.padded} or cuts={self.cuts} are too small or too many for {self.shape}")

    @classmethod
    def like(cls, tensor: torch.Tensor) -> ParameterLayout:
        """Return the layout that `tensor` (any shape and dtype) has now, without gaps."""
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
        """View the stored elements [elements, padding included] in the checkpoint's shape."""
        return stored.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class LayerLayout:
    """The parameters of a layer by name, side by side."""

    parameters: Mapping[str, ParameterLayout]
    _page_counts: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def pack(cls, parameters: Mapping[str, ParameterLayout]) -> LayerLayout:
        """Lay parameters out one after another; their own offsets are ignored."""
        placed, offset = {}, 0
        for name, parameter in parameters.items():
            offset = -(-offset // parameter.alignment) * parameter.alignment
            placed[name] = parameter if parameter.offset == offset else replace(parameter, offset=offset)
            offset += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(placed)

    def without(self, names: Collection[str]) -> LayerLayout:
        """Keep the offsets of the others: gaps remain where these were."""
        return LayerLayout({name: p for name, p in self.parameters.items() if name not in names})

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the beginning of the range to the end of the last parameter."""
        return max((p.offset + p.nbytes for p in self.parameters.values()), default=0)

    @cached_property
    def checksum(self) -> str:
        """Tell by few letters how the parameters lie: the same for layers whose bytes can be copied as they are."""
        lies = [(n, p.shape, str(p.dtype), p.order, p.padded, p.offset) for n, p in self.parameters.items()]
        return blake2b(repr(lies).encode(), digest_size=8).hexdigest()

    def pages(self, page_bytes: int) -> set[int]:
        """Return the pages of the range, by number, that hold any of it."""
        return {page for p in self.parameters.values() for page in pages_under(p.offset, p.nbytes, page_bytes)}

    def page_count(self, page_bytes: int) -> int:
        """Count the pages that hold any of it."""
        if page_bytes not in self._page_counts:
            count = reached = 0
            for parameter in self.parameters.values():  # in the order of their offsets
                pages = pages_under(parameter.offset, parameter.nbytes, page_bytes)
                count += pages.stop - max(reached, pages.start)
                reached = pages.stop
            self._page_counts[page_bytes] = count
        return self._page_counts[page_bytes]


def pages_under(offset: int, nbytes: int, page_bytes: int) -> range:
    """Return the pages, by number, that hold `nbytes` from an offset of a range on."""
    return range(offset // page_bytes, -(-(offset + nbytes) // page_bytes))
