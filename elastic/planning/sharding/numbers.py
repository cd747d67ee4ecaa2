"""Numbers of shards of layers, or of parts of their KV caches: part p of layer l, of `of` each, is `l * of + p`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def by_layer(shards: Iterable[int], of: int) -> dict[int, tuple[int, ...]]:
    """Return the parts of each layer of which there is one, in order."""
    parts: dict[int, tuple[int, ...]] = {}
    for shard in sorted(set(shards)):
        layer, part = divmod(shard, of)
        parts[layer] = (*parts.get(layer, ()), part)
    return parts


def of_layers(layers: Iterable[int], of: int) -> tuple[int, ...]:
    """Return all shards of layers, in the order of these."""
    return tuple(layer * of + part for layer in layers for part in range(of))


def whole_layers(shards: Collection[int], of: int) -> tuple[int, ...]:
    """Return the layers of which all shards are there."""
    return tuple(layer for layer, parts in by_layer(shards, of).items() if len(parts) == of)


def shared_out(wanted: Iterable[int], have: Mapping[T, Collection[int]]) -> dict[T, tuple[int, ...]]:
    """Say whom to ask for which: each number one that has it, and all of them for about as many. Nobody has it: none.

    In order; who is asked for nothing is left out.
    """
    asked: dict[T, tuple[int, ...]] = {}
    for number in sorted(set(wanted)):
        if holders := [name for name, theirs in have.items() if number in theirs]:
            chosen = min(holders, key=lambda name: len(asked.get(name, ())))
            asked[chosen] = (*asked.get(chosen, ()), number)
    return asked
