"""What of a decoder layer's inputs and outputs belongs to which rows of the batch: a table by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from elastic.hooks.detours import Args, Kwargs

Take = Callable[[torch.Tensor, slice, int], torch.Tensor | None]
"""The rows of a tensor, given the batch; None: it is not of the shape that is known."""


def _first(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """[batch or 1, …]"""
    if tensor.shape[0] == batch:
        return tensor[rows]
    return tensor if tensor.shape[0] == 1 else None


def _positions(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """[batch or 1, tokens], or with an axis before it for each kind of position."""
    return _first(tensor, rows, batch) if tensor.ndim <= 2 else _second(tensor, rows, batch)


def _rotary(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """[batch or 1, tokens, dim], or with an axis before it for each kind of position."""
    return _first(tensor, rows, batch) if tensor.ndim <= 3 else _second(tensor, rows, batch)


def _second(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    if tensor.shape[1] == batch:
        return tensor[:, rows]
    return tensor if tensor.shape[1] == 1 else None


def _by_heads(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor | None:
    """[batch * heads, 1, tokens]"""
    heads, rest = divmod(tensor.shape[0], batch)
    return None if rest else tensor[rows.start * heads : rows.stop * heads]


def _whole(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor:
    """The same for every row."""
    return tensor


HIDDEN = "hidden_states"
CACHES = ("past_key_values", "past_key_value", "layer_past")
TABLE: dict[str, Take] = {
    "attention_mask": _first,
    "position_ids": _positions,
    "position_embeddings": _rotary,
    "position_embeddings_global": _rotary,
    "position_embeddings_local": _rotary,
    "alibi": _by_heads,
    "cache_position": _whole,
}
PLAIN = (bool, int, float, str, type(None), torch.dtype)


class NotByRows(Exception):
    """An input of which it is not known what of it belongs to which rows."""


class Rows:
    """Some rows of a batch, for a device. What several layers are given alike is taken once."""

    def __init__(self, start: int, stop: int, batch: int, device: torch.device) -> None:
        self.slice = slice(start, stop)
        self.count = stop - start
        self.fresh = False
        """Whether anything was taken since this was last set to False."""
        self._batch = batch
        self._device = device
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id -> the tensor, which so lives, and its rows

    def take(self, tensor: torch.Tensor, take: Take = _first, name: str = HIDDEN) -> torch.Tensor:
        """Raises `NotByRows`."""
        if id(tensor) not in self._taken:
            rows = take(tensor, self.slice, self._batch)
            if rows is None:
                raise _not_by_rows(name, tensor)
            self._taken[id(tensor)] = tensor, rows.to(self._device, non_blocking=True)
            self.fresh = True
        return self._taken[id(tensor)][1]


class Inputs:
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
        return next((self._named[name] for name in CACHES if self._named.get(name) is not None), None)

    def take(self, rows: Rows, cache: Any) -> Inputs:
        """The same call for some rows, with another cache, and the hidden states as they are. Raises `NotByRows`."""
        if self._more:
            raise NotByRows("more positional arguments than its forward method names")
        taken = Inputs((), (), {})
        taken._positional = self._positional
        taken._named = {
            name: cache if name in CACHES and value is not None else _take(name, value, rows)
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


def gather(parts: Sequence[Any], rows: Sequence[int], device: torch.device | None = None) -> Any:
    """One output of the outputs for some rows each: tensors are put together, of all else the first is taken."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if any(part.shape[:1] != (count,) for part, count in zip(parts, rows, strict=True)):
            return first
        return torch.cat([part.to(device or first.device) for part in parts])
    if isinstance(first, tuple | list):
        return type(first)(gather(same, rows, device) for same in zip(*parts, strict=True))
    return first


def hidden_of(output: Any) -> torch.Tensor:
    """What the next layer gets."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple | list) else output
    return hidden


def _take(name: str, value: Any, rows: Rows) -> Any:
    if isinstance(value, PLAIN) or name == HIDDEN:
        return value
    if isinstance(value, tuple):
        return tuple(_take(name, one, rows) for one in value)
    if name in TABLE and isinstance(value, torch.Tensor) and value.ndim:
        return rows.take(value, TABLE[name], name)
    raise _not_by_rows(name, value)


def _not_by_rows(name: str, value: Any) -> NotByRows:
    kind = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    return NotByRows(f"{name}, {kind}")
