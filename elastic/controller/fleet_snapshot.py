"""One moment of a fleet as its policies see it, in frozen records. Seconds in `*_s`."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.planning.arrangement.stages import Held


@dataclass(frozen=True)
class MemberReading:
    """One instance of a group."""

    held: Held
    """Its name and the layers that it has."""
    base_bytes: int
    """Its KV capacity with all layers."""
    home_bytes: int = 0
    """KV that live requests have or are promised which return to it when the group parts."""


@dataclass(frozen=True)
class GroupReading:
    """Instances that serve requests together; at first each by itself. Bytes are of all layers."""

    members: tuple[MemberReading, ...]
    capacity_bytes: int
    """KV that requests may have now."""
    used_bytes: int
    """KV that live requests have."""
    promised_bytes: int = 0
    """KV that live requests may still ask for."""
    waiting_bytes: int = 0
    """KV that requests need which wait at it."""
    queue_s: float = 0.0
    """Time that the oldest of them has waited."""
    running: int = 0
    busy: bool = False
    """True while an action on it is under way."""

    names: tuple[str, ...] = field(init=False, compare=False)
    """The names of its instances: they are its own name, too."""
    base_bytes: int = field(init=False, compare=False)
    """The KV capacity of its instances with all layers."""
    committed_bytes: int = field(init=False, compare=False)
    """What live requests have or are promised."""
    free_bytes: int = field(init=False, compare=False)
    """What waiting requests can get."""
    short_bytes: int = field(init=False, compare=False)
    """What waiting requests need beyond what is free."""
    use: float = field(init=False, compare=False)
    """The share of the capacity that live requests have or are promised."""

    def __post_init__(self) -> None:
        committed, capacity = self.used_bytes + self.promised_bytes, self.capacity_bytes
        free = max(0, capacity - committed)
        object.__setattr__(self, "names", tuple([member.held.name for member in self.members]))
        object.__setattr__(self, "base_bytes", sum([member.base_bytes for member in self.members]))
        object.__setattr__(self, "committed_bytes", committed)
        object.__setattr__(self, "free_bytes", free)
        object.__setattr__(self, "short_bytes", max(0, self.waiting_bytes - free))
        object.__setattr__(self, "use", committed / capacity if capacity else 1.0)


@dataclass(frozen=True)
class FleetSnapshot:
    """One moment of the instances of one model. The demand is what live and queued requests may ask for together."""

    at_s: float
    """Seconds of `time.monotonic`."""
    groups: tuple[GroupReading, ...]
    layer_bytes: tuple[int, ...]
    """Weights of each decoder layer."""
    queued_bytes: int = 0
    """KV that the requests need which wait at the fleet, because no instance has room."""
    queue_s: float = 0.0
    """Time that the oldest of these has waited."""


def request_bytes(prompt: int, max_tokens: int, usual_tokens: int, token_bytes: int) -> int:
    """Return the KV that a waiting request is taken to need: its prompt, and the answer that is usual.

    KunServe leaves open what answers count (section 4.1): `usual_tokens` is meant to be the P90 of recent ones, so that
    a generous `max_tokens` alone is no overload.
    """
    return (prompt + min(max_tokens, usual_tokens)) * token_bytes
