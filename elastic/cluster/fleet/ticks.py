"""What threads of a fleet do again and again, whatever comes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from elastic import clock
from elastic.errors import ElasticError

logger = logging.getLogger(__name__)


class Attempts:
    """Something that is tried again and again. What it raises is logged, once in a row, and ends no thread.

    An `ElasticError` is usual, and logged as `level`: a rank was lost meanwhile, or there is no room after all. Any
    other is logged as an error, with its traceback. `failed` are the words before it.
    """

    def __init__(self, failed: str, level: int = logging.WARNING) -> None:
        self._failed, self._level = failed, level
        self._fault = ""  # of the last time

    def attempt(self, act: Callable[[], object]) -> None:
        """Try once."""
        fault = ""
        try:
            act()
        except ElasticError as error:
            fault = str(error)
            if fault != self._fault:
                logger.log(self._level, "%s: %s", self._failed, fault)
        except Exception as error:  # the thread must outlive whatever policies and verbs raise
            fault = f"{type(error).__name__}: {error}"
            if fault != self._fault:
                logger.exception("%s; it goes on", self._failed)
        self._fault = fault


class TickThread:
    """Tries something at each tick, from `start` to `stop`; `failed` and `level` are those of `Attempts`."""

    def __init__(
        self, act: Callable[[], object], tick_s: float, name: str, failed: str, level: int = logging.WARNING
    ) -> None:
        self._act, self._tick_s = act, tick_s
        self._attempts = Attempts(failed, level)
        self._stopping = clock.current().event()
        self._thread = clock.current().thread(self._run, name)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Do nothing more; return when what is being done is done. Can be called twice."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._tick_s):
            self._attempts.attempt(self._act)
