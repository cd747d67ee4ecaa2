"""Shards of an engine's layers that change the rank that computes them, while it goes on.

What they have of keys and values is copied beside the steps before, in rounds, and only what the last steps have
written while none is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap

from elastic.engines.continuous.ranks.home_kv import HomeKV
from elastic.engines.continuous.ranks.hosted_stages import HostedStages
from elastic.engines.continuous.reports import EngineReports
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.core.kv_state import LayersKV
from elastic.engines.pipeline.home import HomeExecutor, PathChange, ways_of
from elastic.engines.pipeline.items import ExchangeStart, SectorRef
from elastic.engines.pipeline.path import LayerPath, ShardMove, Way
from elastic.engines.pipeline.written_blocks import Blocks, DirtyBlockTracker, sectors_of
from elastic.errors import ConfigError, RankLost, StateError

ANSWER_S = 30.0
"""For how long a rank is waited for that copies or is asked something."""
HURRIED_S = 0.25
"""For how long steps are short behind each part of an exchange that is hurried."""
HURRY = 2.0
"""For how long steps wait after a part of a hurried flip for the next one, in units of what they may wait for at a time
else."""


@dataclass(frozen=True)
class Flipped:
    """What a change of the path took."""

    stalled_ms: float
    """For which no step of the instance was computed."""
    copied_bytes: int
    """Besides what `copy` has: shortly before, in that time, and by other ranks ahead of their next step."""


class LayerExchange:
    """What a rank asks of its engine to have layers computed elsewhere. Thread-safe; not for listeners.

    What moves are shards, numbered as in `LayerPath`; where layers are not cut, a shard is a layer. At their home:
    `begin`; at the rank that gets them `prepare`, and `copy` in rounds, by the home's `written_blocks`; then at the
    home `flip`, or `end` where it is given up. Shards that come home are prepared and copied by the home itself, which
    is named as `home` then.
    """

    def __init__(
        self, loop: StepLoop, home: HomeExecutor, kv: HomeKV, stages: HostedStages, reports: EngineReports
    ) -> None:
        self._loop, self._home, self._kv, self._stages, self._reports = loop, home, kv, stages, reports
        self._written: DirtyBlockTracker | None = None
        self._flipping: PathChange | None = None  # it is not known yet that all was copied

    def begin(self, shards: Sequence[int]) -> ExchangeStart:
        """Note from now on which blocks are written, and keep all sectors until `flip` or `end`.

        What holds keys and values counts as written now; of several copies of layers what the sequences of the shards'
        copy have, and no more than that may be copied. Raises `StateError` for an exchange that has begun,
        `ConfigError` for shards that the model has not, or of several copies.
        """

        def begin() -> ExchangeStart:
            if wrong := sorted(set(shards) - set(range(len(self._home.path.ranks)))):
                raise ConfigError(f"shards {wrong}: the model has {len(self._home.path.ranks)}")
            copy = self._copy_of(shards)
            self.require_none()
            self._loop.require_all_ranks()
            self._kv.memory.keep_sectors = True
            try:
                self._home.flush()
            except BaseException:
                self._kv.memory.keep_sectors = False
                raise
            form = self._kv.exchange.format
            self._written = DirtyBlockTracker(form.windows, form.block_tokens, copy, self._kv.memory)
            self._loop.scheduler.written = self._written.note
            self._note_computed(self._written)
            mapped = tuple(starmap(SectorRef, self._kv.memory.mapped_sectors))
            return ExchangeStart(mapped, {rank: link.sent for rank, link in self._home.links.items()})

        return self._loop.between_steps(begin)

    def written_blocks(self) -> Blocks:
        """Return the blocks, by group, that steps which are over have written since this was asked.

        Whoever asks copies them; where that fails, the exchange is given up. It waits for no step.
        """
        return self._exchange().take()

    def flip(
        self,
        path: LayerPath,
        sources: Mapping[Way, LayersKV] | None = None,
        timeout_s: float = ANSWER_S,
        *,
        hurried: bool = False,
    ) -> Flipped:
        """Have steps go by another path, in which shards are other ranks', which have prepared them: no rank both gives
        and gets some.

        What was written since `written_blocks` is copied while no step is in flight, or by another rank ahead of its
        part in the next one; the exchange ends with it. `sources` are where the keys and values of the shards lie that
        go from one rank to another, as was told before; those that are not told of are asked for. Raises `StateError`
        where they cannot be copied, by one of the ranks or by several, `RankLost` where a rank has gone: nothing has
        changed then, and what would have been copied is told again. A rank that is found not to have copied when the
        steps go by the path is lost, too (`RankLost`): no step has a result then, and `recover` goes by the path of
        before.

        The memory of what left this rank is given back afterwards, for a small part of a step between two of them.

        What is done between steps is done in three parts. `hurried`: steps wait a little after each for the next one,
        so that it takes one pause, and not a step for each.
        """
        follow_s = HURRY * self._kv.exchange.pace.between_s if hurried else 0.0
        between_steps = partial(self._loop.between_steps, follow_s=follow_s)
        waited_s = self._loop.followed_s
        try:
            flip = between_steps(lambda: self._begin_flip(path, sources or {}, timeout_s))
            if flip.asked:
                self._home.hear(flip, timeout_s)
                between_steps(lambda: self._copy_ahead(flip, timeout_s))
            copied = self._take_copied(flip)
            for last in (False, False, True):
                if between_steps(partial(self._flip, flip, timeout_s, last=last)):
                    break
                self._home.hear(flip, timeout_s)
            copied += flip.copied_bytes + self._home.confirm()
        except RankLost as error:
            if error.rank in self._home.path.helpers:  # nobody waits in a step for one that may only hang
                self._loop.lose(error)
                self._home.abort(ending=False)
            raise
        left = self._loop.between_steps(partial(self._finish_flip, flip))
        while left:
            left = self._loop.between_steps(partial(self._drop_away, left))
        return Flipped(flip.stalled_ms + (self._loop.followed_s - waited_s) * 1e3, copied)

    def end(self) -> None:
        """End what `begin` began. Can be called twice."""
        self._loop.between_steps(self._end)

    def pause(self) -> None:
        """Begin no step until `resume`, and finish those in flight: the stalling form of an exchange.

        Raises `RankLost` where one was lost. (KunServe, section 4.2)
        """

        def pause() -> None:
            self._loop.settle_intact()
            self._loop.paused = True

        self._loop.between_steps(pause)

    def resume(self) -> None:
        """Begin steps again; if they were not paused, nothing happens."""

        def resume() -> None:
            self._loop.paused = False

        self._loop.between_steps(resume)

    def prepare(self, home: str, shards: Sequence[int], mapped: ExchangeStart, *, coordinated: bool = True) -> None:
        """Make room for the keys and values of shards that come here; `mapped` is what the exchange began with.

        `coordinated`: at a rank that is not their home part by part, behind what computes here.

        Raises `CapacityError` where there is none, and nothing has changed.
        """
        if home != self._home.rank:
            self._stages.of(home).prepare(shards, mapped, ANSWER_S, coordinated=coordinated)
            return
        self._loop.between_steps(partial(self._kv.prepare, shards))

    def copy(
        self,
        home: str,
        shards: Sequence[int],
        source: LayersKV,
        blocks: Blocks | None = None,
        *,
        coordinated: bool = True,
    ) -> int:
        """Copy keys and values of shards that are prepared; return bytes.

        `blocks` are those to copy, by group, None: all that are in sectors which both sides have. `coordinated`: behind
        what computes here, in chunks. (KunServe, section 4.2)

        Raises `StateError` where blocks are in sectors that the source does not know: ask for it anew.
        """
        if home != self._home.rank:
            return self._stages.of(home).copy(shards, source, blocks, coordinated=coordinated)
        return self._kv.copy(shards, source, blocks, coordinated=coordinated)

    def give_up(self, home: str, shards: Sequence[int]) -> None:
        """Undo `prepare`. Raises `StateError` for shards that steps are computed in."""
        if home != self._home.rank:
            self._stages.of(home).give_up(shards)
            return

        def give_up() -> None:
            used = sorted(set(shards) & set(self._home.path.shards_of(self._home.rank)))
            if used:
                raise StateError(f"shards {used} of {self._home.rank!r} are computed here; they cannot be given up")
            self._kv.drop(self._kv.exchange.places(shards) - self._kv.own_places)

        self._loop.between_steps(give_up)

    def shorten_steps(self) -> None:
        """Have steps be short for a while, since what is exchanged waits for their ends."""
        self._loop.scheduler.short_until_s = time.perf_counter() + HURRIED_S

    # -- inside the engine, on the loop's thread

    def require_none(self) -> None:
        """Raise `StateError` where an exchange has begun."""
        if self._written is not None:
            raise StateError("an exchange has begun; end it first")

    def void(self) -> bool:
        """End an exchange since a rank was lost, and a flip that is not finished; see `_undo_flip`."""
        self._reports.end()
        undone = self._undo_flip()
        self._end()
        return undone

    def _end(self) -> None:
        self._written = self._loop.scheduler.written = None
        self._loop.scheduler.let_go()
        self._kv.memory.keep_sectors = False

    def _undo_flip(self) -> bool:
        """Go by the path of before if the last flip is not finished, and what it moves was not copied; return whether.

        No step is in flight.
        """
        flip, self._flipping = self._flipping, None
        if flip is None:
            return False
        try:
            self._home.confirm()
        except RankLost:  # so no step by the path has a result
            self._home.path = replace(flip.before, epoch=flip.path.epoch)
            return True
        return False

    def _begin_flip(self, path: LayerPath, sources: Mapping[Way, LayersKV], timeout_s: float) -> PathChange:
        """Ask other ranks where what moves to another path lies, of which they have not told or have new sectors.

        Where there are none of these, `_copy_ahead` has begun then.
        """
        self._exchange()
        self._loop.require_all_ranks()
        flip = PathChange(self._home.path, path, ways_of(path), self._moves(path))
        told = {move: sources.get((move.source, move.target)) for move in flip.moves}
        flip.located |= {move: each for move, each in told.items() if each is not None}
        if not self._home.ask_late(flip, self._kv.memory.mapped_sectors):
            self._copy_ahead(flip, timeout_s)
        return flip

    def _copy_ahead(self, flip: PathChange, timeout_s: float) -> None:
        """Have the other ranks that shards go to copy beside the next step: so they say that they can."""
        flip.blocks = self._exchange().take()
        try:
            pages = self._locate(flip, flip.blocks, timeout_s)
            flip.copied_ahead = self._home.copy(pages, flip.blocks, timeout_s)
        except BaseException:
            self._exchange().add(flip.blocks)
            raise

    def _take_copied(self, flip: PathChange) -> int:
        """Wait until they have; return bytes. From any thread; raises `StateError` where one could not."""
        written = self._exchange()
        try:
            copied = flip.copied_ahead.wait()
        except BaseException:
            written.add(flip.blocks)
            raise
        if any(move.target == self._home.rank for move in flip.moves):
            written.add(flip.blocks)  # this rank has not copied them
        return copied

    def _flip(self, flip: PathChange, timeout_s: float, *, last: bool) -> bool:
        """Change the path; return False where a source has yet to tell of new sectors, unless it is the `last` try."""
        self._loop.settle_intact()
        start = time.perf_counter()
        written = self._exchange()
        blocks = written.take()
        try:
            late = not last and self._home.ask_late(flip, sectors_of(self._kv.memory, blocks))
            if late:
                written.add(blocks)
            else:
                self._go_by(flip, blocks, timeout_s)
        except BaseException:
            written.add(blocks)
            raise
        flip.stalled_ms += (time.perf_counter() - start) * 1e3
        return not late

    def _go_by(self, flip: PathChange, blocks: Blocks, timeout_s: float) -> None:
        pages = self._locate(flip, blocks, timeout_s)
        flip.copied_bytes = sum(
            self._kv.copy(move.shards, pages[move], blocks, coordinated=False)
            for move in flip.moves
            if move.target == self._home.rank
        )
        self._home.flip(flip, pages, blocks, timeout_s)
        self._flipping = flip
        self._reports.end()  # until all of it is copied

    def _finish_flip(self, flip: PathChange) -> Sequence[int]:
        """End the exchange of a flip, of which all is copied; return the parts of the KV cache that have yet to go."""
        if self._flipping is not flip:  # a rank was lost meanwhile: all is at home again
            return ()
        self._flipping = None
        self._end()
        self._home.release(flip.moves)
        self._reports.begin()
        leaving = [shard for move in flip.moves if move.source == self._home.rank for shard in move.shards]
        return self._drop_away(tuple(sorted(self._kv.exchange.places(leaving))))

    def _locate(self, flip: PathChange, blocks: Blocks, timeout_s: float) -> dict[ShardMove, LayersKV]:
        """Return where the sectors of blocks lie at the ranks that shards go from."""
        sectors = sectors_of(self._kv.memory, blocks)
        if self._home.ask_late(flip, sectors):
            self._home.hear(flip, timeout_s)
        pages = {move: source.of_sectors([sector for _, sector in sectors]) for move, source in flip.located.items()}
        for move in flip.moves:
            if move.source == self._home.rank:
                pages[move] = self._kv.locate(move.shards, sectors)
        return pages

    def _drop_away(self, parts: Sequence[int]) -> Sequence[int]:
        """Give back the memory of parts of the KV cache, unless they are needed here again; return those left."""
        until_s = time.perf_counter() + self._kv.exchange.pace.between_s
        for done, part in enumerate(parts, 1):
            if part in self._kv.memory.layers and part not in self._kv.own_places:
                self._kv.drop((part,))
                if time.perf_counter() > until_s:
                    return parts[done:]
        return ()

    def _moves(self, path: LayerPath) -> tuple[ShardMove, ...]:
        """Return what another path moves. Raises `ConfigError`, `StateError` where it cannot be done."""
        before = self._home.path
        forms = [(each.home, each.shards, each.copies, len(each.ranks)) for each in (path, before)]
        same = forms[0] == forms[1]
        if not same or path.epoch != before.epoch + 1:
            raise ConfigError(f"{path} does not follow {before}")
        moves = before.moves_to(path)
        if not moves:
            raise ConfigError(f"{path} changes no shard of {before}")
        if both := {move.source for move in moves} & {move.target for move in moves}:
            raise ConfigError(f"{path}: {min(both)!r} would give shards and get some; flip these one after the other")
        self._copy_of([shard for move in moves for shard in move.shards])
        for shards, _, target in moves:
            if target == self._home.rank and not self._kv.exchange.places(shards) <= frozenset(self._kv.memory.layers):
                raise StateError(f"shards {shards} were not prepared at {target!r}")
            if target != self._home.rank and target not in self._home.links:
                raise StateError(f"rank {target!r} is not attached to the engine of {self._home.rank!r}")
        return moves

    def _exchange(self) -> DirtyBlockTracker:
        if self._written is None:
            raise StateError("no exchange has begun; call begin first")
        return self._written

    def _note_computed(self, written: DirtyBlockTracker) -> None:
        """Have all that is computed be copied, and of one copy of the layers what others may share, too.

        Of several copies, no other sequence shares what was computed before, which is copied for live ones alone; and
        blocks that come free are nobody else's meanwhile: else one could be written over that a sequence of another
        copy has begun to write.
        """
        scheduler = self._loop.scheduler
        if self._home.path.copies > 1:
            scheduler.blocks.forget_names()
            scheduler.retain()
        else:
            with self._kv.memory.lock:  # also those of sequences that have ended, which have yet to come free
                written.add(tuple(tuple(pool.prefixes.names) for pool in scheduler.blocks.pools))
        for sequence in scheduler.begun:
            kv = sequence.kv()
            written.note(kv.blocks, 0, kv.computed, sequence.cohort.copy)

    def _copy_of(self, shards: Sequence[int]) -> int:
        """Return the copy of the layers that shards are of. Raises `ConfigError` for those of several."""
        copies = {shard // self._home.path.numbers for shard in shards} or {0}
        if len(copies) > 1:
            raise ConfigError(f"shards {sorted(shards)} are of {len(copies)} copies; exchange those of one")
        return copies.pop()
