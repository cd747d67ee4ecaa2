"""The record of actions: what `Runtime.events` returns."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from elastic.actions.transactions.transaction import ActionOutcome
from elastic.types import Event

EVENTS_KEPT = 1000


@dataclass(eq=False)
class ActionLog:
    """The last actions of a model, oldest first. Thread-safe; takes no lock."""

    events: deque[Event] = field(default_factory=partial(deque, maxlen=EVENTS_KEPT))
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def record(self, outcome: ActionOutcome, description: str = "") -> None:
        """Append what became of an action; without a `description`, its status or its error is the outcome."""
        result, timing = outcome.result, outcome.timing
        event = Event(
            id=next(self._ids),
            action=outcome.action,
            when_s=time.time(),
            why=outcome.why,
            moved_bytes=result.moved_bytes if result else 0,
            released_bytes=result.released_bytes if result else 0,
            prepare_ms=timing.prepare_ms,
            wait_ms=timing.wait_ms,
            pause_ms=timing.pause_ms,
            ok=result is not None,
            outcome=description or (result.status if result else outcome.error),
        )
        self.events.append(event)

    def last_pause_ms(self, kind: type) -> float:
        """Return the pause of the last action of a kind that had one; 0 if there was none."""
        pauses = (event.pause_ms for event in reversed(tuple(self.events)) if isinstance(event.action, kind))
        return next(filter(None, pauses), 0.0)
