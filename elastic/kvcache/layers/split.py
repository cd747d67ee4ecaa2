"""A cache layer whose rows are at several places: each part is computed where it is, and they are one to others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from elastic.errors import ConfigError
from elastic.kvcache.layers.base import PagedLayer
from elastic.kvcache.layers.elastic_layer import ElasticLayer
from elastic.kvcache.layers.synchronized import synchronized
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.copy_engine import to_device

Shape = tuple[tuple[KVPool | None, int], ...]
"""Of each part its pool and rows, in the order of the rows. None: the pool of the decoder layer's KV cache."""


@dataclass
class RowPart:
    """Consecutive rows of the batch."""

    layer: ElasticLayer
    rows: int
    """0: as many as come first."""


class RowSplitLayer(PagedLayer):
    """Keys and values of every row, [batch, kv_heads, tokens, head_dim], in parts.

    Between forward passes all parts hold the same tokens. `keys`, `values` and what `update` returns are copies where
    there are several parts. What does not depend on the rows is that of the first part.
    """

    def __init__(self, whole: ElasticLayer) -> None:
        # The base class would set `keys` and `values`, which are computed here.
        self.index = whole.index
        self.is_sliding = whole.is_sliding
        self.lock = threading.RLock()
        keys = whole.keys if whole.get_seq_length() else None
        self.parts = [RowPart(whole, keys.shape[0] if keys is not None else 0)]

    def __getattr__(self, name: str) -> Any:
        """Look up on the first part what every part has alike: its dtype, device, window, whether it is initialized."""
        if name in ("is_initialized", "dtype", "device", "sliding_window", "cumulative_length"):
            return getattr(self.parts[0].layer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def record_past(self) -> bool:
        """Whether every part keeps what slides out of a window; transformers assigns it."""
        return self.parts[0].layer.record_past

    @record_past.setter
    def record_past(self, record_past: bool) -> None:
        for part in self.parts:
            part.layer.record_past = record_past

    # -- the parts

    @property
    def shape(self) -> Shape | None:
        """The pool and the rows of each part; None: nothing is held."""
        return tuple((part.layer.fixed_pool, part.rows) for part in self.parts) if self.get_seq_length() else None

    def resplit(self, shape: Sequence[tuple[KVPool | None, int]]) -> None:
        """Have so many rows in each pool; those held move. Raises `CapacityError`, with the layer as it was."""
        wanted = tuple((pool, rows) for pool, rows in shape if rows)
        if self.shape == wanted:
            return
        if not self.get_seq_length():
            self.parts = [RowPart(self._empty_part(pool), rows) for pool, rows in wanted or ((None, 0),)]
            return
        self._require_rows(sum(rows for _, rows in wanted))
        self._share_out(*self.views(), wanted)

    # -- what a cache layer of transformers does

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Lease memory for states such as these, [batch, kv_heads, tokens, head_dim]. Raises `CapacityError`."""
        self._expect(key_states.shape[0])
        for part, keys, values in self._by_parts(key_states, value_states):
            part.lazy_initialization(keys, values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, kv_heads, new, head_dim]; return [batch, kv_heads, seen, head_dim] for attention.

        Raises `CapacityError` with the layer as it was.
        """
        self._expect(key_states.shape[0])
        before, states = self.get_seq_length(), []
        try:
            for part, keys, values in self._by_parts(key_states, value_states):
                states.append(part.update(keys, values, *args, **kwargs))
        except BaseException:
            self.rewind(before)
            raise
        return _concatenated([keys for keys, _ in states]), _concatenated([values for _, values in states])

    def get_seq_length(self) -> int:
        """Count the tokens seen, those included that a window has left behind."""
        return self.parts[0].layer.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens attention sees after `query_length` more, and the position of the first of them."""
        return self.parts[0].layer.get_mask_sizes(query_length)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        for part in self.parts:
            part.layer.crop(tokens_to_remove)

    def rewind(self, length: int) -> None:
        """Hold `length` tokens again, no more than now."""
        for part in self.parts:
            part.layer.rewind(length)

    def reset(self) -> None:
        """Forget every token."""
        for part in self.parts:
            part.layer.reset()

    def activate_past_recording(self) -> None:
        """Keep what slides out of a window until the next `crop`."""
        self.record_past = True

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSplitLayer:
        other: RowSplitLayer = object.__new__(type(self))
        memo[id(self)] = other
        other.index, other.is_sliding, other.lock = self.index, self.is_sliding, threading.RLock()
        other.parts = [RowPart(part.layer.__deepcopy__(memo), part.rows) for part in self.parts]
        return other

    def to_stock(self) -> Any:
        """Make a stock cache layer with a copy of what is held."""
        stock, *others = [part.layer.to_stock() for part in self.parts]
        if stock.is_initialized and others:
            stock.keys = _concatenated([stock.keys, *(other.keys for other in others)])
            stock.values = _concatenated([stock.values, *(other.values for other in others)])
        return stock

    @synchronized
    def become_stock(self) -> None:
        """Turn this very object and its parts into stock layers with copies of what is held; the memory goes back."""
        stock, parts = self.to_stock(), self.parts
        self.__class__ = type(stock)
        self.__dict__ = stock.__dict__
        for part in parts:
            part.layer.become_stock()

    # -- what it holds

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values held, [batch, kv_heads, tokens, head_dim] each; copies of several parts."""
        held = [part.layer.views() for part in self.parts if part.layer.is_initialized]
        return _concatenated([keys for keys, _ in held]), _concatenated([values for _, values in held])

    def overwrite(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold other contents of the same shape, [batch, kv_heads, tokens, head_dim] each."""
        for part, part_keys, part_values in self._by_parts(keys, values):
            part.overwrite(part_keys, part_values)

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold [new batch, kv_heads, tokens, head_dim] for the same tokens, shared out as the old rows were."""
        stops = list(accumulate(part.rows for part in self.parts))
        counts = [b - a for a, b in pairwise([0, *(stop * keys.shape[0] // stops[-1] for stop in stops)])]
        pools = [part.layer.fixed_pool for part in self.parts]
        self._share_out(keys, values, [(pool, rows) for pool, rows in zip(pools, counts, strict=True) if rows])

    def give_up(self) -> None:
        """Hold nothing, until the next tokens bring a shape."""
        for part in self.parts:
            part.layer.give_up()

    # -- inside

    def _expect(self, batch: int) -> None:
        """Prepare for a batch of so many rows: an empty layer takes any. Raises `ConfigError`."""
        if not self.get_seq_length() and batch != sum(part.rows for part in self.parts):
            self.parts = [RowPart(self._empty_part(None), batch)]
        self._require_rows(batch)

    def _require_rows(self, batch: int) -> None:
        rows = sum(part.rows for part in self.parts)
        if batch != rows:
            raise ConfigError(
                f"the cache holds {self.get_seq_length()} tokens for {rows} rows, and was given {batch}; a cache "
                "belongs to one batch: build a new one, or reset() this one"
            )

    def _empty_part(self, pool: KVPool | None) -> ElasticLayer:
        """Return the part in a pool if there is one, else a new one."""
        present = (part.layer for part in self.parts if part.layer.fixed_pool is pool)
        return next(present, None) or self.parts[0].layer.like(pool)

    def _by_parts(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> list[tuple[ElasticLayer, torch.Tensor, torch.Tensor]]:
        """Cut [batch, kv_heads, tokens, head_dim] each into the rows of each part, on its device."""
        cuts = pairwise(accumulate((part.rows for part in self.parts), initial=0))
        return [
            (part.layer, _on_device_of(part.layer, keys[a:b]), _on_device_of(part.layer, values[a:b]))
            for part, (a, b) in zip(self.parts, cuts, strict=True)
        ]

    def _share_out(self, keys: torch.Tensor, values: torch.Tensor, shape: Sequence[tuple[KVPool | None, int]]) -> None:
        """Hold these rows for the same tokens in new parts, all or none."""
        parts: list[RowPart] = []
        first, start = self.parts[0].layer, 0
        try:
            for pool, rows in shape:
                layer, cut = first.like(pool), slice(start, start + rows)
                parts.append(RowPart(layer, rows))
                layer.hold_as(first, _on_device_of(layer, keys[cut]), _on_device_of(layer, values[cut]))
                start += rows
        except BaseException:
            for part in parts:
                part.layer.give_up()
            raise
        old, self.parts = self.parts, parts
        for part in old:
            part.layer.give_up()


def _on_device_of(part: ElasticLayer, rows: torch.Tensor) -> torch.Tensor:
    return rows if part.fixed_pool is None else to_device(rows, part.fixed_pool.device)


def _concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate parts [rows, ...] along the rows, on the device of the first."""
    return parts[0] if len(parts) == 1 else torch.cat([to_device(part, parts[0].device) for part in parts])
