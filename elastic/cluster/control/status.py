"""What a fleet says of itself: frozen records for `Fleet.status`, the server and `elastic top`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from elastic.engines.core.load import EngineLoad

RankState = Literal["starting", "serving", "flipping", "draining", "lost", "ended"]
"""`flipping`: it serves, and who computes layers of its instance, or of one that it computes layers of, changes now."""
SERVING: Final[tuple[RankState, ...]] = ("serving", "flipping")
"""States in which a rank takes requests."""
UP: Final[tuple[RankState, ...]] = (*SERVING, "draining")
"""States in which it computes them."""
EventKind = Literal[
    "joined",
    "refused",
    "lost",
    "replaced",
    "removed",
    "moved",
    "move failed",
    "requests resumed",
    "overloaded",
    "swapped",
    "swapped back",
    "merged",
    "dropped",
    "drop failed",
    "restored",
    "restore failed",
    "migrated",
    "migration failed",
    "replicated",
    "replication failed",
    "evicted",
    "eviction failed",
    "resharded",
    "reshard failed",
    "formed",
    "forming failed",
    "parted",
    "recovered",
]


@dataclass(frozen=True)
class RankStatus:
    """One process."""

    name: str
    state: RankState
    pid: int
    host: str
    launcher: str
    places: tuple[str, ...] = ()
    """As they were asked for, such as `cpu#0=64MiB`."""
    beat_s: float | None = None
    """Seconds since it was last heard of."""
    why: str = ""
    """Lost or refused: why."""
    dropped: tuple[int, ...] = ()
    """Layers of whose weights it has none, since other ranks compute them."""
    shards: tuple[int, ...] = ()
    """Of each layer, how many of its shards it has the weights of, while ranks share layers; (): all of them."""

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.state in SERVING

    @property
    def up(self) -> bool:
        """Whether it computes requests: it takes them, or finishes those that it has."""
        return self.state in UP


@dataclass(frozen=True)
class Wire:
    """What went between one rank and another since they met; memory files that both have are on no wire."""

    rank: str
    """The other one."""
    sent_bytes: int = 0
    received_bytes: int = 0
    """Hidden states, and parts of them, of all instances."""
    read_bytes: int = 0
    """Keys, values and weights that were read in the other's memory, and came by way of host memory."""
    copied_bytes: int = 0
    """Those that were copied from its GPU to one here."""


@dataclass(frozen=True)
class InstanceStatus:
    """One model being served: its ranks, and what it has to do."""

    name: str
    leader: str
    ranks: tuple[str, ...]
    load: EngineLoad
    requests: int
    """Requests that the fleet has given it and that have not ended."""
    freeness: float
    """Free blocks after promises, over running sequences (Llumnix, section 4.2)."""
    epoch: int = 0
    path: tuple[str, ...] = ()
    """Of each layer the rank that computes it, those that share it, such as `r0+r1`, or that have copies of it, such as
    `r0|r1`; (): its leader computes all."""
    tp: int = 1
    """How many ranks share a layer, at the most."""


@dataclass(frozen=True)
class FleetEvent:
    """Something that happened to the fleet."""

    id: int
    kind: EventKind
    when_s: float
    """Seconds since the epoch."""
    rank: str = ""
    instance: str = ""
    request: str = ""
    requests: int = 0
    """How many requests it was about."""
    moved_bytes: int = 0
    """KV that was copied."""
    recomputed_tokens: int = 0
    """Tokens whose KV was lost, and is computed again."""
    stalled_ms: float = 0.0
    """The longest that one of the requests waited for its next token because of it."""
    seconds: float = 0.0
    """What it took, of a drop, a restore and a migration."""
    copy_s: float = 0.0
    """Seconds in which a request's KV was copied as it moved."""
    timeline: tuple[tuple[str, float], ...] = ()
    """What of it was done when: in seconds from its beginning."""
    why: str = ""


@dataclass(frozen=True)
class FleetTotals:
    """Counts since the fleet began."""

    routed: int = 0
    moved: int = 0
    moved_bytes: int = 0
    ranks_lost: int = 0
    requests_resumed: int = 0
    """Requests that went on elsewhere after their rank was lost."""
    recomputed_tokens: int = 0
    prefix_hits: int = 0
    """Requests that were sent where the beginning of their prompt was."""
    exchanged_bytes: int = 0
    """KV that was copied as layers of instances changed their rank."""


@dataclass(frozen=True)
class FleetStatus:
    """A snapshot of a fleet."""

    ranks: tuple[RankStatus, ...]
    instances: tuple[InstanceStatus, ...]
    queued: int
    """Requests that no instance has room for yet."""
    totals: FleetTotals
    policy: str = ""
    """What the policies of overloads and of lengths said last; empty: there is none, or no tick yet."""
