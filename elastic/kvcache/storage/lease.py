"""What lies between a cache layer and the memory it gets: leases of stores, and copies that wait in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from elastic.kvcache.storage.layer_store import LayerStore, StoreState
from elastic.kvcache.storage.pool import KVPool


class CacheUser(Protocol):
    """A cache layer, as far as its copies care."""

    def move_to_host(self, copy: OffloadedTokens) -> bool:
        """Hold the copy instead of pages. False, and no change, if the contents have moved on."""
        ...


@dataclass(frozen=True)
class OffloadedTokens:
    """What a layer held at one moment, in host memory."""

    layer: CacheUser
    stamp: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class StoreLease:
    """A store in use by one cache layer."""

    def __init__(self, pool: KVPool, store: LayerStore, max_tokens: int) -> None:
        self.pool = pool
        self.store = store
        self.max_tokens = max_tokens
        self._number = store.lease

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, keep: int, read: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values so that they end at token `stop`; returns views of the tokens [read, stop).

        Tokens before `keep` may be given back.
        """
        start = stop - keys.shape[2]
        self.pool.open_window(self.store, keep, stop)
        new_k, new_v, all_k, all_v = self.pool.views(self.store, (start, stop), (read, stop))
        new_k.copy_(keys)
        new_v.copy_(values)
        return all_k, all_v

    def narrow(self, start: int, stop: int) -> None:
        """Only the tokens [start, stop) are held from now on."""
        self.pool.open_window(self.store, start, stop)

    def views(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.pool.views(self.store, (start, stop))
        return keys, values

    def end(self) -> None:
        self.pool.release(self.store, self._number)

    def leave(self) -> int:
        """End it; returns the bytes that tensors outside still show."""
        with self.pool.lock:
            if self.store.lease != self._number:
                return 0
            self.end()
            return self.store.pages * self.pool.pool.page_bytes if self.store.state is StoreState.RETAINED else 0


@dataclass(frozen=True)
class HeldTokens:
    """What a cache layer holds in pages at one moment: the tokens [first, length)."""

    lease: StoreLease
    origin: int
    """The token at the beginning of the store."""
    first: int
    length: int
    epoch: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all rows."""
        return sum(g.batch * g.heads * g.dim * g.dtype.itemsize for g in self.lease.store.geometries)

    @property
    def nbytes(self) -> int:
        return (self.length - self.first) * self.token_bytes

    def views(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens [start, stop)."""
        return self.lease.views(start - self.origin, stop - self.origin)
