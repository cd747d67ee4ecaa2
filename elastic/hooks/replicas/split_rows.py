"""What of a decoder layer's inputs and outputs belongs to which rows of the batch: a table by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic.errors import StateError
from elastic.hooks.interceptor import Args, Kwargs

Take = Callable[[torch.Tensor, slice, int], torch.Tensor | None]
"""The rows of a tensor, given the batch; None: it is not of the shape that is known."""


def _axis(axis: int, tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """The rows lie along this axis; of length 1 it stands for all of them."""
    if tensor.shape[axis] == batch:
        return tensor[(slice(None),) * axis + (rows,)]
    return tensor if tensor.shape[axis] == 1 else None


def _mask(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """[batch or 1, tokens], or [batch or 1, heads or 1, new tokens, tokens]"""
    return _axis(0, tensor, rows, batch) if tensor.ndim in (2, 4) else None


def _positions(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """[batch or 1, tokens], or with an axis before it for each kind of position."""
    return _axis(tensor.ndim - 2, tensor, rows, batch) if tensor.ndim in (2, 3) else None


def _rotary(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """[batch or 1, tokens, dim], or with an axis before it for each kind of position."""
    return _axis(tensor.ndim - 3, tensor, rows, batch) if tensor.ndim in (3, 4) else None


def _hidden(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """[batch, tokens, hidden]"""
    return tensor[rows] if tensor.ndim == 3 else None


def _by_heads(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """[batch * heads, 1, tokens]"""
    heads, rest = divmod(tensor.shape[0], batch)
    return None if rest or tensor.ndim != 3 else tensor[rows.start * heads : rows.stop * heads]


def _whole(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor:
    """The same for every row."""
    return tensor


HIDDEN = "hidden_states"
CACHES = ("past_key_values", "past_key_value", "layer_past")
TABLE: dict[str, Take] = {
    HIDDEN: _hidden,
    "attention_mask": _mask,
    "position_ids": _positions,
    "position_embeddings": _rotary,
    "position_embeddings_global": _rotary,
    "position_embeddings_local": _rotary,
    "alibi": _by_heads,
    "cache_position": _whole,
}
PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class SplitSpec:
    """How to find what of a layer's inputs belongs to a part of the batch."""

    axis: int
    """Of hidden states [batch, tokens, hidden]: the one that is shared out."""
    table: Mapping[str, Take]
    caches: Collection[str]
    """Names of KV caches: each part has its own."""
    whole: Collection[str] = ()
    """Names of what goes to every part as it is."""


BY_ROWS = SplitSpec(0, TABLE, CACHES)


class NotSplittable(Exception):
    """An input of which it is not known what of it belongs to which rows."""


class BatchSlice:
    """Some rows of a batch, or what another reading has for rows, for a device.

    What several layers are given alike is taken once.
    """

    def __init__(self, start: int, stop: int, batch: int, device: torch.device, reading: SplitSpec = BY_ROWS) -> None:
        self.reading = reading
        self.slice = slice(start, stop)
        self.count = stop - start
        self.batch = batch
        self.fresh = False
        """Whether anything was taken since this was last set to False."""
        self._device = device
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id -> the tensor, which so lives, and its rows

    def take(self, tensor: torch.Tensor, name: str = HIDDEN) -> torch.Tensor:
        """Raises `NotSplittable`."""
        if id(tensor) not in self._taken:
            rows = self.reading.table[name](tensor, self.slice, self.batch)
            if rows is None:
                raise _not_by_rows(name, tensor)
            self._taken[id(tensor)] = tensor, rows.to(self._device, non_blocking=True)
            self.fresh = True
        return self._taken[id(tensor)][1]


class LayerInputs:
    """The inputs of one call of a layer, by name."""

    def __init__(self, names: Sequence[str], args: Args, kwargs: Kwargs) -> None:
        self._named = {**dict(zip(names, args, strict=False)), **kwargs}
        self._positional = tuple(names[: len(args)])
        self._more = len(args) > len(names)

    @property
    def hidden(self) -> Any:
        return self._named.get(HIDDEN)

    @property
    def cache(self) -> Any:
        return self.first(CACHES)

    def first(self, names: Collection[str]) -> Any:
        """The first input of these names that is there, if any."""
        return next((self._named[name] for name in names if self._named.get(name) is not None), None)

    def take(self, rows: BatchSlice, cache: Any) -> LayerInputs:
        """The same call for some rows, with another cache; hidden states as they are. Raises `NotSplittable`."""
        if self._more:
            raise NotSplittable("more positional arguments than its forward method names")
        taken = LayerInputs((), (), {})
        taken._positional = self._positional
        taken._named = {
            name: cache if name in rows.reading.caches and value is not None else _take(name, value, rows)
            for name, value in self._named.items()
        }
        return taken

    def call(self, hidden: torch.Tensor) -> tuple[Args, Kwargs]:
        """What the layer is called with, and these hidden states."""
        named = {**self._named, HIDDEN: hidden}
        args = tuple(named.pop(name) for name in self._positional)
        return args, named


def parameter_names(layer: nn.Module) -> list[str]:
    """Of a layer's forward method, in their order."""
    parameters = inspect.signature(type(layer).forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]


def gather(parts: Sequence[Any], counts: Sequence[int], device: torch.device, axis: int = 0) -> Any:
    """One output of the outputs for some rows each: tensors by rows are put together, of all else the first is taken.

    `axis` is the one of the rows, or of what was shared out for them. Raises `StateError` if hidden states are not by
    rows.
    """
    if [hidden_of(part).shape[axis] for part in parts] != list(counts):
        raise StateError(f"a layer returned {hidden_of(parts[0]).shape[axis]} rows of {counts[0]}; evict its replicas")
    return _gather(parts, counts, device, axis)


def _gather(parts: Sequence[Any], counts: Sequence[int], device: torch.device, axis: int) -> Any:
    first = parts[0]
    if isinstance(first, tuple | list):
        return type(first)(_gather(same, counts, device, axis) for same in zip(*parts, strict=True))
    by_rows = [(count,) for count in counts]
    if not isinstance(first, torch.Tensor) or [part.shape[axis : axis + 1] for part in parts] != by_rows:
        return first
    return torch.cat([part.to(device) for part in parts], axis)


def hidden_of(output: Any) -> torch.Tensor:
    """What the next layer gets."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden


def _take(name: str, value: Any, rows: BatchSlice) -> Any:
    if isinstance(value, PLAIN) or name == HIDDEN or name in rows.reading.whole:
        return value
    if isinstance(value, tuple):
        return tuple(_take(name, one, rows) for one in value)
    if name in rows.reading.table and isinstance(value, torch.Tensor) and value.ndim:
        return rows.take(value, name)
    raise _not_by_rows(name, value)


def _not_by_rows(name: str, value: Any) -> NotSplittable:
    kind = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    return NotSplittable(f"{name}, {kind}")
