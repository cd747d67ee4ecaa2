"""Cache layers for Hugging Face models, over virtual memory: appended in place, read as views of the tokens held."""

from __future__ import annotations

import copyreg
import threading
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from elastic.errors import ConfigError, StateError
from elastic.kvcache.alone import alone
from elastic.kvcache.lease import Held, HostCopy, LayerMemory, Lease
from elastic.kvcache.pool import KVPool
from elastic.kvcache.visits import to_device


class ElasticLayer(CacheLayerMixin):  # type: ignore[misc]
    """Full attention: keys and values of every token, [batch, kv_heads, tokens, head_dim].

    `keys` and `values` are views of the memory itself: what is appended, cropped or reordered later shows in them.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, memory: LayerMemory, index: int | None = None) -> None:
        # The base class would set `keys` and `values`, which are computed here.
        self._memory = memory
        self.index = index
        """Of the decoder layer; None: of no known one."""
        self.pinned: KVPool | None = None
        """The pool of a part that does not follow its decoder layer's KV cache; None: it does."""
        self._lease: Lease | None = None
        self._first = self._length = 0  # tokens [first, length) are held
        self._origin = 0  # the token at the beginning of the store
        self._host: tuple[torch.Tensor, torch.Tensor] | None = None  # the contents, while they wait in host memory
        self.born: int | None = None
        """The KV limit's revision when what is held was begun: what a later shrink must not forbid."""
        self.lock = threading.RLock()
        """Held while the contents change, or move."""
        self.stamp = 0
        """When the contents changed last, on the clock of the memory."""
        self.epoch = 0
        """When they changed last otherwise than by tokens at the end: what was copied before is void."""
        self.is_initialized = False
        self.dtype: torch.dtype
        self.device: torch.device

    @property
    def keys(self) -> torch.Tensor | None:
        return self._held()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        return self._held()[1] if self.is_initialized else None

    @alone
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.born = None
        self._lease = self._memory.lease(key_states.shape, value_states.shape, key_states.shape[2], self)
        self.is_initialized = True
        self._changed()

    @alone
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, kv_heads, new, head_dim]`; returns views of what attention must see.

        Where the cache is on another device, attention goes there; one that cannot gets copies. Raises `CapacityError`
        with the cache as it was.
        """
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise StateError(
                "the elastic KV cache is written in place and cannot be differentiated; run under torch.no_grad(), "
                "or pass use_cache=False"
            )
        self._fit_to(key_states, value_states)
        stop = self._length + key_states.shape[2]
        if stop - self._origin > self._resident().max_tokens:
            self._move(stop)
        read = self._visible_from()
        views = self._resident().write(
            key_states, value_states, self._keep_from(read) - self._origin, read - self._origin, stop - self._origin
        )
        self._length = stop
        self._first = self._keep_from(read)
        self.stamp = self._memory.tick()
        self.device = key_states.device
        if views[0].device == self.device or self._memory.attention_follows():
            return views
        return to_device(views[0], self.device), to_device(views[1], self.device)

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The length of what attention sees after `query_length` more tokens, and the position of its first token."""
        first = self._visible_from()
        return self._length - first + query_length, first

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; their pages stay mapped until somebody needs them."""
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        self.rewind(max(self._first, self._length + tokens_to_remove))

    @alone
    def rewind(self, length: int) -> None:
        """Hold `length` tokens again, no more than now."""
        if length < self._length:
            lease = self._resident()
            self._length = length
            self._changed()
            lease.narrow(self._first - self._origin, length - self._origin)

    @alone
    def reset(self) -> None:
        """Forget every token. The pages stay for what comes next, unless the window has left the beginning behind."""
        if self._lease is not None and not self._first:
            self._lease.narrow(0, 0)
        else:
            self.give_up()
        self._first = self._length = self._origin = 0
        self._changed()

    @alone
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue what row `beam_idx[i]` held."""
        if not self._length:
            return
        for rows in self._held():
            rows.copy_(rows.index_select(0, beam_idx.to(rows.device)))
        self._changed()

    @alone
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self._length:
            self._replace(*(rows.repeat_interleave(repeats, dim=0) for rows in self._held()))

    @alone
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only some rows."""
        if self._length:
            self._replace(*(rows[indices.to(rows.device), ...] for rows in self._held()))

    def offload(self) -> None:
        raise StateError(
            "an elastic cache layer moves with rt.kv, not with offload(); build a stock cache to offload it"
        )

    def prefetch(self) -> None:
        """Nothing to do: the layer is where it is computed."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tokens={self._length})"

    @alone
    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticLayer:
        other = self.like(self.pinned)
        memo[id(self)] = other
        if self.is_initialized:
            other.hold_as(self, *self._held())
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        stock = self.to_stock()
        return copyreg._reconstructor, (type(stock), object, None), stock.__dict__  # type: ignore[attr-defined]

    @alone
    def to_stock(self) -> DynamicLayer:
        """A stock cache layer with a copy of what is held."""
        stock = DynamicLayer()
        if self.is_initialized:
            keys, values = self._copies(self._first)
            stock.lazy_initialization(keys, values)
            stock.keys, stock.values = keys, values
        return stock

    @alone
    def become_stock(self) -> None:
        """Turn this very object into a stock layer with a copy of what is held; its memory goes back."""
        stock, lease = self.to_stock(), self._lease
        self.__class__ = type(stock)
        self.__dict__ = stock.__dict__
        if lease is not None:
            lease.end()

    # -- to another place, to host memory and back

    @alone
    def held(self) -> Held | None:
        """Where the contents lie now; None if not in pages."""
        if self._lease is None:
            return None
        return Held(self._lease, self._origin, self._first, self._length, self.epoch)

    @alone
    def exchange(self, lease: Lease, origin: int) -> None:
        """Hold the same tokens in another lease, which has them all; the present one goes on."""
        self._lease, self._origin = lease, origin

    # -- as a part of a split layer

    def like(self, pinned: KVPool | None) -> ElasticLayer:
        """An empty layer of the same kind, in this pool whatever becomes of the decoder layer; None: where that is."""
        other = self._like()
        other.pinned = pinned
        return other

    @alone
    def hold_as(self, other: ElasticLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these rows for the tokens that another layer holds. Raises `CapacityError`; nothing is held then."""
        self.dtype, self.device = keys.dtype, keys.device
        if self.pinned is other.pinned:
            self.born = other._resident().store.born
        self._first, self._length = other._first, other._length
        self._place(keys, values, tokens=keys.shape[2])
        self.is_initialized = True

    @alone
    def overwrite(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold other contents of the same shape."""
        for held, rows in zip(self._held(), (keys, values), strict=True):
            held.copy_(rows)
        self._changed()

    def give_up_pages(self) -> None:
        """Have no pages, if they hold nothing."""
        if self._lease is not None and not self._length:
            self.give_up()

    @alone
    def give_up(self) -> None:
        """Hold nothing, in pages or on the host, until the next tokens bring a shape."""
        lease, self._lease, self._host, self.is_initialized = self._lease, None, None, False
        self._changed()
        if lease is not None:
            lease.end()

    def copy_to_host(self) -> HostCopy | None:
        """A copy of what is held, in host memory (page-locked beside a GPU); None if there is nothing to copy."""
        if self._lease is None or not self._length:
            return None
        stamp = self.stamp
        self._lease.store.settle()
        pinned = self.device.type == "cuda"
        copies = [torch.empty(rows.shape, dtype=rows.dtype, pin_memory=pinned).copy_(rows) for rows in self._held()]
        return HostCopy(self, stamp, *copies)

    @property
    def pages(self) -> int:
        """Pages mapped for this layer."""
        return self._lease.store.pages if self._lease is not None else 0

    def is_on(self, pool: KVPool) -> bool:
        """Whether the contents lie in pages of this pool."""
        return self._lease is not None and self._lease.pool is pool

    @alone
    def move_to_host(self, copy: HostCopy) -> bool:
        """Hold the copy instead of pages, until the next use. False, and no change, if the contents have moved on."""
        if self._lease is None or self.stamp != copy.stamp:
            return False
        lease, self._lease, self._host = self._lease, None, (copy.keys, copy.values)
        self.born = lease.store.born
        lease.end()
        return True

    def _resident(self) -> Lease:
        """The lease, after fetching back what waits in host memory. Raises `CapacityError`; the copy is kept then."""
        if self._host is not None:
            self._place(*self._host, tokens=self._host[0].shape[2])
            self._host = None
        assert self._lease is not None
        return self._lease

    # -- what a sliding window does otherwise

    def _visible_from(self) -> int:
        """The first token that the next query attends to."""
        return 0

    def _keep_from(self, visible_from: int) -> int:
        """The first token to hold once the queries that see from `visible_from` on are in."""
        return 0

    def _like(self) -> ElasticLayer:
        return type(self)(self._memory, self.index)

    # -- inside

    def _changed(self) -> None:
        self.epoch = self.stamp = self._memory.tick()

    @alone
    def _held(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._resident().views(self._first - self._origin, self._length - self._origin)

    @alone
    def _copies(self, start: int) -> list[torch.Tensor]:
        """Keys and values from token `start` on, in ordinary memory of the layer's device."""
        held = self._host or self._held()
        return [rows[:, :, start - self._first :].to(self.device, copy=True) for rows in held]

    def _fit_to(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Check that what is to be appended continues what is held; an empty layer takes any new shape."""
        if keys.shape[:3] != values.shape[:3]:
            raise ConfigError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in batch, heads or tokens"
            )
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            return
        lease = self._resident()
        expected = tuple((g.batch, g.heads, g.dim, g.dtype) for g in lease.store.geometries)
        given = tuple((t.shape[0], t.shape[1], t.shape[3], t.dtype) for t in (keys, values))
        if expected == given:
            return
        if self._length:
            raise ConfigError(
                f"the cache holds {self._length} tokens for (batch, heads, dim, dtype) {expected}, and was given "
                f"{given}; a cache belongs to one batch: build a new one, or reset() this one"
            )
        self.give_up()
        self.lazy_initialization(keys, values)

    def _move(self, stop: int) -> None:
        """Move to a store with address space up to token `stop`."""
        self._place(*self._held(), tokens=stop - self._first)

    def _replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold other rows for the same tokens."""
        self._place(keys, values, tokens=keys.shape[2])

    def _place(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        """Hold these keys and values, from the first token on, in a new store with room for `tokens`."""
        old = self._lease
        lease = self._memory.lease(keys.shape, values.shape, tokens, self)
        try:
            lease.write(keys, values, 0, 0, keys.shape[2])
        except BaseException:
            lease.end()
            raise
        self._lease, self._origin = lease, self._first
        self._changed()
        if old is not None:
            old.end()
