"""Keys and values: what a request takes at a rank, and how many requests its pages have room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic.engines.core.kv_state import INT8, SCALE_BYTES, scale_slots, usual_block_tokens
from elastic.engines.executor.layer_groups import layer_groups
from elastic.errors import ConfigError
from elastic.kvcache.attention_heads import attention_heads
from elastic.kvcache.storage.sector_space import BlockGroup, sector_layer_pages
from elastic.planning.estimate.configuration import FULL
from elastic.planning.sharding.heads import kv_shards


@dataclass(frozen=True)
class KVShape:
    """The keys and values of one token in one layer."""

    heads: int
    dim: int
    itemsize: int
    form: str = FULL

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, with the scales of the keys, and of the values, of each head."""
        return 2 * self.heads * (self.dim * self.itemsize + (SCALE_BYTES if self.form == INT8 else 0))

    def block_bytes(self, tokens: int, tp: int = 1) -> int:
        """Return the bytes of a block of so many tokens at one of `tp` ranks."""
        slots = tokens + (scale_slots(tokens, self.dim) if self.form == INT8 else 0)
        return 2 * slots * (self.heads // kv_shards(tp, self.heads)) * self.dim * self.itemsize


def kv_shape_of(config: Any, itemsize: int, form: str = FULL) -> KVShape:
    """Return the shape by a text config.

    Raises `ConfigError` for an unknown form, for values larger than keys, and for layers of unlike shapes.
    """
    shapes = {(heads.keys, heads.key_dim, heads.value_dim) for heads in attention_heads(config)}
    if len(shapes) > 1:
        listed = ", ".join(f"{heads} of {key}" for heads, key, _ in sorted(shapes))
        raise ConfigError(f"its layers have unlike heads of keys, {listed} elements: the engine's blocks are all alike")
    kv_heads, key, value = shapes.pop()
    if key < value:
        raise ConfigError(f"keys of {key} and values of {value} elements: the engine's blocks have no larger values")
    check_kv_form(form)
    return KVShape(kv_heads, key, itemsize if form == FULL else 1, form)


def check_kv_form(form: str) -> None:
    """Raise `ConfigError` for an unknown form of keys and values."""
    if form not in (FULL, INT8):
        raise ConfigError(f"kv={form!r} is not known; use {FULL!r} or {INT8!r}")


class KVBlockCapacity:
    """Blocks of some of a model's layers in the pages of one of `tp` ranks, as the engine would have them."""

    def __init__(
        self, config: Any, block_tokens: int | None, page_bytes: int, shape: KVShape, tp: int, layers: range
    ) -> None:
        """`block_tokens`: None as the engine has them. Raises `ConfigError` for layers without a cache in blocks."""
        self._block_tokens = block_tokens or usual_block_tokens(shape.form, shape.dim)
        self._page_bytes = page_bytes
        groups = layer_groups(config)
        block_bytes = shape.block_bytes(self._block_tokens, tp)
        sizes = sector_layer_pages([BlockGroup(group.layers, block_bytes) for group in groups], page_bytes)
        self.groups = tuple(
            (group.window, size * len(own_layers), size * page_bytes // block_bytes)
            for group, size in zip(groups, sizes, strict=True)
            if (own_layers := [layer for layer in group.layers if layer in layers])
        )
        """Of each group with a layer here: its window, pages of a sector here, blocks of a sector."""

    def pages(self, requests: int, tokens: int) -> int:
        """Count the pages that so many requests of so many tokens take."""
        return sum(
            -(-requests * self._blocks(tokens, window) // blocks) * pages for window, pages, blocks in self.groups
        )

    def requests(self, pages: int, tokens: int) -> int:
        """Count the requests of so many tokens that these pages have room for at a time."""
        if not self.groups or self.pages(1, tokens) > pages:
            return 0
        low, high = 1, 2
        while self.pages(high, tokens) <= pages:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.pages(middle, tokens) <= pages else (low, middle)
        return low

    def request_bytes(self, tokens: int) -> int:
        """Return the bytes of one request among many."""
        each = (self._blocks(tokens, window) * pages / blocks for window, pages, blocks in self.groups)
        return round(sum(each) * self._page_bytes)

    def _blocks(self, tokens: int, window: int | None) -> int:
        return -(-(tokens if window is None else min(tokens, window)) // self._block_tokens)
