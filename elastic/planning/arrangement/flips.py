"""The order in which layers change their copies when memory is full: what is freed by one pays for the next.

Nothing may need room before it has made some. A layer that flips needs room for what arrives at a rank (weights that it
had not, keys and values of other ranks' requests), and then frees what leaves. So layers that leave one rank alternate
with those that leave the other; only the first needs room that was kept for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.errors import CapacityError
from elastic.planning.arrangement.arrangement import Arrangement, Assignment, Copies
from elastic.planning.arrangement.transfers import LayerKV, Path, kv_heads, paths


class LayerWeights(NamedTuple):
    """Bytes of one layer's weights."""

    whole: int
    """What every rank has that has a part of the layer,"""
    cut: int = 0
    """and what its shards divide among them."""

    def of(self, parts: int) -> int:
        """Return the bytes of one of so many shards."""
        return self.whole - (-self.cut // parts)


@dataclass(frozen=True)
class Moving:
    """Requests that go the same way in one layer, and the heads that ranks get and lose by each of them."""

    requests: tuple[str, ...]
    bytes_per_head: tuple[int, ...]
    """Of each request."""
    arriving: Mapping[str, int] = field(hash=False)
    leaving: Mapping[str, int] = field(hash=False)


@dataclass(frozen=True)
class LayerChange:
    """One layer that changes its copies."""

    layer: int
    loads: Mapping[str, int] = field(hash=False)
    """Bytes of weights that ranks need first."""
    moving: tuple[Moving, ...]
    unloads: Mapping[str, int] = field(hash=False)
    """Bytes of weights that come free at ranks when no request needs them there any more."""


@dataclass(frozen=True)
class Flip:
    """A layer that flips, for all of its requests that have not flipped yet, or for some of them."""

    layer: int
    requests: tuple[str, ...]
    ends: bool
    """Whether the layer has its new copies then; before, weights are still where they were."""
    staged_bytes: int = 0
    """Of what arrives, bytes that wait in host memory until ranks have room."""


@dataclass(frozen=True)
class FlipOrder:
    """An order in which no rank ever needs more than it has."""

    flips: tuple[Flip, ...]
    least_free: Mapping[str, int] = field(hash=False)
    """Rank -> its fewest free bytes on the way; below zero by what was staged."""

    @property
    def staged_bytes(self) -> int:
        """The most bytes that wait in host memory: those of one layer at the most."""
        return max((flip.staged_bytes for flip in self.flips), default=0)


def layer_changes(
    before: Arrangement,
    after: Arrangement,
    at: Assignment,
    then: Assignment,
    kv: Sequence[LayerKV],
    tokens: Mapping[str, int],
    weights: Sequence[LayerWeights],
) -> tuple[LayerChange, ...]:
    """Return what each layer that changes needs and frees: for a drop, a restore and a reshard alike."""
    found = []
    ways = paths(at, then)
    for layer, (was, will) in enumerate(zip(before.layers, after.layers, strict=True)):
        old, new = _weights(was, weights[layer]), _weights(will, weights[layer])
        moving = tuple(
            one
            for path, requests in ways.items()
            if (one := _moving(before, after, layer, path, requests, kv[layer], tokens)) is not None
        )
        if moving or was != will:
            found.append(LayerChange(layer, dict(new - old), moving, dict(old - new)))
    return tuple(found)


def _weights(copies: Copies, weights: LayerWeights) -> Counter[str]:
    return Counter({rank: weights.of(len(shards)) for shards in copies for rank in shards})


def _moving(
    before: Arrangement,
    after: Arrangement,
    layer: int,
    path: Path,
    requests: Sequence[str],
    kv: LayerKV,
    tokens: Mapping[str, int],
) -> Moving | None:
    """Return what goes where of the requests of one path; None if nothing does."""
    was, will = before.layers[layer][path[0][layer]], after.layers[layer][path[1][layer]]
    if was == will:
        return None
    held = {rank: set(heads) for rank, heads in zip(was, kv_heads(was, kv.heads), strict=True)}
    needed = {rank: set(heads) for rank, heads in zip(will, kv_heads(will, kv.heads), strict=True)}
    arriving = {rank: len(heads - held.get(rank, set())) for rank, heads in needed.items()}
    leaving = {rank: len(heads - needed.get(rank, set())) for rank, heads in held.items()}
    each = tuple(kv.bytes_per_head(tokens[request]) for request in requests)
    return Moving(tuple(requests), each, dict(+Counter(arriving)), dict(+Counter(leaving)))


def flip_order(changes: Sequence[LayerChange], free: Mapping[str, int]) -> FlipOrder:
    """Find an order of flips within the free bytes of each rank, what is kept for staging included.

    Next is the layer after which its receivers have the most room. Where none fits as a whole, one flips request by
    request; where not even one request does, the layer that lacks least is staged in host memory, one at a time.
    Raises `CapacityError` if a rank would not have enough in the end, or if nothing can go on.
    """
    search = _FlipSearch(changes, free)
    search.require_end()
    while search.pending:
        whole = search.best(list(search.pending))
        if whole is not None:
            search.flip(whole, search.pending[whole])
            continue
        alone = search.best_request()
        if alone is not None:
            search.flip(*alone)
        else:
            search.stage()
    return FlipOrder(tuple(search.flips), search.least)


Keys = list[tuple[int, int]]
"""(which of `LayerChange.moving`, which of its requests)."""


class _FlipSearch:
    """The ledgers of the ranks while flips are tried one after another."""

    def __init__(self, changes: Sequence[LayerChange], free: Mapping[str, int]) -> None:
        self.changes = {change.layer: change for change in changes}
        self.pending: dict[int, Keys] = {
            change.layer: [(i, j) for i, moving in enumerate(change.moving) for j in range(len(moving.requests))]
            for change in changes
        }
        self.free = Counter(free)
        self.least = dict(free)
        self.flips: list[Flip] = []
        self._begun: set[int] = set()
        self._whole = {layer: self._needs(layer, keys) for layer, keys in self.pending.items()}

    def require_end(self) -> None:
        """Raise `CapacityError` if a rank would have less than nothing when all is done."""
        end = Counter(self.free)
        for layer, keys in self.pending.items():
            end.subtract(self._needs(layer, keys))
            end.update(self._gives(layer, keys))
        for rank, nbytes in end.items():
            if nbytes < 0:
                raise CapacityError(
                    f"rank {rank!r} has no room for its layers and their keys and values; give it fewer layers",
                    requested_bytes=self.free[rank] - nbytes,
                    free_bytes=self.free[rank],
                    total_bytes=self.free[rank],
                )

    def best(self, layers: Sequence[int]) -> int | None:
        """Return the layer that fits as a whole and leaves its receivers the most room."""
        rooms = [(room, -layer) for layer in layers if (room := self._room(self._whole[layer])) is not None]
        return -max(rooms)[1] if rooms else None

    def best_request(self) -> tuple[int, Keys] | None:
        """Return the request of a layer that leaves its receivers the most room: of several alike, the largest."""
        best: tuple[tuple[int, int, int], int, Keys] | None = None
        for layer, keys in self.pending.items():
            for key in keys:
                needs = self._needs(layer, [key])
                room = self._room(needs)
                if room is not None and len(keys) > 1:
                    rank = (room, sum(needs.values()), -layer)
                    if best is None or rank > best[0]:
                        best = rank, layer, [key]
        return None if best is None else best[1:]

    def stage(self) -> None:
        """Flip the layer that lacks least, with what it lacks in host memory."""
        lacks = {layer: self._lack(needs) for layer, needs in self._whole.items()}
        layer = min(lacks, key=lambda layer: (lacks[layer], layer))
        if min(self.free.values()) < 0:
            raise CapacityError(
                f"no order of flips: layer {layer} lacks room while another one waits in host memory",
                requested_bytes=sum(self._whole[layer].values()),
                free_bytes=sum(nbytes for nbytes in self.free.values() if nbytes > 0),
                total_bytes=sum(self.free.values()),
            )
        self.flip(layer, self.pending[layer], lacks[layer])

    def flip(self, layer: int, keys: Keys, staged_bytes: int = 0) -> None:
        """Account for a flip of these requests."""
        change = self.changes[layer]
        self.free.subtract(self._needs(layer, keys))
        for rank, nbytes in self.free.items():
            self.least[rank] = min(self.least.get(rank, 0), nbytes)
        requests = tuple(change.moving[i].requests[j] for i, j in keys)
        done = set(keys)
        rest = [key for key in self.pending[layer] if key not in done]
        self.free.update(self._gives(layer, keys, ends=not rest))
        self.flips.append(Flip(layer, requests, not rest, staged_bytes))
        self._begun.add(layer)
        if rest:
            self.pending[layer] = rest
            self._whole[layer] = self._needs(layer, rest)
        else:
            del self.pending[layer], self._whole[layer]

    def _needs(self, layer: int, keys: Keys) -> Counter[str]:
        """Return the bytes that ranks must have for a flip of these requests."""
        change = self.changes[layer]
        needs = Counter({} if layer in self._begun else change.loads)
        for i, j in keys:
            moving = change.moving[i]
            for rank, heads in moving.arriving.items():
                needs[rank] += heads * moving.bytes_per_head[j]
        return needs

    def _gives(self, layer: int, keys: Keys, ends: bool = True) -> Counter[str]:
        """Return the bytes that come free after a flip of these requests."""
        change = self.changes[layer]
        gives = Counter(change.unloads if ends else {})
        for i, j in keys:
            moving = change.moving[i]
            for rank, heads in moving.leaving.items():
                gives[rank] += heads * moving.bytes_per_head[j]
        return gives

    def _room(self, needs: Counter[str]) -> int | None:
        """Return what the receiver with the least room has left; None if one has too little."""
        left = min((self.free[rank] - nbytes for rank, nbytes in needs.items()), default=1 << 62)
        return left if left >= 0 else None

    def _lack(self, needs: Counter[str]) -> int:
        return sum(max(0, nbytes - max(0, self.free[rank])) for rank, nbytes in needs.items())
