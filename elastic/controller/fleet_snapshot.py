"""One moment of a fleet as its policies see it, in frozen records. Seconds in `*_s`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from elastic.planning.arrangement.drop import PlannedGroup
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

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its instances: they are its own name, too."""
        return tuple(member.held.name for member in self.members)

    @property
    def committed_bytes(self) -> int:
        """What live requests have or are promised."""
        return self.used_bytes + self.promised_bytes

    @property
    def free_bytes(self) -> int:
        """What waiting requests can get."""
        return max(0, self.capacity_bytes - self.committed_bytes)

    @property
    def short_bytes(self) -> int:
        """What waiting requests need beyond what is free."""
        return max(0, self.waiting_bytes - self.free_bytes)

    @property
    def lacking_bytes(self) -> int:
        """What waiting requests need beyond what is free; at least 1."""
        return max(1, self.short_bytes)

    @property
    def use(self) -> float:
        """The share of the capacity that live requests have or are promised."""
        return self.committed_bytes / self.capacity_bytes if self.capacity_bytes else 1.0

    def spare_bytes(self, kv_high: float) -> int:
        """Return what it could take over without being near an overload, which begins at this use."""
        return max(0, int(kv_high * self.capacity_bytes) - self.committed_bytes - self.waiting_bytes)

    @property
    def base_bytes(self) -> int:
        """The KV capacity of its instances with all layers."""
        return sum(member.base_bytes for member in self.members)

    @property
    def group(self) -> PlannedGroup:
        """The group as planners see it."""
        return PlannedGroup(tuple(member.held for member in self.members))


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
