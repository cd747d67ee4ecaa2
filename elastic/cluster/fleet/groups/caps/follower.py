"""The thread that has the caps of groups follow what requests need."""

from __future__ import annotations

import logging
from typing import Protocol

from elastic import clock
from elastic.errors import ElasticError

logger = logging.getLogger(__name__)
TICK_S = 0.25


class Follows(Protocol):
    """What is asked of the groups of a fleet."""

    def follow_needs(self) -> int: ...


class CapFollower:
    """Asks the groups at each tick, from `start` to `stop`."""

    def __init__(self, groups: Follows, tick_s: float = TICK_S) -> None:
        self._groups, self._tick_s = groups, tick_s
        self._stopping = clock.make_event()
        self._thread = clock.make_thread(self._run, "elastic-fleet-caps")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Change nothing more; return when what is being changed is. Can be called twice."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._tick_s):
            try:
                self._groups.follow_needs()
            except ElasticError as error:  # a rank was lost meanwhile: its group is being repaired
                logger.debug("the caps of a group could not follow: %s", error)
