"""How the instances of a group share its memory for keys and values: as much for each as its requests need.

A sector of an instance takes pages at every rank that has layers of it. The *cap* of an instance is the most sectors
that it may have; whatever caps allow must fit at every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

KEPT = 0.25
"""Of the share of an instance that needs nothing, what it keeps so that a request which comes finds room at once."""
GAIN = 0.1
"""Caps change where an instance that is short gets so much more than it has: less is not worth the messages."""
Caps = Mapping[str, int]
"""Instance -> sectors."""


@dataclass(frozen=True)
class Need:
    """What an instance has and would have, in sectors."""

    committed: int
    """That live requests have, and are promised: it cannot have fewer."""
    wanted: int
    """That all its requests would need at the same time, those that wait too."""
    most: int
    """That there are addresses for."""
    short: bool = False
    """Whether requests wait for sectors now, or are about to."""
    largest: int = 0
    """That a request needs by itself which is larger than any instance's cap: others keep nothing before it has these.
    Of one instance of a group at the most."""
    first: int = 0
    """That it would have if the first of the requests that wait at it began; 0: none waits for sectors."""
    waits_s: float = 0.0
    """How long that one has waited."""


@dataclass(frozen=True)
class SharedMemory:
    """The memory of a group: pages for keys and values of each rank, and what a sector of an instance takes there."""

    pages: Mapping[str, int] = field(hash=False)
    sector_pages: Mapping[str, Mapping[str, int]] = field(hash=False)
    """Rank -> instance -> pages; an instance without layers at a rank is not there."""

    def free(self, caps: Caps) -> dict[str, int]:
        """Return the pages that are left at each rank when all have their caps."""
        return {
            rank: pages - sum(caps[home] * each for home, each in self.sector_pages.get(rank, {}).items())
            for rank, pages in self.pages.items()
        }

    def takes(self, rank: str, home: str) -> int:
        """Return the pages that a sector of an instance takes at a rank."""
        return self.sector_pages.get(rank, {}).get(home, 0)


def caps_by_need(memory: SharedMemory, needs: Mapping[str, Need], fair: Caps) -> dict[str, int] | None:
    """Return caps: first what instances have, then `KEPT` of their fair share, then what they want, then what is left.

    Behind what they have come the first requests that wait at them, if these can begin with it, the one that has waited
    longest before the others; then what the largest request needs.
    Where there is not enough for a step, all get the same share of what they lack, but for those that others leave no
    page at some rank. What is left goes by what is wanted. None: not even what live requests have would fit.
    """
    caps = {home: need.committed for home, need in needs.items()}
    if min(memory.free(caps).values(), default=0) < 0:
        return None
    wanted = {home: max(need.wanted, int(KEPT * fair[home]), 1) for home, need in needs.items()}
    times = min(need.most // wanted[home] for home, need in needs.items())
    goals = (
        {home: need.largest for home, need in needs.items()},
        {home: int(KEPT * fair[home]) for home in needs},
        wanted,
        {home: times * count for home, count in wanted.items()},
        {home: need.most for home, need in needs.items()},
    )
    for home in sorted(needs, key=lambda home: -needs[home].waits_s):
        raised = _raised(memory, caps, {**caps, home: max(caps[home], min(needs[home].first, needs[home].most))})
        caps = raised if raised[home] >= needs[home].first else caps
    for goal in goals:
        caps = _raised(memory, caps, {home: min(goal[home], need.most) for home, need in needs.items()})
    return caps


def better_caps(memory: SharedMemory, needs: Mapping[str, Need], fair: Caps, now: Caps) -> dict[str, int] | None:
    """Return other caps where an instance is short, wants more than it may have, and would get more. None: stay.

    More is `GAIN` of what it has, or as much as its largest request needs, or the first that waits at it.

    Asked again with the same needs it is None, and so it is as long as nobody is short: caps do not chatter.
    """
    short = [home for home, need in needs.items() if need.short and need.wanted > now[home]]
    caps = caps_by_need(memory, needs, fair) if short else None
    if caps is None:
        return None
    gains = any(caps[home] - now[home] >= max(1, GAIN * now[home]) for home in short)
    begins = any(now[home] < goal <= caps[home] for home in short for goal in (needs[home].largest, needs[home].first))
    return caps if gains or begins else None


def fitting_caps(memory: SharedMemory, needs: Mapping[str, Need], fair: Caps, now: Caps) -> dict[str, int] | None:
    """Return lower caps where those of now are of more memory than there is, since a limit was lowered. None: they fit.

    Where not even what live requests have would fit, they are what these have: no new one begins until some have ended.
    """
    if min(memory.free(now).values(), default=0) >= 0:
        return None
    caps = caps_by_need(memory, needs, fair)
    return {home: need.committed for home, need in needs.items()} if caps is None else caps


def largest_caps(memory: SharedMemory, most: Caps) -> dict[str, int]:
    """Return the most sectors that each instance could have if the others had none; `most`: there are addresses for."""
    return {
        home: min(
            [count, *(memory.pages[rank] // takes for rank in memory.pages if (takes := memory.takes(rank, home)))]
        )
        for home, count in most.items()
    }


def _raised(memory: SharedMemory, caps: Caps, goals: Caps) -> dict[str, int]:
    """Raise caps to goals, as far as there is room, all by the same share of what they lack."""
    raised = dict(caps)
    while True:
        free = memory.free(raised)
        growing = [
            home
            for home in raised
            if raised[home] < goals[home] and all(left >= memory.takes(rank, home) for rank, left in free.items())
        ]
        if not growing:
            return raised
        lacking = {home: goals[home] - raised[home] for home in growing}
        needed = {rank: sum(memory.takes(rank, home) * count for home, count in lacking.items()) for rank in free}
        share = min([Fraction(1), *(Fraction(free[rank], pages) for rank, pages in needed.items() if pages)])
        steps = {home: int(share * count) for home, count in lacking.items()}
        if any(steps.values()):
            raised = {home: cap + steps.get(home, 0) for home, cap in raised.items()}
        else:  # fewer pages are left at a rank than one sector of each takes
            home = max(growing, key=lambda home: lacking[home])
            raised[home] += 1
