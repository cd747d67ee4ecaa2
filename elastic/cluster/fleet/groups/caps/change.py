"""Having the instances of a group have other caps, while stages always keep room for what their homes may map."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from elastic.cluster.control.stage_questions import Allot, CapReached
from elastic.cluster.fleet.groups.group import Deadline, Group
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.errors import CapacityError, RankLost, StateError

logger = logging.getLogger(__name__)
POLL_S = 0.02
SHARES = (1.0, 0.9, 0.5, 0.0)
"""How much of what there is instances are offered, one after another, until it is had: pages may be held elsewhere."""


@dataclass(frozen=True)
class CapChange:
    """Changes of one group's caps, by one verb at a time. Raises `RankLost` where a rank has gone."""

    ranks: Ranks
    group: Group
    deadline: Deadline

    def lower(self, caps: Mapping[str, int], *, at_once: bool = False) -> bool:
        """Have instances map no more than these caps, and stages keep room for no more; the others stay as they are.

        Return False, with the caps of before, if what lives does not fit in them in time: `at_once`, now.
        """
        before = {home: self.group.caps[home] for home in caps}
        reached = False
        try:
            self.ranks.set_caps(caps)
            conditions = partial(self._reached, caps), partial(self._allot, caps)
            reached = all(each() if at_once else self.until(each) for each in conditions)
        finally:
            if reached:
                self.group.caps = {**self.group.caps, **caps}
            else:
                self._take_back(before, caps)
        return reached

    def raise_to(self, most: Mapping[str, int]) -> bool:
        """Let instances have these caps, or as much of them as stages find room for; none has less than before."""
        least = {home: cap for home, cap in self.group.caps_in_force().items() if home in most}
        for share in SHARES:
            caps = {home: max(cap, int(cap + share * (most[home] - cap))) for home, cap in least.items()}
            if self._allot(caps):
                self.ranks.set_caps(caps)
                self.group.caps = {**self.group.caps, **caps}
                return True
        return False

    def share_out(self, caps: Mapping[str, int]) -> bool:
        """Have instances have these caps: first some less, then others more. False: what lives does not fit in time.

        Those that were to have more keep what they had then; nobody ever has more than stages keep room for.
        """
        now = self.group.caps_in_force()
        lower = {home: cap for home, cap in caps.items() if cap < now[home]}
        higher = {home: cap for home, cap in caps.items() if cap > now[home]}
        return self.lower(lower) and self.raise_to(higher)

    def until(self, done: Callable[[], bool]) -> bool:
        """Ask until it is so; return False if that takes too long. It ends with any rank of the group."""
        while not done():
            for rank in self.group.members:
                self.ranks.instance(rank)
            if not self.deadline.wait(POLL_S):
                return False
        return True

    def _reached(self, homes: Iterable[str]) -> bool:
        return all(self.ranks.ask_all(dict.fromkeys(homes, CapReached())).values())

    def _take_back(self, before: Mapping[str, int | None], lower: Mapping[str, int]) -> None:
        """Have the caps of before again, where stages find that room once more; of who is lost others take care.

        They do not where a limit was lowered meanwhile: there are never more sectors than stages keep room for.
        """
        kept = {home: lower[home] for home, cap in before.items() if cap is not None and not self._finds(home, cap)}
        self.group.caps = {**self.group.caps, **kept}
        with suppress(RankLost):
            self.ranks.set_caps({home: cap for home, cap in before.items() if home not in kept})

    def _finds(self, home: str, cap: int) -> bool:
        """Return whether stages keep room for a cap, or are lost."""
        try:
            return self._allot({home: cap})
        except RankLost:
            return True

    def _allot(self, caps: Mapping[str, int]) -> bool:
        """Have stages keep room for caps; False: one has more mapped, or no room."""
        for home, rank in sorted(self.group.stages):
            try:
                if home in caps:
                    self.ranks.ask(rank, Allot(home, caps[home]))
            except (CapacityError, StateError) as error:
                if isinstance(error, RankLost):
                    raise
                logger.debug("rank %s cannot keep %d sectors of %s: %s", rank, caps[home], home, error)
                return False
        return True
