"""A rank's part in the steps of another instance: it replays the log of the instance's home."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from elastic.engines.core.kv_state import LayersKV
from elastic.engines.executor.batch_runner import BatchRunner
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.engines.pipeline.forward import StageForward
from elastic.engines.pipeline.items import (
    AskItem,
    Copied,
    CopyBlocksItem,
    CopyItem,
    EndItem,
    ExchangeStart,
    Failed,
    FlipItem,
    ForgetItem,
    Located,
    LogConnection,
    MoveBlocksItem,
    QuestionRefused,
    ReleaseItem,
    SectorRef,
    StepItem,
)
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.transport import Transport
from elastic.engines.pipeline.turn import Turn
from elastic.engines.pipeline.written_blocks import Blocks, require_known_sectors, sectors_of
from elastic.errors import ElasticError, RankLost, StateError
from elastic.kvcache.storage.guest import GuestMemory
from elastic.memory.rate_limit import YieldingPace

logger = logging.getLogger(__name__)
CREATED_BYTES = 1 << 20
"""Of pages that are created at a time while others compute."""


class GuestStage:
    """Shards of another instance, its home, as they are computed here: keys and values, sequences, and a thread.

    It ends when the home says so, when the log has ended, or when the log does not fit what is here; then its transport
    is closed, so that nobody waits for it. Its memory is free then, but where the log has ended without a word: what a
    home that was killed has here may be needed, until `close`.
    """

    def __init__(
        self,
        rank: str,
        path: LayerPath,
        log: LogConnection,
        transport: Transport,
        memory: GuestMemory,
        runner: BatchRunner,
        forward: StageForward,
        turn: Turn,
        exchange: KVExchange,
    ) -> None:
        self.path = path
        self.memory = memory
        self._rank, self._log, self._transport = rank, log, transport
        self._runner, self._forward, self._turn, self._exchange = runner, forward, turn, exchange
        self._shards: frozenset[int] = frozenset(path.shards_of(rank))  # those that steps are computed in
        self._plans = path.plans(rank)
        self._handled = 0
        self._sectors_as_of = 0  # the last item that changed sectors, counted from 1
        self._progress = threading.Condition()  # of `_handled` and `ended`
        self.steps = 0
        """Of the home that came here so far."""
        self.ended = False
        """True when it computes nothing more."""
        self.told = False
        """Whether somebody knows of what is kept here."""
        self._tables = threading.Lock()  # held while sectors and shards come and go, and while blocks are cleared
        self._copying = threading.Lock()
        self._copy_error = ""  # why a copy with which a flip comes failed
        self.thread = threading.Thread(target=self._run, name=f"elastic-stage-{path.home}", daemon=True)
        """Does what the log says, once it is started."""

    # -- what the fleet asks, from any thread

    def prepare(
        self, shards: Sequence[int], exchange: ExchangeStart, timeout_s: float, *, coordinated: bool = True
    ) -> None:
        """Have room for the keys and values of shards, in all sectors that the home has.

        Waits until the log is as far as the exchange says. Raises `CapacityError`, `StateError`; nothing has changed.
        """
        position = exchange.positions.get(self._rank, 0)
        with self._progress:
            if not self._progress.wait_for(lambda: self._handled >= position or self.ended, timeout_s):
                raise StateError(f"the log of {self.path.home!r} is not so far after {timeout_s} s; try again")
        with self._tables:
            self._require_running()
            self.memory.map(exchange.mapped)
            parts = self._beside_own(shards)
        self._make_room(parts, self._exchange.pace if coordinated else None)
        with self._tables:
            self._answer(Located(self._sectors_as_of, self.memory.layer_pages(parts)))

    def copy(self, shards: Sequence[int], source: LayersKV, blocks: Blocks | None, *, coordinated: bool) -> int:
        """Copy keys and values of shards that are prepared; return bytes. See `KVExchange`."""
        with self._copying:
            return self._copy(source, shards, blocks, coordinated=coordinated)

    def give_up(self, shards: Sequence[int]) -> None:
        """Undo `prepare`. Raises `StateError` for shards that steps are computed in."""
        with self._copying, self._tables:
            self._require_running()
            used = sorted(self._shards & set(shards))
            if used:
                raise StateError(f"shards {used} of {self.path.home!r} are computed here; they cannot be given up")
            self._drop_kv(self._beside_own(shards))

    def layers_kv(self, shards: Sequence[int]) -> LayersKV:
        """Say where keys and values of shards lie.

        Raises `StateError` for shards whose are not here, and for a place that others cannot read.
        """
        with self.memory.lock:
            self._require_running()
            position = self._handled  # before a look: what is mapped meanwhile is told of an earlier one
            parts = self._exchange.places(shards)
            self._require_prepared(parts)
            return replace(self._exchange.locate(self.memory, sorted(parts)), position=position)

    def kept_layers(self, epoch: int) -> LayersKV:
        """Say where the keys and values of its shards lie when it was closed to `keep` them.

        Raises `StateError` where they are not, or were not computed by the path of that epoch.
        """
        if not self.ended or self.path.epoch != epoch:
            raise StateError(f"what {self.path.home!r} has here is of epoch {self.path.epoch}, not {epoch}")
        with self.memory.lock:
            parts = self._exchange.places(self._shards)
            self._require_prepared(parts)
            self.told = True
            return self._exchange.locate(self.memory, sorted(parts))

    def close(self, *, keep: bool = False) -> None:
        """End it; its memory is free then, unless it is to `keep` what is written. Not from its own thread.

        Can be called twice, and frees what was kept.
        """
        self._stop()
        if self.thread.ident is None:
            self._end(keep=keep)
        else:
            self.thread.join()
        with self._copying, self._tables:
            if not keep:
                self.memory.close()
            elif self.memory.layers:
                self.memory.allot(self.memory.mapped_count)

    # -- the log

    def _run(self) -> None:
        keep = False
        try:
            while not self.ended:
                with self._turn.step_expected() if self._runner.rows else nullcontext():
                    item = self._log.receive()  # sequences that are live here wait with it
                if not self._do(item):
                    break
                with self._progress:
                    self._handled += 1
                    self._progress.notify_all()
            keep = self.ended  # who closes it says what becomes of it
        except (EOFError, RankLost):
            keep = True  # the home has gone
        except Exception as error:  # whatever it is, nobody may wait for this rank any more
            if not self.ended:
                logger.exception("rank %s computes layers of %s no more", self._rank, self.path.home)
                self._answer(Failed(-1, str(error)))
        finally:
            self._end(keep=keep)

    def _do(self, item: Any) -> bool:
        """Do what an item says; return whether others may follow."""
        match item:
            case StepItem():
                self._step(item)
            case ForgetItem():
                self._change_sectors(item.mapped, item.unmapped)
                self._runner.remove(item.removed)
            case CopyItem():
                self._change_sectors(item.mapped, item.unmapped)
                self._answer(self._copied(item))
            case CopyBlocksItem():
                self._answer(self._moved_together(item))
            case MoveBlocksItem():
                self._runner.cache.renumber(item.moves)
            case AskItem():
                try:
                    self._answer(self.layers_kv(item.shards))
                except ElasticError as error:
                    self._answer(QuestionRefused(str(error)))
            case FlipItem():
                self._flip(item)
            case ReleaseItem():
                with self._copying, self._tables:
                    self._drop_kv(self._beside_own(item.shards))
            case EndItem():
                return False
            case _:
                raise StateError(f"the log of {self.path.home!r} has {type(item).__name__}, which no rank understands")
        return True

    def _step(self, item: StepItem) -> None:
        """Compute a step. An error of the model is the step's alone; whoever waits for it is told."""
        self.steps += 1
        plan = self._plans[item.copy] if item.epoch == self.path.epoch else None
        if plan is None:
            raise StateError(
                f"step {item.number} of {self.path.home!r} is of epoch {item.epoch}, the path here of {self.path.epoch}"
            )
        self._change_sectors(item.mapped, item.unmapped)
        self._runner.remove(item.removed)
        for sequence in item.added:
            self._runner.add(sequence)
        with self._tables:
            inputs = self._runner.inputs(item.chunks)
        try:
            self._forward.run(plan, self._transport, item.number, inputs)
        except RankLost as error:  # the home says what becomes of the step
            logger.warning("step %d of %s was lost: %s", item.number, self.path.home, error)
        except Exception as error:  # whatever the model raises
            logger.exception("step %d of %s failed", item.number, self.path.home)
            self._answer(Failed(item.number, str(error)))

    def _flip(self, item: FlipItem) -> None:
        """Go by another path. Keys and values of shards that are computed elsewhere by it stay until `ReleaseItem`."""
        if self._copy_error:
            raise StateError(f"keys and values of {self.path.home!r} could not be copied: {self._copy_error}")
        behind = item.path.epoch - self.path.epoch  # who has no part in the path is not told of others that change it
        if item.path.home != self.path.home or (behind != 1 if self._shards else behind < 1):
            raise StateError(f"{item.path} does not follow {self.path}")
        shards = frozenset(item.path.shards_of(self._rank))
        self._require_prepared(self._exchange.places(shards))
        self._runner.remove([name for name, _ in item.sequences] if shards else [*self._runner.rows])
        for sequence, blocks in item.sequences:
            self._runner.add(sequence, blocks)
        self.path, self._shards, self._plans = item.path, shards, item.path.plans(self._rank)

    def _copied(self, item: CopyItem) -> Copied:
        try:
            with self._copying:
                return Copied(self._copy(item.source, item.shards, item.blocks, coordinated=False))
        except ElasticError as error:
            self._copy_error = str(error) if item.flips else ""
            return Copied(0, str(error))

    def _moved_together(self, item: CopyBlocksItem) -> Copied:
        try:
            self._runner.cache.copy(item.moves)
        except Exception as error:  # no memory, say: nobody has read the copies yet
            return Copied(0, str(error))
        return Copied(0)

    # -- inside

    def _copy(self, source: LayersKV, shards: Sequence[int], blocks: Blocks | None, *, coordinated: bool) -> int:
        self._require_running()
        parts = self._exchange.parts_of(shards) - self._exchange.parts_of(self._shards)  # steps write the others
        coming = sorted(self._exchange.places_of(parts))
        self._require_prepared(coming)
        if blocks is not None:
            require_known_sectors(source, self.memory, blocks)
            self.memory.map(sectors_of(self.memory, blocks))  # such as are new; the log tells of them again
        return self._exchange.copy(self.memory, source, coming, blocks, lambda: not self.ended, coordinated=coordinated)

    def _change_sectors(self, mapped: Sequence[SectorRef], unmapped: Sequence[SectorRef]) -> None:
        if mapped or unmapped:
            with self._tables:
                self.memory.unmap(unmapped)
                self.memory.map(mapped)
                self._sectors_as_of = self._handled + 1
                if mapped and self.memory.layers:
                    self._answer(Located(self._sectors_as_of, self.memory.layer_pages(self.memory.layers, mapped)))

    def _make_room(self, parts: frozenset[int], pace: YieldingPace | None) -> None:
        """Have parts of the KV cache be here; if one fails, none is. With a pace, some at a time between two steps."""
        left, added = sorted(parts), list[int]()
        if pace is not None:
            self._create_pages(self.memory.growth(parts), pace)
        try:
            while left:
                with nullcontext() if pace is None else self._turn, self._tables:
                    self._require_running()
                    until_s = math.inf if pace is None else time.perf_counter() + pace.between_s
                    while left and time.perf_counter() < until_s:
                        self.memory.add_layers(left[:1])
                        added.append(left.pop(0))
                    self._runner.cache.refresh()
        except BaseException:
            with self._tables:
                self._drop_kv(frozenset(added))
            raise

    def _create_pages(self, count: int, pace: YieldingPace) -> None:
        """Have so many pages be ready to be mapped, as far as the budget allows."""
        pool = self.memory.kv.pool
        step = max(1, CREATED_BYTES // pool.page_bytes)
        for ready in range(step, count + step, step):
            lacking = min(ready, count) - len(pool.cached)
            if lacking > 0:
                with pace.copying(lacking * pool.page_bytes, "pages"):
                    pool.make_ready(min(ready, count))

    def _beside_own(self, shards: Iterable[int]) -> frozenset[int]:
        """Return where what shards need lies, without that which steps write here."""
        return self._exchange.places(shards) - self._exchange.places(self._shards)

    def _drop_kv(self, parts: frozenset[int]) -> None:
        held = parts & frozenset(self.memory.layers)
        if held:
            self.memory.remove_layers(held)
            self._runner.cache.refresh()

    def _answer(self, answer: Any) -> None:
        with suppress(ElasticError):  # the home has gone, or will ask nothing any more
            self._log.send(answer)

    def _require_prepared(self, parts: Iterable[int]) -> None:
        absent = sorted(set(parts) - set(self.memory.layers))
        if absent:
            raise StateError(f"the keys and values {absent} of {self.path.home!r} were not prepared at {self._rank!r}")

    def _require_running(self) -> None:
        if self.ended:
            raise StateError(f"layers of {self.path.home!r} are computed here no more")

    def _stop(self) -> None:
        with self._progress:
            self.ended = True
            self._progress.notify_all()
        self._log.close()
        self._transport.close()

    def _end(self, *, keep: bool) -> None:
        """Have nobody wait for it, and its memory be free, unless that is kept."""
        self._stop()
        with self._copying, self._tables:
            self._runner.cache.close()
            if not keep:
                self.memory.close()
