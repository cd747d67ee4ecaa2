"""Telling listeners, in order and outside of the fleet's lock."""

from __future__ import annotations

import logging
import threading
from typing import Self

from elastic import clock
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.engines.base import Output
from elastic.errors import StateError

logger = logging.getLogger(__name__)


class Delivery:
    """What is to be told after the lock was left: `add` while it is held, `tell` without it, both on one thread.

    `with` one the lock is held, and what was added is told when it was left, however.

    Outputs of one request may come on several threads, one after another: of the rank that was lost, of the one that
    goes on, of whoever cancels. One of them is in its listener at a time; what others bring meanwhile it tells next.
    """

    _inside = threading.local()

    def __init__(self, lock: clock.Lock) -> None:
        self._lock = lock
        self._batch: list[tuple[RequestRecord, Output]] = []
        self._records: set[RequestRecord] = set()

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self.tell()  # after an error too: the records have it

    @classmethod
    def forbid(cls, what: str) -> None:
        """Raise `StateError` in a listener: the calling thread is the one that reads what ranks answer."""
        if getattr(cls._inside, "depth", 0) > 0:
            raise StateError(f"{what} by a listener; use another thread")

    def add(self, record: RequestRecord, output: Output) -> None:
        """Have an output told."""
        if record in self._records:
            self._batch.append((record, output))
        elif record.telling:
            record.untold.append(output)
        else:
            record.telling = True
            self._records.add(record)
            self._batch.append((record, output))

    def tell(self) -> None:
        """Call the listeners. What they raise is logged: it is not the others' fault."""
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            while self._batch:
                for record, output in self._batch:
                    try:
                        record.listener(output)
                    except Exception:  # a listener's fault is not the fleet's: the others are served on
                        logger.exception("the listener of request %s failed", output.request)
                self._batch = self._more()
        finally:
            self._inside.depth -= 1

    def _more(self) -> list[tuple[RequestRecord, Output]]:
        with self._lock:
            untold = [(record, output) for record in self._records for output in record.untold]
            for record in self._records:
                record.telling = bool(record.untold)
                record.untold.clear()
            self._records = {record for record, _ in untold}
            return untold
