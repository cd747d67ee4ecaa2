"""Cache layers for Hugging Face models, over virtual memory: appended in place, read as views of the tokens held."""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from elastic.errors import ConfigError, StateError
from elastic.kvcache.lease import HostCopy, LayerMemory, Lease
from elastic.kvcache.pool import KVPool


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
        self.stamp = 0
        """When the contents changed last, on the clock of the memory."""
        self.is_initialized = False
        self.dtype: torch.dtype
        self.device: torch.device

    @property
    def keys(self) -> torch.Tensor | None:
        return self._held()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        return self._held()[1] if self.is_initialized else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.born = None
        self._lease = self._memory.lease(key_states.shape, value_states.shape, key_states.shape[2], self)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[batch, kv_heads, new, head_dim]`; returns views of what attention must see.

        Raises `CapacityError` with the cache as it was.
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
        return views

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

    def rewind(self, length: int) -> None:
        """Hold `length` tokens again, no more than now."""
        if length < self._length:
            lease = self._resident()
            self._length = length
            self.stamp = self._memory.tick()
            lease.narrow(self._first - self._origin, length - self._origin)

    def reset(self) -> None:
        """Forget every token. The pages stay for what comes next, unless the window has left the beginning behind."""
        if self._lease is not None and not self._first:
            self._lease.narrow(0, 0)
        else:
            self.give_up()
        self._first = self._length = self._origin = 0
        self.stamp = self._memory.tick()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue what row `beam_idx[i]` held."""
        if not self._length:
            return
        for rows in self._held():
            rows.copy_(rows.index_select(0, beam_idx.to(rows.device)))
        self.stamp = self._memory.tick()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self._length:
            self._replace(*(rows.repeat_interleave(repeats, dim=0) for rows in self._held()))

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

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticLayer:
        other = self.like(self.pinned)
        memo[id(self)] = other
        if self.is_initialized:
            other.hold_as(self, *self._held())
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        stock = self.to_stock()
        return copyreg._reconstructor, (type(stock), object, None), stock.__dict__  # type: ignore[attr-defined]

    def to_stock(self) -> DynamicLayer:
        """A stock cache layer with a copy of what is held."""
        stock = DynamicLayer()
        if self.is_initialized:
            keys, values = self._copies(self._first)
            stock.lazy_initialization(keys, values)
            stock.keys, stock.values = keys, values
        return stock

    def become_stock(self) -> None:
        """Turn this very object into a stock layer with a copy of what is held; its memory goes back."""
        stock, lease = self.to_stock(), self._lease
        self.__class__ = type(stock)
        self.__dict__ = stock.__dict__
        if lease is not None:
            lease.end()

    # -- as a part of a split layer

    def like(self, pinned: KVPool | None) -> ElasticLayer:
        """An empty layer of the same kind, in this pool whatever becomes of the decoder layer; None: where that is."""
        other = self._like()
        other.pinned = pinned
        return other

    def hold_as(self, other: ElasticLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold these rows for the tokens that another layer holds. Raises `CapacityError`; nothing is held then."""
        self.dtype, self.device = keys.dtype, keys.device
        if self.pinned is other.pinned:
            self.born = other._resident().store.born
        self._first, self._length = other._first, other._length
        self._place(keys, values, tokens=keys.shape[2])
        self.is_initialized = True

    def overwrite(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold other contents of the same shape."""
        for held, rows in zip(self._held(), (keys, values), strict=True):
            held.copy_(rows)
        self.stamp = self._memory.tick()

    def give_up(self) -> None:
        """Hold nothing, in pages or on the host, until the next tokens bring a shape."""
        lease, self._lease, self._host, self.is_initialized = self._lease, None, None, False
        if lease is not None:
            lease.end()

    # -- to host memory and back

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

    def _held(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._resident().views(self._first - self._origin, self._length - self._origin)

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
        self.stamp = self._memory.tick()
        if old is not None:
            old.end()


class ElasticSlidingLayer(ElasticLayer):
    """Attention to the last `sliding_window` tokens: pages behind the window go back as it slides on.

    While past is recorded (assisted decoding), nothing is given back before `crop` says what was accepted.
    """

    is_sliding = True

    def __init__(
        self, memory: LayerMemory, sliding_window: int, record_past: bool = False, index: int | None = None
    ) -> None:
        super().__init__(memory, index)
        self.sliding_window = sliding_window
        self.record_past = record_past

    @property
    def cumulative_length(self) -> int:
        return self._length

    def activate_past_recording(self) -> None:
        """Keep what slides out of the window until the next `crop`."""
        self.record_past = True

    def get_max_length(self) -> int:
        return self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        if self._length >= self.sliding_window and not self.record_past:
            raise StateError(
                f"the window of {self.sliding_window} tokens was passed without recording the past; call "
                "activate_past_recording() on the cache before tokens are to be cropped"
            )
        super().crop(tokens_to_remove)
        if self._length:
            first = self._visible_from()
            self._resident().narrow(first - self._origin, self._length - self._origin)
            self._first = first

    def to_stock(self) -> DynamicSlidingWindowLayer:
        stock = DynamicSlidingWindowLayer(self.sliding_window)
        stock.record_past = self.record_past
        if self.is_initialized:
            keys, values = self._copies(self._first if self.record_past else self._visible_from())
            stock.lazy_initialization(keys, values)
            stock.keys, stock.values, stock.cumulative_length = keys, values, self._length
        return stock

    def _visible_from(self) -> int:
        return max(self._first, self._length - self.sliding_window + 1)

    def _keep_from(self, visible_from: int) -> int:
        return self._first if self.record_past else visible_from

    def _like(self) -> ElasticLayer:
        return ElasticSlidingLayer(self._memory, self.sliding_window, self.record_past, self.index)
