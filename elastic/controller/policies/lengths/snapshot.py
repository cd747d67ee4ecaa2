"""One moment of a fleet whose instances change their degree, in frozen records. Seconds in `*_s`, KV in tokens.

A fleet counts KV in blocks: any unit does that is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class LiveTokens(NamedTuple):
    """KV of one live request: what it has, and what it may still ask for."""

    held: int
    needed: int
    rounding: int = 0
    """What is kept besides where it is alone, as KV comes in larger pieces; others share these."""
    home: str = ""
    """The rank whose request it stays while the instance parts; empty: of none yet."""

    @property
    def most(self) -> int:
        """All that it may have."""
        return self.held + self.needed

    @property
    def alone(self) -> int:
        """The room that it needs where nothing else is."""
        return self.most + self.rounding


@dataclass(frozen=True)
class InstanceReading:
    """One instance. Its degree is the number of its ranks."""

    name: str
    host: str
    ranks: tuple[str, ...]
    capacity: Mapping[int, int] = field(hash=False)
    """KV of an instance by its degree, if these ranks are all or some of its ranks; degrees that cannot be are left
    out. At its own degree: as much as it has now."""
    live: tuple[LiveTokens, ...] = ()
    pending: float = 0.0
    """Tokens that its requests may still compute,"""
    rate: float = 1.0
    """and how many it computes in a second."""
    busy: bool = False
    """True while it becomes another."""
    partners: tuple[str, ...] = ()
    """Ranks of other instances that compute layers of it: it becomes another only together with them, and parts only
    when they do so no more."""
    slots: int | None = None
    """Requests that it takes besides those that it has, however small; None: any number."""
    whole: int | None = None
    """KV that it has when its ranks share all layers. They do so now: None; else a change was stopped on its way."""
    degree: int = field(init=False, compare=False)
    """The number of ranks that share each of its layers."""
    room: int = field(init=False, compare=False)
    """KV that live requests may have together."""
    room_below: int = field(init=False, compare=False)
    """KV of the largest instance that some of its ranks could be; 0 of one rank."""

    def __post_init__(self) -> None:
        degree = len(self.ranks)
        object.__setattr__(self, "degree", degree)
        object.__setattr__(self, "room", self.capacity.get(degree, 0))
        below = max((kv for fewer, kv in self.capacity.items() if fewer < degree), default=0)
        object.__setattr__(self, "room_below", below)

    def capacity_at(self, degree: int) -> int:
        """Return the KV of an instance of such a degree with these ranks, when its change is done."""
        if degree == self.degree and self.whole is not None:
            return self.whole
        return self.capacity.get(degree, 0)

    def needs_degree(self, tokens: int) -> bool:
        """Tell whether a request would fit no instance of fewer of its ranks."""
        return self.degree > 1 and tokens > self.room_below


@dataclass(frozen=True)
class WaitingRequest:
    """A request that no instance has yet."""

    name: str
    kv: LiveTokens
    """KV that it needs when it begins, for its prompt, and what it may ask for then."""
    since_s: float


@dataclass(frozen=True)
class LengthSnapshot:
    """One moment of the instances of one model."""

    at_s: float
    """Seconds of `time.monotonic`."""
    instances: tuple[InstanceReading, ...]
    waiting: tuple[WaitingRequest, ...] = ()
    """In the order of their arrival."""


def largest_together(hosted: Iterable[tuple[str, Mapping[int, int]]]) -> dict[tuple[str, int], int]:
    """Return the KV of the largest instance of each host and degree, of ranks with their host and their KV by degree.

    Of ranks with unlike memory it is what the least of them could have were all like it: of so many, the largest.
    """
    each: dict[tuple[str, int], list[int]] = {}
    for host, capacity in hosted:
        for degree, kv in capacity.items():
            each.setdefault((host, degree), []).append(kv)
    return {key: sorted(kv)[-key[1]] for key, kv in each.items() if len(kv) >= key[1]}


def tokens_to_end(live: Iterable[LiveTokens]) -> int:
    """Return the KV with which requests can all end, one after another, and none is evicted: the banker's sum.

    (Dijkstra, 1965.) In the order of what they need, each can have that, as those before it gave theirs back.
    """
    order = sorted(live, key=lambda request: request.needed)
    returned = most = 0
    for request in order:
        most = max(most, request.needed - returned)
        returned += request.held
    return returned + most
