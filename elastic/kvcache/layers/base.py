"""The base of cache layers over pages: the interface of transformers, by the few things in which the kinds differ."""

from __future__ import annotations

import copyreg
import threading
from abc import abstractmethod
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from elastic.errors import StateError
from elastic.kvcache.layers.synchronized import synchronized


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer whose `keys` and `values` are computed when they are asked for.

    Keys and values are [batch, kv_heads, tokens, head_dim], in the dtype of what was appended.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    sliding_window: int | None
    """How many tokens a query attends to, its own included; None: all."""
    lock: threading.RLock
    """Held while the contents change, or move."""

    @abstractmethod
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values held, [batch, kv_heads, tokens, head_dim] each."""

    @abstractmethod
    def overwrite(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold other contents of the same shape, [batch, kv_heads, tokens, head_dim] each."""

    @abstractmethod
    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Hold other rows for the same tokens, [new batch, kv_heads, tokens, head_dim] each, in any dtype."""

    @abstractmethod
    def to_stock(self) -> Any:
        """Make a stock cache layer with a copy of what is held."""

    @abstractmethod
    def give_up(self) -> None:
        """Hold nothing, in pages or on the host, until the next tokens bring a shape."""

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys held, [batch, kv_heads, tokens, head_dim]; None before the first tokens."""
        return self.views()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """The values held, [batch, kv_heads, tokens, head_dim]; None before the first tokens."""
        return self.views()[1] if self.is_initialized else None

    def get_max_length(self) -> int:
        """Return the size of the window; -1: there is none."""
        return -1 if self.sliding_window is None else self.sliding_window

    @synchronized
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue what row `beam_idx[i]` held. beam_idx: [batch], int64."""
        if self.get_seq_length():
            self.overwrite(*(rows.index_select(0, beam_idx.to(rows.device)) for rows in self.views()))

    @synchronized
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.get_seq_length():
            self.replace(*(rows.repeat_interleave(repeats, dim=0) for rows in self.views()))

    @synchronized
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some rows. indices: [new batch], int64, or [batch], bool."""
        if self.get_seq_length():
            self.replace(*(rows[indices.to(rows.device), ...] for rows in self.views()))

    def offload(self) -> None:
        """Refuse with a `StateError`: the layer moves with the runtime."""
        raise StateError(
            "an elastic cache layer moves with rt.kv, not with offload(); build a stock cache to offload it"
        )

    def prefetch(self) -> None:
        """Do nothing: the layer is where it is computed."""

    @synchronized
    def become_stock(self) -> None:
        """Turn this very object into a stock layer with a copy of what is held; its memory goes back."""
        stock = self.to_stock()
        self.give_up()
        self.__class__ = type(stock)
        self.__dict__ = stock.__dict__

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tokens={self.get_seq_length()})"

    def __reduce__(self) -> tuple[Any, ...]:
        stock = self.to_stock()
        return copyreg._reconstructor, (type(stock), object, None), stock.__dict__  # type: ignore[attr-defined]
