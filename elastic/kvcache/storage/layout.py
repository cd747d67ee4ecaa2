"""The order of batch, head, token and dimension of keys and values in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from elastic.errors import ConfigError


@dataclass(frozen=True)
class KVLayout:
    """An order of the axes. Memory falls into `rows`, which grow by tokens, each from a page of its own."""

    name: str
    rows_over: str
    """The axes before the token axis, one row for each of their combinations: "bh", "b" or "" (no gaps: else a view
    spans unmapped memory between its rows)."""
    axes_inside: str
    """The axes of one token inside a row."""


HEAD_MAJOR = KVLayout("head_major", "bh", "d")
"""[batch, head, token, dim]: fastest on CPUs at long contexts; one page per head at least."""
BATCH_MAJOR = KVLayout("batch_major", "b", "hd")
"""[batch, token, head, dim]: one page per sequence at least."""
TOKEN_MAJOR = KVLayout("token_major", "", "bhd")
"""[token, batch, head, dim]: one growing row, no gaps; the rule where pages are large (CUDA, huge pages on CPUs)."""
LARGE_PAGE_BYTES = 1 << 20
"""From here on a page for each head is too much: with 2 MiB, 32 layers of 32 heads take 4 GiB for one request."""

LAYOUTS = {layout.name: layout for layout in (HEAD_MAJOR, BATCH_MAJOR, TOKEN_MAJOR)}


def choose_layout(name: str | None, device: torch.device, page_bytes: int | None = None) -> KVLayout:
    """Return the layout by name, or the best for a device and the size of its pages (None: the usual one there).

    CUDA allows only layouts without gaps (a read there is fatal). Raises `ConfigError`.
    """
    if name is None:
        return HEAD_MAJOR if device.type == "cpu" and (page_bytes or 0) < LARGE_PAGE_BYTES else TOKEN_MAJOR
    allowed = [n for n, layout in LAYOUTS.items() if device.type == "cpu" or not layout.rows_over]
    if name not in allowed:
        raise ConfigError(f"kv_layout={name!r} is not offered on {device}; choose one of {allowed}")
    return LAYOUTS[name]


@dataclass(frozen=True)
class StoreGeometry:
    """The keys (or the values) of one decoder layer: shape [batch, heads, up to max_tokens, dim] in a layout."""

    layout: KVLayout
    batch: int
    heads: int
    dim: int
    dtype: torch.dtype
    max_tokens: int
    page_bytes: int

    @cached_property
    def rows(self) -> int:
        """Growing rows."""
        sizes = {"b": self.batch, "h": self.heads}
        return math.prod(sizes[axis] for axis in self.layout.rows_over)

    @cached_property
    def token_stride(self) -> int:
        """Elements from one token to the next inside a row."""
        sizes = {"b": self.batch, "h": self.heads, "d": self.dim}
        return math.prod(sizes[axis] for axis in self.layout.axes_inside)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token inside a row."""
        return self.token_stride * self.dtype.itemsize

    @cached_property
    def row_slots(self) -> int:
        """Page slots reserved for each row."""
        return -(-self.max_tokens * self.token_bytes // self.page_bytes)

    @cached_property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements between neighbours along batch, head, token and dimension."""
        row = self.row_slots * self.page_bytes // self.dtype.itemsize
        steps = {
            "bh": (self.heads * row, row, self.dim, 1),
            "b": (row, self.dim, self.heads * self.dim, 1),
            "": (self.heads * self.dim, self.dim, self.batch * self.heads * self.dim, 1),
        }
        return steps[self.layout.rows_over]

    def slots(self, start: int, stop: int) -> tuple[int, int]:
        """Return the window of slots in every row that holds the tokens [start, stop)."""
        first = start * self.token_bytes // self.page_bytes
        return first, first if start == stop else -(-stop * self.token_bytes // self.page_bytes)
