"""What has happened to a fleet, and how often."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from elastic import clock
from elastic.cluster.control.status import EventKind, FleetEvent, FleetTotals

MOST_EVENTS = 1000


class EventLog:
    """The last events and all counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._events: deque[FleetEvent] = deque(maxlen=MOST_EVENTS)
        self._totals: Counter[str] = Counter()
        self.on_event: Callable[[FleetEvent], object] = lambda event: None
        """Told of each event as it is noted, of which only the last ones are kept."""

    def add(self, kind: EventKind, **about: Any) -> None:
        """Note an event; `about` are the fields of `FleetEvent`."""
        with self._lock:
            event = FleetEvent(next(self._ids), kind, clock.current().wall(), **about)
            self._events.append(event)
        self.on_event(event)

    def count(self, **totals: int) -> None:
        """Add to fields of `FleetTotals`."""
        with self._lock:
            self._totals.update(totals)

    def events(self) -> tuple[FleetEvent, ...]:
        """Return the last ones, oldest first."""
        with self._lock:
            return tuple(self._events)

    def totals(self) -> FleetTotals:
        """Return the counts."""
        with self._lock:
            return FleetTotals(**self._totals)
