"""The guest that measures links beside what is served: a process of the lowest priority, for a share of its time."""

from __future__ import annotations

from functools import partial

from elastic.cluster.fleet.profiling.handovers import HANDOVER_ROUNDS, measure_handovers, place_bytes
from elastic.cluster.peers.link_profile import (
    READ_BYTES,
    REPEATS,
    ROUNDS,
    WEIGHT_BYTES,
    measure_contention,
    measure_link,
)
from elastic.estimation.profile import CostProfile
from elastic.estimation.profiles.guest import SHARE, GuestProcess
from elastic.estimation.profiles.spare_time import rest_behind


class LinkProfilingProcess(GuestProcess):
    """A guest that measures what two ranks do to each other, on a core each. The profile has no layers."""

    def __init__(
        self,
        share: float = SHARE,
        *,
        repeats: int = REPEATS,
        rounds: int = ROUNDS,
        handover_rounds: int = HANDOVER_ROUNDS,
    ) -> None:
        counts = {"--repeats": repeats, "--rounds": rounds, "--handover-rounds": handover_rounds}
        arguments = [text for name, count in counts.items() for text in (name, str(count))]
        super().__init__("elastic.cluster.fleet.profiling", ["--share", str(share), *arguments])


def link_guest_bytes() -> int:
    """Return the memory that a guest takes on each of two devices."""
    return READ_BYTES + WEIGHT_BYTES + place_bytes()


def measure_two_ranks(
    repeats: int = REPEATS,
    rounds: int = ROUNDS,
    handover_rounds: int = HANDOVER_ROUNDS,
    share: float | None = None,
) -> CostProfile:
    """Return a profile without layers, of what two ranks on CPUs of this host do to each other.

    `share`: of the time that they measure; None: all of it. Raises `StateError` where this process may run on one core
    alone.
    """
    pace = None if share is None else partial(rest_behind, share)
    link = measure_link(repeats, pace)
    contention = measure_contention(rounds, pace)
    handovers = measure_handovers(link, contention, handover_rounds, pace)
    return CostProfile("cpu", {}, {}, link, contention=contention, handovers=handovers)
