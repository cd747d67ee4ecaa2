"""The executor of an engine of whose layers other ranks compute some: it tells them of each step, and samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap

from elastic.clock import settle
from elastic.controller.sensors.sliding_window import moving_average
from elastic.engines.core.kv_state import LayersKV
from elastic.engines.core.step import Step, StepResult
from elastic.engines.executor.model_runner import BegunStep, ModelRunner
from elastic.engines.pipeline.forward import StageForward, StageTiming
from elastic.engines.pipeline.items import AskItem, CopyItem, FlipItem, LogConnection, ReleaseItem, SectorRef, StepItem
from elastic.engines.pipeline.path import LayerPath, ShardMove, StagePlan
from elastic.engines.pipeline.stage_link import CopyAnswers, StageLink, all_answers
from elastic.engines.pipeline.step_threads import StepThreads
from elastic.engines.pipeline.transport import StepFailure, Transport
from elastic.engines.pipeline.turn import WEIGHT, Turn
from elastic.engines.pipeline.written_blocks import Blocks, unknown_sector
from elastic.errors import ElasticError, RankLost, StateError
from elastic.kvcache.storage.paged import BlockMemory

Ways = tuple[tuple[StagePlan, tuple[str, ...]], ...]
"""Of each copy of a path's layers, what its home does in a step, and who else has a part in it; (): nobody."""


@dataclass
class PathChange:
    """A change of the path of an instance's steps, from its beginning to its end."""

    before: LayerPath
    path: LayerPath
    ways: Ways
    """Of `path`."""
    moves: tuple[ShardMove, ...]
    located: dict[ShardMove, LayersKV] = field(default_factory=dict)
    """Where what other ranks give lies, as far as that was told."""
    asked: list[ShardMove] = field(default_factory=list)
    """Those whose source is asked."""
    blocks: Blocks = ()
    """That other ranks copy ahead of it."""
    copied_ahead: CopyAnswers = field(default_factory=CopyAnswers)
    """Their answers."""
    copied_bytes: int = 0
    """That the home copied while no step was computed."""
    stalled_ms: float = 0.0
    """For which none was."""


class HomeExecutor:
    """An `Executor`. Its calls come from the thread of the engine's loop, but for `abort` and what is said otherwise.

    A step that is lost on its way fails with `RankLost`: nothing of it was sampled. While no other rank has a part in
    the path it is computed as by a `ModelRunner` alone.
    """

    def __init__(self, runner: ModelRunner, memory: BlockMemory, turn: Turn, path: LayerPath) -> None:
        """`path` is of an engine that computes all of its layers."""
        self.path = path
        self.links: dict[str, StageLink] = {}
        """The ranks that were told of the engine, also such as have no part in the path yet."""
        self.transport: Transport | None = None
        self.forward: StageForward | None = None
        """Set while there are links."""
        self._runner, self._memory, self._turn = runner, memory, turn
        self._ways: Ways = ()
        self._copies = CopyAnswers()  # ahead of the last flip
        self.cohorts = 1
        """How many steps may be in flight."""
        self.step_s = 0.0
        """Seconds of a step that this rank computed by itself, in the mean of the last; 0.0: there was none."""
        self.hop_s = 0.0
        """Seconds that a step waits for another rank at a time, beyond what that computes for it, in the mean of the
        last while one was in flight; 0.0: there was none."""
        self.threads = StepThreads()
        """Which compute steps of it beside the loop's."""
        self._aborted = False

    @property
    def rank(self) -> str:
        """This rank's name among others."""
        return self.path.home

    # -- steps

    def execute(self, step: Step) -> Future[StepResult]:
        """Compute a step; see `Executor`. With several cohorts, and ranks that have a part in it, it is in flight."""
        if not self._ways:  # it computes all layers
            if self.links:
                self._note_changes(step.removed)
            with self._turn:
                began_s = time.perf_counter()
                computed = self._runner.execute(step)
                seconds = time.perf_counter() - began_s
            self.step_s = moving_average(self.step_s or seconds, seconds, WEIGHT)
            return computed
        plan, _ = self._ways[step.cohort % self.path.copies]
        done: Future[StepResult] = Future()
        try:
            self._note_changes(step.removed)
            begun = self._runner.begin(step, eager=self.cohorts > 1)
            self._send(step)
        except Exception as error:  # the sequences of the step end with it, as with an error of the model
            done.set_exception(error)
            return done
        work = partial(self._compute, plan, step.number, begun)
        if self.cohorts > 1:
            return self.threads.submit(work)
        settle(done, work)
        return done

    def remove(self, sequences: tuple[str, ...]) -> None:
        """Forget sequences when no further step may come; other ranks, too, and sectors that are given back."""
        self._runner.remove(sequences)
        if self.links:
            self._note_changes(sequences)
            for rank in self.path.helpers:
                with suppress(RankLost):  # the next step says so, or nobody needs to know
                    self.links[rank].flush()

    def prepare(self) -> bool:
        """Do some of what later steps gain by, since no step waits; return whether there was any of it."""
        graphs = self._runner.graphs
        if self.links or graphs is None:  # with links the turn may be another's any time
            return False
        with self._turn:
            return graphs.prepare()

    def set_cohorts(self, count: int) -> None:
        """Have as many steps be in flight. None is."""
        self.cohorts = count
        self.threads.resize(count if count > 1 and self._ways else 0)

    # -- other ranks

    def attach(self, rank: str, log: LogConnection, on_lost: Callable[[], object]) -> None:
        """Have a rank that knows nothing yet be told of what changes; `on_lost` may be called from any thread."""
        self._note_changes(())
        self.links[rank] = StageLink(rank, log, starmap(SectorRef, self._memory.mapped_sectors), on_lost)

    def detach(self, rank: str) -> None:
        """Have a rank without a part in the path be told that it is over; unknown: nothing happens."""
        link = self.links.pop(rank, None)
        if link is not None:
            link.close(end=True)

    def flush(self) -> None:
        """Tell all ranks what is to be told. Raises `RankLost`."""
        self._note_changes(())
        for link in self.links.values():
            link.flush()

    def abort(self, *, ending: bool = True) -> None:
        """Have every step in flight end with `RankLost` now; with `ending` every question, too: all ranks are told that
        it is over.

        From any thread. Afterwards only `reset` makes sense, and `still_at` if it is not over yet.
        """
        self._aborted = True
        if self.transport is not None:
            self.transport.close()
        for link in list(self.links.values()) if ending else ():
            link.close(end=True)

    def reset(self, path: LayerPath) -> None:
        """Compute all layers here again, without other ranks. No step is in flight."""
        for link in self.links.values():
            link.close(end=True)
        if self.transport is not None:
            self.transport.close()
        self.links, self.transport, self._aborted = {}, None, False
        self._copies = CopyAnswers()
        self._go_by(path, ways_of(path))

    # -- shards that change their rank

    def ask_late(self, flip: PathChange, sectors: Collection[tuple[int, int]]) -> bool:
        """Ask ranks that shards go from, and that have not told yet where these sectors, (group, sector), lie there.

        Returns whether any is asked; `hear` waits for what they say. Raises `RankLost`.
        """
        flip.asked = [
            move for move in flip.moves if move.source != self.rank and not self._has_told(flip, move, sectors)
        ]
        for move in flip.asked:
            self._ask_pages(move.source, move.shards)
        return bool(flip.asked)

    def hear(self, flip: PathChange, timeout_s: float) -> None:
        """Wait for what `ask_late` has asked. From any thread.

        Raises the first error when all have answered: `RankLost`, `StateError`.
        """
        pages = all_answers((partial(self._pages, move.source, move.shards) for move in flip.asked), timeout_s)
        flip.located |= zip(flip.asked, pages, strict=True)

    def _has_told(self, flip: PathChange, move: ShardMove, sectors: Collection[tuple[int, int]]) -> bool:
        """Return whether the source of a move told where it lies when it had these sectors, as they are.

        It may have told of an earlier one, that was given back since: its number is soon that of another.
        """
        told, told_at = flip.located.get(move), self.links[move.source].told_at
        if told is None or unknown_sector(told, self._memory, sectors):
            return False
        return all(told_at.get(sector, 0) <= told.position for sector in sectors)

    def still_at(self, rank: str, shards: tuple[int, ...], timeout_s: float) -> LayersKV | None:
        """Say where a rank has keys and values of shards when it has done all that it was told; None: it has gone."""
        try:
            self._ask_pages(rank, shards)
            return self._pages(rank, shards, timeout_s)
        except StateError:
            return None

    def copy(
        self, copies: Mapping[ShardMove, LayersKV], blocks: Blocks, timeout_s: float, *, flips: bool = False
    ) -> CopyAnswers:
        """Have targets of moves, but the home, copy blocks from where these lie.

        Raises `RankLost`; nobody copies for it then.
        """
        self._note_changes(())
        asked: list[StageLink] = []
        try:
            for move, source in copies.items():
                if move.target == self.rank:
                    continue
                link = self.links[move.target]
                link.send(CopyItem(move.shards, source, blocks, *link.take_sectors(), flips))
                asked.append(link)
        except RankLost:
            with suppress(ElasticError):
                CopyAnswers(asked, timeout_s, flips=flips).wait()
            raise
        return CopyAnswers(asked, timeout_s, flips=flips)

    def flip(self, change: PathChange, copies: Mapping[ShardMove, LayersKV], blocks: Blocks, timeout_s: float) -> None:
        """Have all steps from now on go by another path. No step is in flight.

        What goes from elsewhere to another rank, of `copies`, is copied there ahead of the first of these steps, and
        nobody waits for it: `confirm` says what became of it, and no step has a result before. All ranks keep what they
        have until `release`. Raises `RankLost` where a rank that layers go to has gone: steps go on by the path of
        before, if the group does.
        """
        answers = self.copy(copies, blocks, timeout_s, flips=True)
        try:
            self._tell_path(change.path)
        except RankLost:
            with suppress(ElasticError):
                answers.wait()
            raise
        self._copies = answers
        self._go_by(change.path, change.ways)

    def confirm(self) -> int:
        """Return the bytes that were copied for the last flip, when all are. From any thread.

        Raises `RankLost` where a rank could not copy them: no step by the path of that flip has a result then.
        """
        return self._copies.wait()

    def release(self, moves: Iterable[ShardMove]) -> None:
        """Have other ranks drop the keys and values of shards that have gone from them."""
        for move in moves:
            if move.source in self.links:
                with suppress(RankLost):  # the next step says that it is gone
                    self.links[move.source].send(ReleaseItem(move.shards))

    def share_out(self, path: LayerPath) -> None:
        """Have steps go by the copies of a path whose layers are where they are now. No step is in flight.

        Raises `RankLost`.
        """
        for rank in path.helpers:
            self.links[rank].flush()
            self.links[rank].send(FlipItem(path, self._runner.sequences()))
        self._go_by(path, ways_of(path))

    # -- inside

    def _ask_pages(self, rank: str, shards: tuple[int, ...]) -> None:
        """Ask what `_pages` waits for. Raises `RankLost`."""
        self._note_changes(())
        link = self.links[rank]
        link.flush()
        link.send(AskItem(shards))

    def _pages(self, rank: str, shards: tuple[int, ...], timeout_s: float) -> LayersKV:
        answer = self.links[rank].answer(timeout_s)
        if not isinstance(answer, LayersKV):
            raise StateError(f"rank {rank!r} cannot say where shards {shards} are: {getattr(answer, 'error', answer)}")
        return answer

    def _tell_path(self, path: LayerPath) -> None:
        """Tell all ranks of another path whose steps may come to them, or do. Raises `RankLost`; see `flip`."""
        targets = dict.fromkeys(move.target for move in self.path.moves_to(path) if move.target != path.home)
        for rank in dict.fromkeys((*targets, *self.path.helpers, *path.helpers)):
            before, after = ({shard // way.numbers for shard in way.shards_of(rank)} for way in (self.path, path))
            try:
                self.links[rank].flush()  # of a rank that leaves, what it is told later would be out of date
                self.links[rank].send(FlipItem(path, () if after <= before else self._runner.sequences()))
            except RankLost:
                if rank in targets:
                    raise
                # what it had is here or at the target, or the next step says that it is gone

    def _go_by(self, path: LayerPath, ways: Ways) -> None:
        self.path, self._ways = path, ways
        self.set_cohorts(self.cohorts)

    def _note_changes(self, removed: Iterable[str]) -> None:
        """Note for every rank what it is to be told."""
        mapped, unmapped = self._memory.changes()
        if mapped or unmapped:
            new, gone = (tuple(starmap(SectorRef, sectors)) for sectors in (mapped, unmapped))
            for link in self.links.values():
                link.note_sectors(new, gone)
        if removed:
            for rank in self.path.helpers:
                self.links[rank].removed.extend(removed)

    def _send(self, step: Step) -> None:
        """Tell all ranks of its copy of a step; if one is lost, those that were told do not wait for it."""
        copy, added = step.cohort % self.path.copies, tuple(state.id for state in step.added)
        plan, helpers = self._ways[copy]
        try:
            if self._aborted:
                raise RankLost("the other ranks of the path were given up", rank="")
            for rank in helpers:
                link = self.links[rank]
                removed, (mapped, unmapped) = link.take_removed(), link.take_sectors()
                link.send(StepItem(step.number, self.path.epoch, copy, step.chunks, added, removed, mapped, unmapped))
        except ElasticError as error:
            self._fail(plan, step.number, error)
            raise

    def _compute(self, plan: StagePlan, number: int, begun: BegunStep) -> StepResult:
        if self.transport is None or self.forward is None:
            raise StateError("there is no transport to the other ranks of the path; attach one first")
        path, timing = self.path, StageTiming()
        output = self.forward.run(plan, self.transport, number, begun.inputs, timing)
        self._learn_hop(path, timing)
        self.confirm()
        return self._runner.finish(begun, output)

    def _learn_hop(self, path: LayerPath, timing: StageTiming) -> None:
        """Learn from a step what a hop takes: others compute their layers as fast as this rank its own."""
        own = len(path.shards_of(path.home)) / path.shards
        if self.cohorts > 1 or path.copies > 1 or not own:
            return
        elsewhere_s = timing.computed_s * (path.depth - own) / own
        hop_s = max(0.0, timing.waited_s - elsewhere_s) / path.hops
        self.hop_s = moving_average(self.hop_s or hop_s, hop_s, WEIGHT)

    def _fail(self, plan: StagePlan, number: int, error: ElasticError) -> None:
        """Have nobody wait for this rank in a step that is not computed."""
        for rank in plan.awaited_by():
            if self.transport is not None:
                with suppress(ElasticError):
                    self.transport.fail(rank, number, StepFailure.of(error))


def ways_of(path: LayerPath) -> Ways:
    """Return what a home does in the steps of a path."""
    copies = map(path.of_copy, range(path.copies)) if path.helpers else ()
    return tuple((way.plan(path.home), way.helpers) for way in copies)
