"""What the ranks of a fleet last said of themselves: asked aside, so that nobody waits for a rank that hangs."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from elastic.errors import ElasticError

if TYPE_CHECKING:
    from elastic.cluster.control.messages import RuntimeView
    from elastic.cluster.fleet.fleet import Fleet

FRESH_S = 0.5
"""A view is not asked for again sooner."""
PATIENCE_S = 0.5
"""For how long one reading waits for views that are asked for."""


class RankViews:
    """The last view of each rank. Thread-safe; each rank is asked by one thread at most."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._changed = threading.Condition()
        self._views: dict[str, tuple[float, RuntimeView]] = {}
        """By rank, and when it was asked for."""
        self._asking: set[str] = set()
        self._outdated_s = float("-inf")

    def read(self) -> dict[str, RuntimeView]:
        """Return the last view of each rank that serves or drains; none of a rank that never answered."""
        ranks = [rank.name for rank in self.fleet.status().ranks if rank.up]
        with self._changed:
            for gone in self._views.keys() - set(ranks):
                del self._views[gone]
            for name in ranks:
                self._ask(name)
            self._changed.wait_for(lambda: not self._asking.intersection(ranks), PATIENCE_S)
            return {name: self._views[name][1] for name in ranks if name in self._views}

    def outdate(self) -> None:
        """Have each rank asked again by the next reading, whatever was asked before: something has been done."""
        with self._changed:
            self._outdated_s = time.monotonic()

    def _ask(self, name: str) -> None:
        """Begin to ask a rank, unless that is under way, or its view is fresh. Under the lock."""
        asked_s, _ = self._views.get(name, (float("-inf"), None))
        if name not in self._asking and asked_s <= max(time.monotonic() - FRESH_S, self._outdated_s):
            self._asking.add(name)
            threading.Thread(target=self._look, args=(name,), name="elastic-look", daemon=True).start()

    def _look(self, name: str) -> None:
        asked_s = float("-inf")
        try:
            while asked_s <= self._outdated_s:  # what was asked before something was done may not tell of it
                asked_s = time.monotonic()
                view = self.fleet.look(name)
            with self._changed:
                self._views[name] = asked_s, view
        except ElasticError:  # it is lost or ended: the fleet's status says so
            pass
        finally:
            with self._changed:
                self._asking.discard(name)
                self._changed.notify_all()
