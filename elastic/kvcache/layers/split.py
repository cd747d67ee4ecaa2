"""A cache layer whose rows lie at several places: each part is computed where it lies, and they are one to others."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from elastic.errors import ConfigError, StateError
from elastic.kvcache.layers.full import ElasticLayer
from elastic.kvcache.storage.pool import KVPool

Shape = tuple[tuple[KVPool | None, int], ...]
"""Of each part its pool and rows, in the order of the rows. None: the pool of the decoder layer's KV cache."""


@dataclass
class RowPart:
    """Consecutive rows of the batch."""

    layer: ElasticLayer
    rows: int
    """0: as many as come first."""


class RowSplitLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of every row, [batch, kv_heads, tokens, head_dim], in parts.

    Between forward passes all parts hold the same tokens. `keys`, `values` and what `update` returns are copies where
    there are several parts.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, whole: ElasticLayer) -> None:
        # The base class would set `keys` and `values`, which are computed here.
        self.index = whole.index
        self.is_sliding = whole.is_sliding
        keys = whole.keys if whole.get_seq_length() else None
        self.parts = [RowPart(whole, keys.shape[0] if keys is not None else 0)]

    # -- the parts

    @property
    def shape(self) -> Shape | None:
        """None: nothing is held."""
        return tuple((part.layer.fixed_pool, part.rows) for part in self.parts) if self.get_seq_length() else None

    def resplit(self, shape: Sequence[tuple[KVPool | None, int]]) -> None:
        """Have so many rows in each pool; those held move. Raises `CapacityError`, with the layer as it was."""
        wanted = tuple((pool, rows) for pool, rows in shape if rows)
        if self.shape == wanted:
            return
        if not self.get_seq_length():
            self.parts = [RowPart(self._empty(pool), rows) for pool, rows in wanted or ((None, 0),)]
            return
        self._require_rows(sum(rows for _, rows in wanted))
        self._share_out(*self._gathered(), wanted)

    def part(self, pool: KVPool | None) -> ElasticLayer:
        """The part in a pool."""
        return next(part.layer for part in self.parts if part.layer.fixed_pool is pool)

    def whole(self) -> ElasticLayer | None:
        """The one part at home that has all rows; None: there are others."""
        return self.parts[0].layer if len(self.parts) == 1 and self.parts[0].layer.fixed_pool is None else None

    # -- what a cache layer does

    @property
    def is_initialized(self) -> bool:
        return self._first.is_initialized

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def keys(self) -> torch.Tensor | None:
        return self._gathered()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        return self._gathered()[1] if self.is_initialized else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._expect(key_states.shape[0])
        for part, keys, values in self._by_parts(key_states, value_states):
            part.lazy_initialization(keys, values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, kv_heads, new, head_dim]` for all rows; returns what attention must see.

        Raises `CapacityError` with the layer as it was.
        """
        self._expect(key_states.shape[0])
        before, seen = self.get_seq_length(), []
        try:
            for part, keys, values in self._by_parts(key_states, value_states):
                seen.append(part.update(keys, values, *args, **kwargs))
        except BaseException:
            self.rewind(before)
            raise
        return self._joined([keys for keys, _ in seen]), self._joined([values for _, values in seen])

    def get_seq_length(self) -> int:
        return self._first.get_seq_length()

    def get_max_length(self) -> int:
        return self._first.get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._first.get_mask_sizes(query_length)

    def crop(self, tokens_to_remove: int) -> None:
        for part in self.parts:
            part.layer.crop(tokens_to_remove)

    def rewind(self, length: int) -> None:
        """Hold `length` tokens again, no more than now."""
        for part in self.parts:
            part.layer.rewind(length)

    def reset(self) -> None:
        for part in self.parts:
            part.layer.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue what row `beam_idx[i]` held."""
        if not self.get_seq_length():
            return
        keys, values = (rows.index_select(0, beam_idx.to(rows.device)) for rows in self._gathered())
        for part, its_keys, its_values in self._by_parts(keys, values):
            part.overwrite(its_keys, its_values)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.get_seq_length():
            self._renew(*(rows.repeat_interleave(repeats, dim=0) for rows in self._gathered()))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some rows."""
        if self.get_seq_length():
            self._renew(*(rows[indices.to(rows.device), ...] for rows in self._gathered()))

    def offload(self) -> None:
        raise StateError(
            "an elastic cache layer moves with rt.kv, not with offload(); build a stock cache to offload it"
        )

    def prefetch(self) -> None:
        """Nothing to do: the layer is where it is computed."""

    # -- what a sliding window does otherwise

    @property
    def sliding_window(self) -> int:
        window: int = self._first.sliding_window
        return window

    @property
    def cumulative_length(self) -> int:
        return self.get_seq_length()

    @property
    def record_past(self) -> bool:
        return getattr(self._first, "record_past", False)

    def activate_past_recording(self) -> None:
        """Keep what slides out of a window until the next `crop`."""
        for part in self.parts:
            getattr(part.layer, "activate_past_recording", lambda: None)()

    # -- copies

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tokens={self.get_seq_length()}, rows={[part.rows for part in self.parts]})"

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSplitLayer:
        other: RowSplitLayer = object.__new__(type(self))
        memo[id(self)] = other
        other.index, other.is_sliding = self.index, self.is_sliding
        other.parts = [RowPart(part.layer.__deepcopy__(memo), part.rows) for part in self.parts]
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        stock = self.to_stock()
        return copyreg._reconstructor, (type(stock), object, None), stock.__dict__  # type: ignore[attr-defined]

    def to_stock(self) -> Any:
        """A stock cache layer with a copy of what is held."""
        stocks = [part.layer.to_stock() for part in self.parts]
        stock = stocks[0]
        if stock.is_initialized and len(stocks) > 1:
            stock.keys = torch.cat([each.keys.to(stock.device) for each in stocks])
            stock.values = torch.cat([each.values.to(stock.device) for each in stocks])
        return stock

    def give_up(self) -> None:
        """Hold nothing, until the next tokens bring a shape."""
        for part in self.parts:
            part.layer.give_up()

    def become_stock(self) -> None:
        """Turn this very object into a stock layer with a copy of what is held; its memory goes back."""
        stock, parts = self.to_stock(), self.parts
        self.__class__ = type(stock)
        self.__dict__ = stock.__dict__
        for part in parts:
            part.layer.become_stock()

    # -- inside

    @property
    def _first(self) -> ElasticLayer:
        return self.parts[0].layer

    def _expect(self, batch: int) -> None:
        """A batch of so many rows comes: an empty layer takes any."""
        if not self.get_seq_length() and batch != sum(part.rows for part in self.parts):
            self.parts = [RowPart(self._empty(None), batch)]
        self._require_rows(batch)

    def _require_rows(self, batch: int) -> None:
        held = sum(part.rows for part in self.parts)
        if batch != held:
            raise ConfigError(
                f"the cache holds {self.get_seq_length()} tokens for {held} rows, and was given {batch}; a cache "
                "belongs to one batch: build a new one, or reset() this one"
            )

    def _empty(self, pool: KVPool | None) -> ElasticLayer:
        """The part in a pool if it is there, else a new one."""
        known = (part.layer for part in self.parts if part.layer.fixed_pool is pool)
        return next(known, None) or self._first.like(pool)

    def _by_parts(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> list[tuple[ElasticLayer, torch.Tensor, torch.Tensor]]:
        cuts = pairwise(accumulate((part.rows for part in self.parts), initial=0))
        return [
            (part.layer, _brought(keys[a:b], part.layer), _brought(values[a:b], part.layer))
            for part, (a, b) in zip(self.parts, cuts, strict=True)
        ]

    def _gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            [rows for part in self.parts if (rows := getattr(part.layer, name)) is not None]
            for name in ("keys", "values")
        )
        return self._joined(keys), self._joined(values)

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device) for part in parts])

    def _renew(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold other rows for the same tokens, as many of them in each part as there are of the old."""
        before, after = sum(part.rows for part in self.parts), keys.shape[0]
        stops = [stop * after // before for stop in accumulate(part.rows for part in self.parts)]
        counts = [b - a for a, b in pairwise([0, *stops])]
        pools = [part.layer.fixed_pool for part in self.parts]
        self._share_out(keys, values, [(pool, rows) for pool, rows in zip(pools, counts, strict=True) if rows])

    def _share_out(self, keys: torch.Tensor, values: torch.Tensor, shape: Sequence[tuple[KVPool | None, int]]) -> None:
        """Hold these rows for the same tokens in new parts, all or none."""
        made: list[RowPart] = []
        try:
            start = 0
            for pool, rows in shape:
                made.append(RowPart(self._first.like(pool), rows))
                its = (_brought(each[start : start + rows], made[-1].layer) for each in (keys, values))
                made[-1].layer.hold_as(self._first, *its)
                start += rows
        except BaseException:
            for part in made:
                part.layer.give_up()
            raise
        old, self.parts = self.parts, made
        for part in old:
            part.layer.give_up()


def _brought(rows: torch.Tensor, part: ElasticLayer) -> torch.Tensor:
    """On the device of the part."""
    return rows if part.fixed_pool is None else rows.to(part.fixed_pool.pool.backend.device)
