"""Cache layers for Hugging Face models, over virtual memory: appended in place, read as views of the tokens held."""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from elastic.errors import ConfigError, StateError
from elastic.kvcache.layers.synchronized import synchronized
from elastic.kvcache.storage.lease import HeldTokens, OffloadedTokens, StoreLease
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.copy_engine import to_device


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
        self.fixed_pool: KVPool | None = None
        """The pool of a part that does not follow its decoder layer's KV cache; None: it does."""
        self._lease: StoreLease | None = None
        self._first = self._length = 0  # tokens [first, length) are held
        self._origin = 0  # the token at the beginning of the store
        self._host: tuple[torch.Tensor, torch.Tensor] | None = None  # the contents, while they wait in host memory
        self.limit_epoch: int | None = None
        """The KV limit's revision when what is held was begun: what a later shrink must not forbid."""
        self.lock = threading.RLock()
        """Held while the contents change, or move."""
        self.last_used = 0
        """When the contents changed last, on the clock of the memory."""
        self.content_epoch = 0
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

    @synchronized
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.limit_epoch = None
        self._lease = self._memory.lease(key_states, value_states, key_states.shape[2], self)
        self.is_initialized = True
        self._changed()

    @synchronized
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, kv_heads, new, head_dim]`; returns views of what attention must see.

        Where the cache is on another device, attention goes there; one that cannot gets copies. Raises `CapacityError`
        with the cache as it was.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
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
        self.last_used = self._memory.tick()
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

    @synchronized
    def rewind(self, length: int) -> None:
        """Hold `length` tokens again, no more than now."""
        if length < self._length:
            lease = self._resident()
            self._length = length
            self._changed()
            lease.narrow(self._first - self._origin, length - self._origin)

    @synchronized
    def reset(self) -> None:
        """Forget every token. The pages stay for what comes next, unless the window has left the beginning behind."""
        if self._lease is not None and not self._first:
            self._lease.narrow(0, 0)
        else:
            self.give_up()
        self._first = self._length = self._origin = 0
        self._changed()

    @synchronized
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue what row `beam_idx[i]` held."""
        if not self._length:
            return
        for rows in self._held():
            rows.copy_(rows.index_select(0, beam_idx.to(rows.device)))
        self._changed()

    @synchronized
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self._length:
            self._replace(*(rows.repeat_interleave(repeats, dim=0) for rows in self._held()))

    @synchronized
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

    @synchronized
    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticLayer:
        other = self.like(self.fixed_pool)
        memo[id(self)] = other
        if self.is_initialized:
            other.hold_as(self, *self._held())
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        stock = self.to_stock()
        return copyreg._reconstructor, (type(stock), object, None), stock.__dict__  # type: ignore[attr-defined]

    @synchronized
    def to_stock(self) -> DynamicLayer:
        """A stock cache layer with a copy of what is held."""
        stock = DynamicLayer()
        if self.is_initialized:
            keys, values = self._copies(self._first)
            stock.lazy_initialization(keys, values)
            stock.keys, stock.values = keys, values
        return stock

    @synchronized
    def become_stock(self) -> None:
        """Turn this very object into a stock layer with a copy of what is held; its memory goes back."""
        stock, lease = self.to_stock(), self._lease
        self.__class__ = type(stock)
        self.__dict__ = stock.__dict__
        if lease is not None:
            lease.end()

    # -- to another place, to host memory and back

    @synchronized
    def held(self) -> HeldTokens | None:
        """Where the contents lie now; None if not in pages."""
        if self._lease is None:
            return None
        return HeldTokens(self._lease, self._origin, self._first, self._length, self.content_epoch)

    @synchronized
    def exchange(self, lease: StoreLease, origin: int) -> None:
        """Hold the same tokens in another lease, which has them all; the present one goes on."""
        self._lease, self._origin = lease, origin

    # -- as a part of a split layer

    def like(self, pinned: KVPool | None) -> ElasticLayer:
        """An empty layer of the same kind, in this pool whatever becomes of the decoder layer; None: where that is."""
        other = self._like()
        other.fixed_pool = pinned
        return other

    @synchronized
    def hold_as(self, other: ElasticLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these rows for the tokens that another layer holds. Raises `CapacityError`; nothing is held then."""
        self.dtype, self.device = keys.dtype, keys.device
        if self.fixed_pool is other.fixed_pool:
            self.limit_epoch = other._resident().store.limit_epoch
        self._first, self._length = other._first, other._length
        self._place(keys, values, tokens=keys.shape[2])
        self.is_initialized = True

    @synchronized
    def overwrite(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold other contents of the same shape."""
        for held, rows in zip(self._held(), (keys, values), strict=True):
            held.copy_(rows)
        self._changed()

    def give_up_pages(self) -> None:
        """Have no pages, if they hold nothing."""
        if self._lease is not None and not self._length:
            self.give_up()

    @synchronized
    def give_up(self) -> None:
        """Hold nothing, in pages or on the host, until the next tokens bring a shape."""
        lease, self._lease, self._host, self.is_initialized = self._lease, None, None, False
        self._changed()
        if lease is not None:
            lease.end()

    def copy_to_host(self) -> OffloadedTokens | None:
        """A copy of what is held, in host memory (page-locked beside a GPU); None if there is nothing to copy."""
        if self._lease is None or not self._length:
            return None
        stamp = self.last_used
        self._lease.store.settle()
        pinned = self.device.type == "cuda"
        copies = [torch.empty(rows.shape, dtype=rows.dtype, pin_memory=pinned).copy_(rows) for rows in self._held()]
        return OffloadedTokens(self, stamp, *copies)

    @property
    def pages(self) -> int:
        """Pages mapped for this layer."""
        return self._lease.store.pages if self._lease is not None else 0

    def is_on(self, pool: KVPool) -> bool:
        """Whether the contents lie in pages of this pool."""
        return self._lease is not None and self._lease.pool is pool

    @synchronized
    def move_to_host(self, copy: OffloadedTokens) -> bool:
        """Hold the copy instead of pages, until the next use. False, and no change, if the contents have moved on."""
        if self._lease is None or self.last_used != copy.stamp:
            return False
        lease, self._lease, self._host = self._lease, None, (copy.keys, copy.values)
        self.limit_epoch = lease.store.limit_epoch
        lease.end()
        return True

    def _resident(self) -> StoreLease:
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
        self.content_epoch = self.last_used = self._memory.tick()

    @synchronized
    def _held(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._resident().views(self._first - self._origin, self._length - self._origin)

    @synchronized
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
        geometries = self._resident().store.geometries
        dtypes, new = [g.dtype for g in geometries], [keys.dtype, values.dtype]
        expected = [(g.batch, g.heads, g.dim) for g in geometries]
        given = [(t.shape[0], t.shape[1], t.shape[3]) for t in (keys, values)]
        if expected == given and dtypes == new:
            return
        if not self._length:
            self.give_up()
            self.lazy_initialization(keys, values)
        elif expected != given:
            raise ConfigError(
                f"the cache holds {self._length} tokens for (batch, heads, dim) {expected}, and was given "
                f"{given}; a cache belongs to one batch: build a new one, or reset() this one"
            )
        else:
            self._widen([torch.promote_types(a, b) for a, b in zip(dtypes, new, strict=True)])

    def _widen(self, dtypes: Sequence[torch.dtype]) -> None:
        """Hold keys and values in these dtypes, as concatenating them with new ones would: under autocast they vary."""
        held = self._held()
        if [rows.dtype for rows in held] != list(dtypes):
            self._replace(*(rows.to(dtype) for rows, dtype in zip(held, dtypes, strict=True)))

    def _move(self, stop: int) -> None:
        """Move to a store with address space up to token `stop`."""
        self._place(*self._held(), tokens=stop - self._first)

    def _replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold other rows for the same tokens."""
        self._place(keys, values, tokens=keys.shape[2])

    def _place(self, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
        """Hold these keys and values, from the first token on, in a new store with room for `tokens`."""
        old = self._lease
        lease = self._memory.lease(keys, values, tokens, self)
        try:
            lease.write(keys, values, 0, 0, keys.shape[2])
        except BaseException:
            lease.end()
            raise
        self._lease, self._origin = lease, self._first
        self._changed()
        if old is not None:
            old.end()


class LayerMemory(Protocol):
    """Where a cache layer gets its memory from."""

    def lease(self, keys: torch.Tensor, values: torch.Tensor, tokens: int, user: ElasticLayer) -> StoreLease:
        """A store for keys and values such as these, [batch, heads, …, dim], for a layer that knows its device."""
        ...

    def tick(self) -> int:
        """A number above all earlier ones."""
        ...

    @property
    def attention_follows(self) -> Callable[[], bool]:
        """Whether attention takes keys and values that are on another device than its queries."""
        ...
