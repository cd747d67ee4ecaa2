"""What keys and values move when an arrangement or an assignment changes: the difference of two sets, and no more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from elastic.errors import ConfigError
from elastic.planning.arrangement.arrangement import Arrangement, Assignment, Shards


@dataclass(frozen=True)
class LayerKV:
    """The keys and values of one layer."""

    heads: int
    """0: the layer has none, such as one that reads those of another."""
    head_bytes: int
    """Of one token in one head, keys and values together."""
    window: int | None = None
    """Tokens that are kept at most."""

    def bytes_per_head(self, tokens: int) -> int:
        """Return the bytes of so many tokens of one request in one head."""
        return self.head_bytes * (tokens if self.window is None else min(tokens, self.window))


@dataclass(frozen=True)
class Transfer:
    """Slices of requests x layers x heads that go from one rank to another."""

    requests: tuple[str, ...]
    layers: range
    heads: range
    frm: str
    to: str
    nbytes: int


class HeadMove(NamedTuple):
    """Heads of one layer that a rank needs and has not."""

    frm: str
    to: str
    heads: range


@lru_cache(maxsize=4096)
def kv_heads(shards: Shards, heads: int) -> tuple[range, ...]:
    """Return the heads of each shard. With more shards than heads neighbours repeat one: capacity does not grow then.

    Raises `ConfigError` where neither divides the other.
    """
    parts = len(shards)
    if not heads:
        return (range(0),) * parts
    if heads % parts and parts % heads:
        raise ConfigError(f"{heads} KV heads cannot be shared by the {parts} shards {shards}")
    each = max(1, heads // parts)
    return tuple(range(first, first + each) for first in (i * heads // parts for i in range(parts)))


def owner(
    arrangement: Arrangement, assignment: Assignment, kv: Sequence[LayerKV], request: str, layer: int, head: int
) -> str:
    """Return the rank that has this head of a request's keys and values in a layer; the first, where it is repeated."""
    shards = arrangement.layers[layer][assignment[request][layer]]
    held = kv_heads(shards, kv[layer].heads)
    return next(rank for rank, heads in zip(shards, held, strict=True) if head in heads)


@lru_cache(maxsize=4096)
def head_moves(before: Shards, after: Shards, heads: int) -> tuple[HeadMove, ...]:
    """Return what the ranks of a copy lack that other ranks had before; receivers take turns at a repeated head."""
    holders: list[list[str]] = [[] for _ in range(heads)]
    for rank, held in zip(before, kv_heads(before, heads), strict=True):
        for head in held:
            holders[head].append(rank)
    found: list[HeadMove] = []
    for turn, (rank, needed) in enumerate(zip(after, kv_heads(after, heads), strict=True)):
        for head in needed:
            if rank in holders[head]:
                continue
            frm = holders[head][turn % len(holders[head])]
            last = found[-1] if found else None
            if last and last[:2] == (frm, rank) and last.heads.stop == head:
                found[-1] = HeadMove(frm, rank, range(last.heads.start, head + 1))
            else:
                found.append(HeadMove(frm, rank, range(head, head + 1)))
    return tuple(found)


Path = tuple[Sequence[int], Sequence[int]]


def paths(at: Assignment, then: Assignment) -> dict[Path, list[str]]:
    """Return the requests that live before and after, by the copies that compute them before and after."""
    found: dict[Path, list[str]] = defaultdict(list)
    for request, before in at.items():
        if request in then:
            found[tuple(before), tuple(then[request])].append(request)
    return found


def moves(
    before: Arrangement,
    after: Arrangement,
    at: Assignment,
    then: Assignment,
    kv: Sequence[LayerKV],
    tokens: Mapping[str, int],
) -> tuple[Transfer, ...]:
    """Return what has to be copied so that every rank has the keys and values that it needs `after`.

    `at` and `then` assign the requests before and after, `tokens` says how many each has keys and values of. Nothing
    moves that is where it belongs, nothing twice to one rank; requests that are in one assignment only have nothing to
    move. Layers that follow one another are one transfer where all else is equal.
    """
    found: list[Transfer] = []
    for (old, new), requests in paths(at, then).items():
        live = tuple(request for request in requests if tokens[request])
        open_: dict[HeadMove, range] = {}
        for layer in range(len(after.layers) if live else 0):
            was, will = before.layers[layer][old[layer]], after.layers[layer][new[layer]]
            here = head_moves(was, will, kv[layer].heads) if was != will else ()
            for move in [move for move in open_ if move not in here]:
                found.append(_transfer(live, open_.pop(move), move, kv, tokens))
            for move in here:
                open_[move] = range(open_[move].start if move in open_ else layer, layer + 1)
        found.extend(_transfer(live, layers, move, kv, tokens) for move, layers in open_.items())
    return tuple(found)


def _transfer(
    requests: tuple[str, ...], layers: range, move: HeadMove, kv: Sequence[LayerKV], tokens: Mapping[str, int]
) -> Transfer:
    nbytes = len(move.heads) * sum(kv[layer].bytes_per_head(tokens[r]) for layer in layers for r in requests)
    return Transfer(requests, layers, move.heads, move.frm, move.to, nbytes)


def slices(
    arrangement: Arrangement, assignment: Assignment, kv: Sequence[LayerKV]
) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """List (rank, (request, layer, head)) of all that ranks have: what a check compares before and after."""
    for request, path in assignment.items():
        for layer, copy in enumerate(path):
            shards = arrangement.layers[layer][copy]
            for rank, heads in zip(shards, kv_heads(shards, kv[layer].heads), strict=True):
                for head in heads:
                    yield rank, (request, layer, head)
