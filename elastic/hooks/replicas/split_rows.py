"""The parts of a decoder layer's inputs and outputs by rows of the batch: a table by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from elastic.errors import StateError
from elastic.hooks.interceptor import Args, Kwargs
from elastic.weights.batch_context import BatchShare
from elastic.weights.decoder import CACHE_NAMES
from elastic.weights.proxy.transfer_cache import moved

Take = Callable[[torch.Tensor, slice, int], torch.Tensor | None]
"""(tensor, rows, rows of the batch) -> the tensor's part for these rows; None: it is not of a known shape."""


def _along(axes: Mapping[int, int]) -> Take:
    """Take rows along an axis, by the number of dimensions; a tensor with one row stands for all of them."""

    def take(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
        """Return the rows of a tensor of any shape with so many dimensions."""
        axis = axes.get(tensor.ndim)
        if axis is None:
            return None
        if tensor.shape[axis] == batch:
            return tensor[(slice(None),) * axis + (rows,)]
        return tensor if tensor.shape[axis] == 1 else None

    return take


def _alibi(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """Take rows of [batch * heads, 1, tokens]."""
    heads, rest = divmod(tensor.shape[0], batch)
    return None if rest or tensor.ndim != 3 else tensor[rows.start * heads : rows.stop * heads]


HIDDEN = "hidden_states"
CACHES = (*CACHE_NAMES, "past_key_value", "layer_past")
_ROTARY = _along({3: 0, 4: 1})  # [batch or 1, tokens, dim], or with an axis before it for each kind of position
TABLE: dict[str, Take] = {
    HIDDEN: _along({3: 0}),  # [batch, tokens, hidden]
    "attention_mask": _along({2: 0, 4: 0}),  # [batch or 1, tokens], [batch or 1, heads or 1, new tokens, tokens]
    "position_ids": _along({2: 0, 3: 1}),  # [batch or 1, tokens], or with an axis before it for each kind of position
    "position_embeddings": _ROTARY,
    "position_embeddings_global": _ROTARY,
    "position_embeddings_local": _ROTARY,
    "alibi": _alibi,
    "cache_position": lambda tensor, rows, batch: tensor,  # [tokens], the same for every row
}
PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class SplitSpec:
    """The rules by which a layer's inputs are split into parts of the batch."""

    axis: int
    """Of hidden states [batch, tokens, hidden]: the one that is split."""
    table: Mapping[str, Take]
    caches: Collection[str]
    """Names of KV caches: each part has its own."""


BY_ROWS = SplitSpec(0, TABLE, CACHES)


class NotSplittable(Exception):
    """An input of which it is not known what of it belongs to which rows."""


class BatchSlice(BatchShare):
    """Rows `start` to `stop` of a batch, or what another spec has for rows, for a device.

    What several layers are given alike is taken once.
    """

    def __init__(self, start: int, stop: int, batch: int, device: torch.device, spec: SplitSpec = BY_ROWS) -> None:
        super().__init__(stop - start, batch)
        self.spec = spec
        self.fresh = False
        """Whether anything was taken since this was last set to False."""
        self._slice = slice(start, stop)
        self._device = device
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id -> the tensor, which so lives, and its rows

    def take(self, tensor: torch.Tensor, name: str = HIDDEN) -> torch.Tensor:
        """Return the rows of an input on the device: of hidden states [batch, tokens, hidden], [count, tokens, hidden].

        Other inputs have the shapes in `spec.table`, by name. Raises `NotSplittable` for any other shape.
        """
        if id(tensor) not in self._taken:
            rows = self.spec.table[name](tensor, self._slice, self.batch)
            if rows is None:
                raise NotSplittable(f"{name}, a tensor of {tensor.ndim} dimensions")
            self._taken[id(tensor)] = tensor, moved(rows, self._device)
            self.fresh = True
        return self._taken[id(tensor)][1]

    def take_input(self, name: str, value: Any) -> Any:
        """Return the rows of any input but a cache; hidden states as they are. Raises `NotSplittable`."""
        if isinstance(value, PLAIN) or name == HIDDEN:
            return value
        if isinstance(value, tuple):
            return tuple(self.take_input(name, item) for item in value)
        if isinstance(value, torch.Tensor):
            if name not in self.spec.table or not value.ndim:
                raise NotSplittable(f"{name}, a tensor of {value.ndim} dimensions")
            return self.take(value, name)
        raise NotSplittable(f"{name}, a {type(value).__name__}")


class LayerInputs:
    """The inputs of one call of a layer, by name."""

    def __init__(self, names: Sequence[str], args: Args, kwargs: Kwargs) -> None:
        self._named = {**dict(zip(names, args, strict=False)), **kwargs}
        self._positional = tuple(names[: len(args)])
        self._too_many = len(args) > len(names)
        self.hidden: Any = self._named.get(HIDDEN)

    def first_of(self, names: Collection[str]) -> Any:
        """Return the first input of these names that was given, if any."""
        return next((self._named[name] for name in names if self._named.get(name) is not None), None)

    def take(self, rows: BatchSlice, cache: Any) -> LayerInputs:
        """Return the same call for some rows, with another cache; hidden states as they are. Raises `NotSplittable`."""
        if self._too_many:
            raise NotSplittable("more positional arguments than its forward method names")
        taken = copy(self)
        taken._named = {
            name: cache if name in rows.spec.caches and value is not None else rows.take_input(name, value)
            for name, value in self._named.items()
        }
        return taken

    def call(self, hidden: torch.Tensor) -> tuple[Args, Kwargs]:
        """Return the arguments to call the layer with, for hidden states [rows, tokens, hidden]."""
        named = {**self._named, HIDDEN: hidden}
        args = tuple(named.pop(name) for name in self._positional)
        return args, named


def gather(outputs: Sequence[Any], counts: Sequence[int], device: torch.device, axis: int = 0) -> Any:
    """Join one output of the outputs for some rows each: tensors by rows are joined, of all else the first is taken.

    `axis` is the one of the rows, or of what was split instead. Raises `StateError` if hidden states are not by rows.
    """
    rows = [hidden_of(output).shape[axis] for output in outputs]
    if rows != list(counts):
        raise StateError(f"a layer returned {rows[0]} rows of {counts[0]}; evict its replicas")
    return _gather(outputs, counts, device, axis)


def _gather(outputs: Sequence[Any], counts: Sequence[int], device: torch.device, axis: int) -> Any:
    first = outputs[0]
    if isinstance(first, tuple | list):
        return type(first)(_gather(same, counts, device, axis) for same in zip(*outputs, strict=True))
    by_rows = [(count,) for count in counts]
    if not isinstance(first, torch.Tensor) or [out.shape[axis : axis + 1] for out in outputs] != by_rows:
        return first
    return torch.cat([out.to(device) for out in outputs], axis)


def hidden_of(output: Any) -> torch.Tensor:
    """Return the hidden states, [rows, tokens, hidden], among what a layer returns."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden
