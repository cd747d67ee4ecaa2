"""Which rank computes each layer of an instance's steps, and what one rank of it has to do in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from elastic.errors import ConfigError


@dataclass(frozen=True)
class LayerPath:
    """The way of an instance's steps through its layers: embedding and head at home, each layer at one rank.

    The keys and values of a layer are where it is computed. Each instance of a fleet keeps its engine, its scheduler
    and its requests at home, whoever computes its layers: two instances that compute each other's layers are a pipeline
    of two stages (KunServe, section 4), with a batch of each in flight.
    """

    home: str
    """The rank whose engine plans the steps, and samples."""
    ranks: tuple[str, ...]
    """Of each decoder layer, the rank that computes it."""
    epoch: int = 0
    """Counts the paths of an instance: no step is computed by two of them."""

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ConfigError("ranks=() is no path; name a rank for one layer at least")
        if self.epoch < 0:
            raise ConfigError(f"epoch={self.epoch} must be at least 0")

    @classmethod
    def alone(cls, home: str, layers: int) -> LayerPath:
        """Return the path of an instance that computes all of its layers itself."""
        return cls(home, (home,) * layers)

    @property
    def guests(self) -> tuple[str, ...]:
        """The other ranks of it, in the order of their first layers."""
        return tuple(rank for rank in dict.fromkeys(self.ranks) if rank != self.home)

    def runs(self) -> tuple[tuple[str, range], ...]:
        """Return the layers from first to last by the rank that computes them, in as few runs as possible."""
        runs, first = [], 0
        for rank, same in groupby(self.ranks):
            last = first + len(list(same))
            runs.append((rank, range(first, last)))
            first = last
        return tuple(runs)

    def layers_of(self, rank: str) -> tuple[int, ...]:
        """Return the layers that a rank computes."""
        return tuple(layer for layer, other in enumerate(self.ranks) if other == rank)

    def moved(self, layers: tuple[int, ...], rank: str) -> LayerPath:
        """Return the next path, in which a rank computes these layers."""
        chosen = frozenset(layers)
        ranks = tuple(rank if layer in chosen else other for layer, other in enumerate(self.ranks))
        return LayerPath(self.home, ranks, self.epoch + 1)

    def plan(self, rank: str) -> StagePlan:
        """Return what a rank does in each step. Raises `ConfigError` for one that has no part in it."""
        own = frozenset(self.layers_of(rank))
        if rank != self.home and not own:
            raise ConfigError(f"rank {rank!r} computes no layer of {self.home!r}; its steps go by {self.runs()}")
        receives: dict[int, str] = {}
        sends: dict[int, str] = {}
        holder = self.home  # who has the hidden states in front of the present run; all ranks embed the tokens
        for number, (other, run) in enumerate(self.runs()):
            if number and other != holder:
                if other == rank:
                    receives[run.start] = holder
                if holder == rank:
                    sends[run.start - 1] = other
            holder = other
        if holder != self.home:
            if rank == self.home:
                receives[len(self.ranks)] = holder
            if rank == holder:
                sends[len(self.ranks) - 1] = self.home
        last = len(self.ranks) if rank == self.home else max(own)
        return StagePlan(rank, own, receives, sends, last)


@dataclass(frozen=True)
class StagePlan:
    """What one rank does in a step. Hidden states are [1, tokens, hidden size], of all tokens of the step."""

    rank: str
    layers: frozenset[int]
    """Those that it computes; it passes over the others."""
    receives: dict[int, str] = field(hash=False)
    """Layer -> the rank that sends the hidden states that it is given; the number of layers: those behind the last."""
    sends: dict[int, str] = field(hash=False)
    """Layer -> the rank that gets what it returns."""
    last: int
    """The last layer that it computes; at home the number of layers: norm and head follow."""

    @property
    def whole(self) -> bool:
        """Whether it computes everything by itself."""
        return not self.receives and not self.sends
