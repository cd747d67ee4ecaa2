"""Cache layers for Hugging Face models, over virtual memory: appended in place, read as views of the tokens held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from elastic.errors import ConfigError, StateError
from elastic.kvcache.layers.base import PagedLayer
from elastic.kvcache.layers.synchronized import synchronized
from elastic.kvcache.storage.pool import KVPool, StoreLease
from elastic.memory.backends.peers import host_buffer, reachable
from elastic.memory.backends.streams import on_stream
from elastic.memory.copy_engine import to_device
from elastic.weights.proxy.compilation import refuse_compilation


class LayerMemory(Protocol):
    """Where a cache layer gets its memory from."""

    clock: Iterator[int]
    """Numbers that rise, for all layers of a model."""
    attention_follows: Callable[[], bool]
    """Whether attention takes keys and values that are on another device than its queries."""

    def lease(self, keys: torch.Tensor, values: torch.Tensor, tokens: int, user: ElasticLayer) -> StoreLease:
        """Lease a store for keys and values such as these, [batch, heads, …, dim], for a layer that has a device."""


@dataclass(frozen=True)
class HeldTokens:
    """The tokens [first, length) that a cache layer holds in pages at one moment."""

    lease: StoreLease
    origin: int
    """The token at the beginning of the store."""
    first: int
    length: int
    epoch: int


@dataclass(frozen=True)
class OffloadedTokens:
    """Copies in host memory of what a layer held at one moment, [batch, kv_heads, tokens, head_dim] each."""

    layer: ElasticLayer
    last_used: int
    keys: torch.Tensor
    values: torch.Tensor


class ElasticLayer(PagedLayer):
    """Keys and values of every token, or of the last ones, [batch, kv_heads, tokens, head_dim].

    `keys` and `values` are views of the memory itself: what is appended, cropped or reordered later shows in them.
    With a `sliding_window` queries attend to so many tokens, and pages behind the window go back as it slides on. While
    past is recorded (assisted decoding), nothing is given back before `crop` says what was accepted.
    """

    def __init__(
        self,
        memory: LayerMemory,
        index: int | None = None,
        fixed_pool: KVPool | None = None,
        *,
        sliding_window: int | None = None,
        record_past: bool = False,
    ) -> None:
        # The base class would set `keys` and `values`, which are computed here.
        self._memory = memory
        self.index = index
        """Of the decoder layer; None: of no known one."""
        self.fixed_pool = fixed_pool
        """The pool of a part that does not follow its decoder layer's KV cache; None: it does."""
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = record_past
        """Whether tokens are kept that no query attends to any more."""
        self._lease: StoreLease | None = None
        self.cumulative_length = 0
        """Tokens seen, those included that a window has left behind; transformers reads it under this name."""
        self._first = 0  # tokens before this one are not held
        self._origin = 0  # the token at the beginning of the store
        self._host: tuple[torch.Tensor, torch.Tensor] | None = None  # the contents, while they are in host memory
        self.limit_epoch: int | None = None
        """The KV limit's revision when what is held was begun: what a later shrink must not forbid."""
        self.lock = threading.RLock()
        self.last_used = 0
        """When the contents changed last, on the clock of the memory."""
        self.content_epoch = 0
        """When they changed last otherwise than by tokens at the end: what was copied before is void."""
        self.is_initialized = False
        self.dtype: torch.dtype
        self.device: torch.device

    # -- what a cache layer of transformers does

    @synchronized
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Lease memory for states such as these, [batch, kv_heads, tokens, head_dim]. Raises `CapacityError`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.limit_epoch = None
        self._lease = self._memory.lease(key_states, value_states, key_states.shape[2], self)
        self.is_initialized = True
        self._changed()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, kv_heads, new, head_dim]; return views [batch, kv_heads, seen, head_dim] for attention.

        Where the cache is on another device, attention goes there; one that cannot gets copies. Raises `CapacityError`
        with the cache as it was, `ConfigError` for states that do not continue it.
        """
        if torch.compiler.is_compiling():
            refuse_compilation()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise StateError(
                "the elastic KV cache is written in place and cannot be differentiated; run under torch.no_grad(), "
                "or pass use_cache=False"
            )
        with self.lock:  # itself, as every layer of every step comes here
            lease = self._lease_for(key_states, value_states)
            stop = self.cumulative_length + key_states.shape[2]
            if stop - self._origin > lease.max_tokens:
                lease = self.replace(*self.views(), room=stop - self._first)
            read, origin = self._visible_from(), self._origin
            keep = self._first if self.record_past else read
            keys, values = lease.write(key_states, value_states, keep - origin, read - origin, stop - origin)
            self._first, self.cumulative_length = keep, stop
            self.last_used = next(self._memory.clock)
            self.device = key_states.device
            if keys.device == self.device or self._memory.attention_follows():
                return keys, values
            return to_device(keys, self.device), to_device(values, self.device)

    def get_seq_length(self) -> int:
        """Count the tokens seen, those included that a window has left behind."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens attention sees after `query_length` more, and the position of the first of them."""
        first = self._visible_from()
        return self.cumulative_length - first + query_length, first

    @synchronized
    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; their pages stay mapped until somebody needs them.

        Raises `StateError` where the window had lost those before. That is also where a crop before it has given them
        up, with no tokens between the two, or where they went before the past was recorded.
        """
        if self.sliding_window is not None:
            self._require_uncropped(tokens_to_remove, self.sliding_window)
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        self.rewind(max(self._first, self.cumulative_length + tokens_to_remove))
        if self.is_sliding and self.cumulative_length:
            first = self._visible_from()
            self._resident().hold(first - self._origin, self.cumulative_length - self._origin)
            self._first = first

    def activate_past_recording(self) -> None:
        """Keep what slides out of the window until the next `crop`."""
        self.record_past = True

    @synchronized
    def rewind(self, length: int) -> None:
        """Hold `length` tokens again, no more than now."""
        if length < self.cumulative_length:
            lease = self._resident()
            self.cumulative_length = length
            self._changed()
            lease.hold(self._first - self._origin, length - self._origin)

    @synchronized
    def reset(self) -> None:
        """Forget every token. The pages stay for what comes next, unless the window has left the beginning behind."""
        if self._lease is not None and not self._first:
            self._lease.hold(0, 0)
        else:
            self.give_up()
        self._first = self.cumulative_length = self._origin = 0
        self._changed()

    @synchronized
    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticLayer:
        other = self.like(self.fixed_pool)
        memo[id(self)] = other
        if self.is_initialized:
            other.hold_as(self, *self.views())
        return other

    @synchronized
    def to_stock(self) -> DynamicLayer | DynamicSlidingWindowLayer:
        """Make a stock cache layer with a copy of what is held, in ordinary memory of the layer's device."""
        stock = DynamicLayer()
        if self.sliding_window is not None:
            stock = DynamicSlidingWindowLayer(self.sliding_window)
            stock.record_past, stock.cumulative_length = self.record_past, self.cumulative_length
        if self.is_initialized:
            start = 0 if self.record_past else self._visible_from() - self._first
            held = (rows[:, :, start:] for rows in self._host or self.views())
            keys, values = (reachable(rows, self.device).to(self.device, copy=True) for rows in held)
            stock.lazy_initialization(keys, values)
            stock.keys, stock.values = keys, values
        return stock

    # -- what it holds

    @synchronized
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """View the keys and values held, [batch, kv_heads, tokens, head_dim] each, in the memory itself."""
        return self._resident().views(self._first - self._origin, self.cumulative_length - self._origin)

    @synchronized
    def overwrite(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold other contents of the same shape, [batch, kv_heads, tokens, head_dim] each."""
        self._changed()
        for held, rows in zip(self.views(), (keys, values), strict=True):
            held.copy_(reachable(rows, held.device))

    def replace(self, keys: torch.Tensor, values: torch.Tensor, *, room: int = 0) -> StoreLease:
        """Hold [new batch, kv_heads, tokens, head_dim] for the same tokens, in a new store with `room` for more."""
        old = self._lease
        lease = self._memory.lease(keys, values, max(room, keys.shape[2]), self)
        try:
            lease.write(keys, values, 0, 0, keys.shape[2])
        except BaseException:
            lease.end()
            raise
        self._lease, self._origin = lease, self._first
        self._changed()
        if old is not None:
            old.end()
        return lease

    @synchronized
    def give_up(self) -> None:
        """Hold nothing, in pages or on the host, until the next tokens bring a shape."""
        lease, self._lease, self._host, self.is_initialized = self._lease, None, None, False
        self._changed()
        if lease is not None:
            lease.end()

    @property
    def pages(self) -> int:
        """Pages mapped for this layer."""
        lease = self._lease  # read once: it may end in another thread
        return lease.store.pages if lease is not None else 0

    def is_on(self, pool: KVPool) -> bool:
        """Return whether the contents are in pages of this pool."""
        lease = self._lease
        return lease is not None and lease.pool is pool

    # -- to another place, to host memory and back

    @synchronized
    def held(self) -> HeldTokens | None:
        """Describe where the contents are now; None if not in pages."""
        if self._lease is None:
            return None
        return HeldTokens(self._lease, self._origin, self._first, self.cumulative_length, self.content_epoch)

    @synchronized
    def exchange(self, lease: StoreLease, origin: int) -> None:
        """Hold the same tokens in another lease, which has them all; the present one goes on."""
        self._lease, self._origin = lease, origin

    def copy_to_host(self) -> OffloadedTokens | None:
        """Copy what is held to host memory; None if there is nothing to copy."""
        with self.lock:
            if self._lease is None or not self.cumulative_length:
                return None
            last_used, stream, views = self.last_used, self._lease.store.stream, self.views()
        with on_stream(stream):
            copies = [host_buffer(rows.shape, rows.dtype, rows.device).copy_(rows) for rows in views]
        return OffloadedTokens(self, last_used, *copies)

    @synchronized
    def move_to_host(self, copy: OffloadedTokens) -> bool:
        """Hold the copy instead of pages, until the next use. False, and no change, if the contents have moved on."""
        if self._lease is None or self.last_used != copy.last_used:
            return False
        lease, self._lease, self._host = self._lease, None, (copy.keys, copy.values)
        self.limit_epoch = lease.store.limit_epoch
        lease.end()
        return True

    @synchronized
    def evict_to_host(self) -> None:
        """Hold a copy in host memory instead of pages until the next use, which leases pages anew."""
        copy = self.copy_to_host()
        if copy is None:
            self.give_up()
        else:
            self.move_to_host(copy)

    # -- as a part of a split layer

    def like(self, fixed_pool: KVPool | None) -> ElasticLayer:
        """Make an empty layer of the same kind, always in this pool; None: where the decoder layer's KV cache is."""
        window, past = self.sliding_window, self.record_past
        return ElasticLayer(self._memory, self.index, fixed_pool, sliding_window=window, record_past=past)

    @synchronized
    def hold_as(self, other: ElasticLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold [batch, kv_heads, tokens, head_dim] for the tokens that another layer holds.

        Raises `CapacityError`; nothing is held then.
        """
        self.dtype, self.device = keys.dtype, keys.device
        if self.fixed_pool is other.fixed_pool:
            self.limit_epoch = other._resident().store.limit_epoch
        self._first, self.cumulative_length = other._first, other.cumulative_length
        self.replace(keys, values)
        self.is_initialized = True

    # -- inside

    def _visible_from(self) -> int:
        """Return the first token that the next query attends to."""
        window = self.sliding_window
        return 0 if window is None else max(self._first, self.cumulative_length - window + 1)

    def _require_uncropped(self, tokens_to_remove: int, window: int) -> None:
        """Raise `StateError` where the window has lost what it would show with these tokens removed."""
        length = self.cumulative_length
        if length >= window and not self.record_past:
            raise StateError(
                f"the window of {window} tokens was passed without recording the past; call "
                "activate_past_recording() on the cache before tokens are to be cropped"
            )
        if self._first > max(0, length + tokens_to_remove - window + 1):
            raise StateError(
                f"crop({tokens_to_remove}): what is held begins at token {self._first} of {length}, and the "
                f"window of {window} needs more: an earlier crop gave it up, or it went before the past "
                "was recorded; remove all tokens in one crop, and call activate_past_recording() before they come"
            )

    def _changed(self) -> None:
        if self._lease is not None:
            self._lease.store.wait_for_reader()
        self.content_epoch = self.last_used = next(self._memory.clock)

    def _resident(self) -> StoreLease:
        """Return the lease, after fetching back what is in host memory. Raises `CapacityError`, keeping the copy."""
        if self._host is not None:
            self.replace(*self._host)
            self._host = None
        assert self._lease is not None
        return self._lease

    def _lease_for(self, keys: torch.Tensor, values: torch.Tensor) -> StoreLease:
        """Return a lease that such keys and values can be appended to; an empty layer takes any new shape."""
        if keys.shape[:3] != values.shape[:3]:
            raise ConfigError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in batch, heads or tokens"
            )
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        lease = self._resident()
        if lease.store.fits(keys, values):
            return lease
        if not self.cumulative_length:
            self.give_up()
            self.lazy_initialization(keys, values)
            return self._resident()
        expected = [(g.batch, g.heads, g.dim) for g in lease.store.geometries]
        given = [(states.shape[0], states.shape[1], states.shape[3]) for states in (keys, values)]
        if expected != given:
            raise ConfigError(
                f"the cache holds {self.cumulative_length} tokens for (batch, heads, dim) {expected}, and was given "
                f"{given}; a cache belongs to one batch: build a new one, or reset() this one"
            )
        # under autocast dtypes vary: hold what concatenating with the new ones would give
        held = self.views()
        wider = [torch.promote_types(a.dtype, b.dtype) for a, b in zip(held, (keys, values), strict=True)]
        if [rows.dtype for rows in held] != wider:
            self.replace(*(rows.to(dtype) for rows, dtype in zip(held, wider, strict=True)))
        return self._resident()
