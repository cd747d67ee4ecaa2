"""A home's end of the log to one of the ranks that compute layers of it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from elastic.engines.pipeline.items import (
    Copied,
    EndItem,
    Failed,
    ForgetItem,
    Located,
    LogConnection,
    LogItem,
    SectorRef,
)
from elastic.errors import ConfigError, ElasticError, RankLost, StateError

T = TypeVar("T")
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
        self.removed: list[str] = []
        """Sequences that it is yet to be told that it can forget."""
        self._located: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {}  # layer -> sector -> position, pages
        self.told_at: dict[tuple[int, int], int] = {}
        """(group, sector) -> the item that last had it mapped, counted from 1."""
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"elastic-log-{rank}", daemon=True)
        self._reader.start()

    def note_sectors(self, mapped: Iterable[SectorRef], unmapped: Iterable[SectorRef]) -> None:
        """Note what is to be told with the next item.

        What is unmapped before it was told of is told, too: the rank has mapped it if blocks in it were copied ahead.
        """
        for sector in unmapped:
            self._mapped.pop(sector, None)
            self._unmapped[sector] = None
        for sector in mapped:
            self._mapped[sector] = None

    def take_sectors(self) -> tuple[tuple[SectorRef, ...], tuple[SectorRef, ...]]:
        """Return the sectors that are to be mapped, and those to be unmapped before, for an item that is sent now."""
        mapped, unmapped = tuple(self._mapped), tuple(self._unmapped)
        self._mapped, self._unmapped = {}, {}
        self.told_at.update(dict.fromkeys(mapped, self.sent + 1))
        return mapped, unmapped

    def take_removed(self) -> tuple[str, ...]:
        """Return the sequences that it can forget, for an item that is sent now."""
        removed, self.removed = tuple(self.removed), []
        return removed

    def located(self, group: int, layers: Iterable[int], timeout_s: float) -> dict[int, dict[int, tuple[int, ...]]]:
        """Return where the rank, which has gone, had keys and values of layers of a group: layer -> sector -> pages.

        Of a sector that it had mapped and of which nothing was heard there is nothing: nor was anything computed in it,
        unless the last word was lost. Without the end of the log within the time nothing is known.
        """
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            return {layer: {} for layer in layers}
        return {
            layer: {
                sector: pages
                for sector, (position, pages) in self._located.get(layer, {}).items()
                if position >= self.told_at.get((group, sector), 0)
            }
            for layer in layers
        }

    def flush(self) -> None:
        """Tell what is to be told, if there is something. Raises `RankLost`."""
        if self.removed or self._mapped or self._unmapped:
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
            raise self._error("it did not answer in time") from None
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
        """Take answers until the log ends, or what comes cannot be taken."""
        try:
            while True:
                self._hear(self._log.receive())
        except (EOFError, StateError):
            pass
        except Exception:  # whatever it is, nobody may wait for this rank any more
            logger.exception("the log to rank %s cannot be read", self.rank)
        self.lost = True
        self._answers.put(None)
        if not self._closed:
            self._on_lost()

    def _hear(self, message: Any) -> None:
        if isinstance(message, Failed):
            logger.error("rank %s could not compute step %d: %s", self.rank, message.number, message.error)
        elif isinstance(message, Located):
            for layer, sectors in message.pages.items():
                told = {sector: (message.position, pages) for sector, pages in sectors.items()}
                self._located.setdefault(layer, {}).update(told)
        else:
            self._answers.put(message)

    def _error(self, why: str) -> RankLost:
        return RankLost(f"rank {self.rank!r} computes layers of this engine no more: {why}", rank=self.rank)


class CopyAnswers:
    """What ranks answer to copies, taken by whoever asks first: until then nothing else is asked. Thread-safe."""

    def __init__(self, links: Sequence[StageLink] = (), timeout_s: float = 0.0, *, flips: bool = False) -> None:
        """Each of the links was sent a `CopyItem`, one that stands several times so many; `flips` as in those."""
        self._links, self._timeout_s, self._flips = links, timeout_s, flips
        self._taking = threading.Lock()
        self._copied: Future[int] = Future()

    def wait(self) -> int:
        """Return the bytes that were copied. Raises, each time, the first error when all have answered.

        That is `StateError` for a rank that could not copy, or, if it ends then, `RankLost`, as where one has gone.
        """
        with self._taking:
            if not self._copied.done():
                try:
                    takes = (partial(self._take, link) for link in self._links)
                    self._copied.set_result(sum(all_answers(takes, self._timeout_s)))
                except ElasticError as error:
                    self._copied.set_exception(error)
        return self._copied.result()

    def _take(self, link: StageLink, timeout_s: float) -> int:
        answer = link.answer(timeout_s)
        if not isinstance(answer, Copied) or answer.error:
            why = getattr(answer, "error", answer)
            words = f"rank {link.rank!r} could not copy keys and values: {why}"
            raise RankLost(words, rank=link.rank) if self._flips else StateError(words)
        return answer.nbytes


def all_answers(answers: Iterable[Callable[[float], T]], timeout_s: float) -> list[T]:
    """Take every answer, so that none is left for the next question; raise the first error then.

    Each waits for no longer than it is told; together they have `timeout_s`, as they were asked at the same time.
    """
    until_s = time.monotonic() + timeout_s
    taken: list[T] = []
    failed: list[ElasticError] = []
    for answer in answers:
        try:
            taken.append(answer(max(0.0, until_s - time.monotonic())))
        except ElasticError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    return taken
