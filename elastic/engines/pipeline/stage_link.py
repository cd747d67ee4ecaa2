"""A home's end of the log to one of the ranks that compute layers of it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from elastic.engines.pipeline.items import Copied, EndItem, Failed, ForgetItem, LogConnection, LogItem, SectorRef
from elastic.errors import ConfigError, RankLost, StateError

logger = logging.getLogger(__name__)


class StageLink:
    """What was sent to a rank, and what it is still to be told. Its calls come from the thread of the home's loop."""

    def __init__(
        self, rank: str, log: LogConnection, mapped: Iterable[SectorRef], on_lost: Callable[[], object]
    ) -> None:
        """`mapped` are the sectors of the home: the rank knows of none yet. `on_lost` may come from any thread."""
        self.rank = rank
        self.sent = 0
        """Items."""
        self.lost = self._closed = False
        self._log = log
        self._on_lost = on_lost
        self._mapped = dict.fromkeys(mapped)
        self._unmapped: dict[SectorRef, None] = {}
        self._removed: list[str] = []
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"elastic-log-{rank}", daemon=True)
        self._reader.start()

    def note_sectors(self, mapped: Iterable[SectorRef], unmapped: Iterable[SectorRef]) -> None:
        """Note what is to be told with the next item; what undoes something that was not told yet is not."""
        for sector in unmapped:
            if sector in self._mapped:
                del self._mapped[sector]
            else:
                self._unmapped[sector] = None
        for sector in mapped:
            self._mapped[sector] = None

    def note_removed(self, sequences: Iterable[str]) -> None:
        """Note sequences that it can forget."""
        self._removed.extend(sequences)

    def take_sectors(self) -> tuple[tuple[SectorRef, ...], tuple[SectorRef, ...]]:
        """Return the sectors that are to be mapped, and those to be unmapped before, for an item that is sent now."""
        mapped, unmapped = tuple(self._mapped), tuple(self._unmapped)
        self._mapped, self._unmapped = {}, {}
        return mapped, unmapped

    def take_removed(self) -> tuple[str, ...]:
        """Return the sequences that it can forget, for an item that is sent now."""
        removed, self._removed = tuple(self._removed), []
        return removed

    def flush(self) -> None:
        """Tell what is to be told, if there is something. Raises `RankLost`."""
        if self._removed or self._mapped or self._unmapped:
            self.send(ForgetItem(self.take_removed(), *self.take_sectors()))

    def send(self, item: LogItem) -> None:
        """Send an item. Raises `RankLost`."""
        try:
            if self.lost:
                raise StateError("it has ended")
            self._log.send(item)
        except ConfigError:
            raise
        except StateError as error:
            self.lost = True
            raise self._error(str(error)) from error
        self.sent += 1

    def answer(self, timeout_s: float) -> Any:
        """Wait for the answer to what was asked. Raises `RankLost`, also where none comes in time."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.close()  # an answer that came later would be taken for that of another question
            self._on_lost()
            raise self._error(f"it did not answer for {timeout_s} s") from None
        if answer is None:
            self._answers.put(None)
            raise self._error("its log has ended")
        return answer

    def close(self, *, end: bool = False) -> None:
        """End the log; with `end`, the rank is told that it is over. Can be called twice."""
        if end and not self.lost:
            with suppress(RankLost):
                self.send(EndItem())
        self.lost = self._closed = True
        self._log.close()

    def _read(self) -> None:
        """Take answers until the log ends."""
        while True:
            try:
                message = self._log.receive()
            except (EOFError, StateError):
                break
            if isinstance(message, Failed):
                logger.error("rank %s could not compute step %d: %s", self.rank, message.number, message.error)
            else:
                self._answers.put(message)
        self.lost = True
        self._answers.put(None)
        if not self._closed:
            self._on_lost()

    def _error(self, why: str) -> RankLost:
        return RankLost(f"rank {self.rank!r} computes layers of this engine no more: {why}", rank=self.rank)


def copied_bytes(answer: Any, rank: str) -> int:
    """Return what a rank copied. Raises `StateError` if it could not."""
    if not isinstance(answer, Copied) or answer.error:
        raise StateError(f"rank {rank!r} could not copy keys and values: {getattr(answer, 'error', answer)}")
    return answer.nbytes
