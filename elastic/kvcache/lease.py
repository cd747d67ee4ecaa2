"""What lies between a cache layer and the memory it gets: leases of stores, and copies that wait in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from elastic.kvcache.pool import KVPool
from elastic.kvcache.store import Store, StoreState

if TYPE_CHECKING:
    from elastic.kvcache.layers import ElasticLayer


class LayerMemory(Protocol):
    """Where a cache layer gets its memory from."""

    def lease(self, keys: torch.Size, values: torch.Size, tokens: int, user: ElasticLayer) -> Lease:
        """A store for keys and values of these shapes, for a layer that knows its dtype and device."""
        ...

    def tick(self) -> int:
        """A number above all earlier ones."""
        ...

    @property
    def attention_follows(self) -> Callable[[], bool]:
        """Whether attention takes keys and values that are on another device than its queries."""
        ...


@dataclass(frozen=True)
class HostCopy:
    """What a layer held at one moment, in host memory."""

    layer: ElasticLayer
    stamp: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class Lease:
    """A store in use by one cache layer."""

    def __init__(self, pool: KVPool, store: Store, max_tokens: int) -> None:
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
class Held:
    """What a cache layer holds in pages at one moment: the tokens [first, length)."""

    lease: Lease
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
