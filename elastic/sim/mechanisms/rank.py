"""What a simulated rank does when a fleet has layers change their rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from elastic.cluster.control import stage_questions as ask
from elastic.cluster.control.messages import Apply, Check, Drain, Look
from elastic.engines.continuous.ranks.layer_exchange import HURRIED_S, Flipped
from elastic.engines.core.kv_state import LayersKV
from elastic.engines.pipeline.batches import BatchCount
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.written_blocks import Blocks, DirtyBlockTracker
from elastic.errors import RankLost, StateError
from elastic.sim.core.host import Countdown
from elastic.sim.mechanisms.books import RankBooks
from elastic.sim.mechanisms.instance import RankInstance
from elastic.sim.mechanisms.model import LayeredModel
from elastic.sim.mechanisms.moves import MOVES, RequestMoves
from elastic.sim.mechanisms.path_executor import PathExecutor
from elastic.sim.mechanisms.recovery import SimulatedRecovery
from elastic.sim.mechanisms.stage_turn import StageTurn
from elastic.sim.mechanisms.weights import PLACE, Weights
from elastic.sim.mechanisms.wires import Wires
from elastic.types import RankMemory


class World:
    """The ranks of a fleet, and what lies between them."""

    def __init__(self, model: LayeredModel, wires: Wires) -> None:
        self.model, self.wires = model, wires
        self.ranks: dict[str, SimulatedRank] = {}
        self.turns: dict[str, StageTurn] = {}

    def factor(self, rank: str, layer: int) -> float:
        """Return how much longer, or shorter, a layer takes at a rank than in full."""
        packed = self.model.packed
        return packed.seconds if packed is not None and layer in self.ranks[rank].books.packed else 1.0


class SimulatedRank:
    """Answers the questions of `stage_questions`, of moves and of the runtime."""

    def __init__(self, world: World, instance: RankInstance) -> None:
        self.world, self.instance = world, instance
        self.name = instance.name
        self.books = RankBooks(instance.name, world.model, instance.memory)
        self.weights = Weights(instance, self.books, world.wires)
        self.moves = RequestMoves(instance, world.wires)
        self.stages: set[str] = set()
        self.written: DirtyBlockTracker | None = None
        local = instance.local
        turn = StageTurn(local.host, instance.clock, world.model.rank.sharing.stages)
        self.turn = world.turns[instance.name] = turn
        self.steps = PathExecutor(
            instance.clock,
            world.model,
            world.wires,
            world.turns,
            local.answers,
            local.noise,
            world.factor,
            self.books.path,
        )
        self._flipping: Future[Any] | None = None
        self._batches = BatchCount()
        world.ranks[instance.name] = self
        instance.batches = self.batches
        instance.answer = self.answer

    def answer(self, question: Any) -> Any:
        """Answer a question, at once or by a future. Raises errors of Elastic."""
        if isinstance(question, MOVES):
            return self.moves.answer(question)
        if isinstance(question, Apply | Look | ask.WeightsOf | ask.WeightDigests):
            return self.weights.answer(question)
        match question:
            case ask.OpenPeers():
                return "127.0.0.1", 1
            case ask.MeetPeers() | Drain():
                return None
            case ask.LosePeer(rank):
                return self.lose(rank)
            case ask.MeasureRoom():
                self.weights.retry()
                (pool,) = self.instance.blocks.pools
                return replace(self.books.room(pool.held), step_s=self.instance.local.step_s)
            case ask.SetCap(sectors):
                return self.instance.do_between(partial(self._set_cap, sectors))
            case ask.CapReached():
                return self.instance.do_between(self._cap_reached)
            case Check():
                return self.check()
        return self._of_layers(question)

    def check(self) -> None:
        """Recount. Raises `IntegrityError`."""
        self.books.check()
        self.instance.blocks.check()
        self.instance.memory.check()

    def lose(self, rank: str) -> None:
        """Have steps that a rank has a part in be lost, and begin none until `Recover`."""
        self.world.wires.forget(rank)
        self.stages.discard(rank)
        if rank in self.books.path.helpers:
            self.instance.paused = True
            self.steps.lose(rank)
            self._end_flip(rank)

    def _end_flip(self, rank: str) -> None:
        """Have a flip that waits for a rank which was lost never be."""
        flipping, self._flipping = self._flipping, None
        if flipping is not None:
            _fail(flipping, rank)

    def go_by(self, path: LayerPath) -> None:
        """Have the steps of its instance go by a path; each rank's books follow. No step is in flight."""
        ranks = {self.name, *self.books.path.ranks, *path.ranks}
        for rank in ranks:
            if rank in self.world.ranks and not self.world.ranks[rank].instance.lost:
                self.world.ranks[rank].books.keep(self.name, path)
        self.steps.path = path
        self.follow()
        for rank in ranks:
            if rank in self.world.ranks and rank != self.name:
                self.world.ranks[rank].instance.wake()

    def batches(self) -> int:
        """Return how many steps of its instance may be in flight, so that the stages are busy."""
        guests, ranks = self.books.homes, self.world.ranks
        others = {home: ranks[home].instance.scheduler.steps for home, guest in guests.items() if guest.shards}
        return self._batches.of(self.books.path, self.instance.scheduler.steps, others)

    def follow(self) -> Future[None]:
        """Have steps be computed beside those of others, where there are some; by itself else. Done between two."""

        def switch() -> None:
            alone = not (self.books.path.helpers or self.stages or self.books.homes)
            self.instance.executor = self.instance.local if alone else self.steps
            self.instance.whole = not self.books.path.helpers
            if self._flipping is None:
                self.moves.tell_kv(self.books.path)

        return self.instance.do_between(switch)

    def begin_alone(self) -> None:
        """Go on by itself, when all of its layers are at home again."""
        self.stages.clear()
        self.written = self.instance.scheduler.written = None
        self.steps.path = self.books.path
        self.follow()

    # -- inside

    def _of_layers(self, question: Any) -> Any:
        books, instance = self.books, self.instance
        if isinstance(question, ask.BeginExchange | ask.PrepareLayers | ask.FlipLayers) and question.hurried:
            instance.scheduler.short_until_s = instance.clock.now + HURRIED_S
        match question:
            case ask.OpenStage(home, _, sectors):
                books.open(home, sectors)
                return self.follow()
            case ask.AttachStage(rank):
                self.stages.add(rank)
                return self.follow()
            case ask.DetachStage(rank):
                self.stages.discard(rank)
                return self.follow()
            case ask.CloseStage(home, keep):
                books.close(home, self.world.ranks[home].instance.memory.allocated if keep else None)
                return self.follow()
            case ask.KeptLayers(home, epoch):
                mapped = sorted(self.world.ranks[home].instance.memory.mapped)
                return self.moves.kept_layers(books.kept(home, epoch), [sector for _, sector in mapped])
            case ask.Allot(home, sectors):
                return self._allot(home, sectors)
            case ask.LayersMemory(home, shards):
                model = self.world.model
                pages: dict[int, dict[int, tuple[int, ...]]] = {part: {} for part in model.kv_parts(shards)}
                return LayersKV(None, model.page_bytes, model.kv, pages, RankMemory(self.name, PLACE))
            case ask.BeginExchange():
                return instance.do_between(self._begin_exchange)
            case ask.PrepareLayers(home, shards):
                return books.prepare(home, shards)
            case ask.CopyLayers(home, _, source, blocks, coordinated):
                return self._copy(home, source, blocks, coordinated=coordinated)
            case ask.KeepFull(layers):
                self.weights.kept_full = layers
                return None
            case ask.PauseSteps():
                instance.paused = True
                return instance.do_between(lambda: None)
            case ask.ResumeSteps():
                instance.paused = False
                return instance.wake()
            case ask.WrittenBlocks():
                return self._exchange.take()
            case ask.FlipLayers(path):
                return self._flip(path)
            case ask.EndExchange():
                self.written = instance.scheduler.written = None
                return None
            case ask.GiveUpLayers(home, shards):
                return books.give_up(home, shards)
            case ask.Recover(lost, memories, weights):
                self.lose(lost)
                recovery = SimulatedRecovery(books, instance, self.moves, self.begin_alone)
                return recovery.begin(lost, lost in memories, {shard for shards, _ in weights for shard in shards})
        raise StateError(f"a simulated rank does not know {type(question).__name__}")

    def _set_cap(self, sectors: int | None) -> Any:
        self.instance.memory.set_cap(sectors)
        self.instance.wake()
        return self.instance.load()

    def _cap_reached(self) -> bool:
        """Look; where only what is free in sectors stands in the way, blocks move together, as those of real ranks."""
        memory = self.instance.memory
        return memory.reached_cap() or (self._compact() and memory.reached_cap())

    def _compact(self) -> bool:
        """Have blocks lie in as few sectors as hold them, where the real `compact` does; it takes no time here."""
        instance, scheduler, cap = self.instance, self.instance.scheduler, self.instance.memory.cap.sectors
        if cap is None or not self.stages or self.books.path.copies > 1 or self.written is not None or scheduler.held:
            return False
        if not instance.blocks.fit_compacted(cap):
            return False
        with instance.blocks.compaction() as compaction:
            compaction.move()
        if scheduler.journal is not None:
            scheduler.journal.note_moved(scheduler.begun)
        return True

    def _allot(self, home: str, sectors: int) -> None:
        guest = self.books.homes[home]
        mapped = self.world.ranks[home].instance.memory.allocated
        if guest.shards and sectors < mapped:
            raise StateError(f"{mapped} sectors of {home!r} are in use at rank {self.name!r}; {sectors} are too few")
        self.books.allot(home, sectors)

    def _begin_exchange(self) -> None:
        if self.written is not None:
            raise StateError("an exchange has begun; end it first")
        self.written = DirtyBlockTracker([None], self.world.model.kv.block_tokens)
        self.written.add(tuple(tuple(pool.kept_blocks) for pool in self.instance.blocks.pools))
        for sequence in self.instance.scheduler.begun:
            kv = sequence.kv()
            self.written.note(kv.blocks, 0, kv.computed)
        self.instance.scheduler.written = self.written.note

    @property
    def _exchange(self) -> DirtyBlockTracker:
        if self.written is None:
            raise StateError("no exchange has begun; call begin_exchange first")
        return self.written

    def _copy(self, home: str, source: LayersKV, blocks: Blocks, *, coordinated: bool) -> Future[int]:
        """Copy the keys and values of blocks of what comes here."""
        model = self.world.model
        assert source.memory is not None
        parts, ends = len(self._new_parts(home, source.pages)), (source.memory.rank, self.name)
        nbytes = len(blocks[0]) * parts * model.kv.block_bytes
        done: Future[int] = Future()
        self.world.wires.copy(
            ends, nbytes, lambda: done.set_result(nbytes), lost=partial(_fail, done), coordinated=coordinated
        )
        return done

    def _new_parts(self, home: str, parts: Iterable[int]) -> set[int]:
        """Return those of parts of the KV cache that are not here yet."""
        shards = self.books.path.shards_of(self.name) if home == self.name else self.books.guests[home].shards
        return set(parts).difference(self.world.model.kv_parts(shards))

    def _flip(self, path: LayerPath) -> Future[Flipped]:
        """Stand still, have copied what was written last, and go on by another path."""
        done = self._flipping = Future[Flipped]()
        self.instance.between_steps(partial(self._begin_flip, path, _moves(self.books.path, path), done))
        return done

    def _begin_flip(
        self, path: LayerPath, moves: Mapping[tuple[str, str], frozenset[int]], done: Future[Flipped]
    ) -> None:
        instance, world = self.instance, self.world
        paused, began_s, blocks = instance.paused, instance.clock.now, self._exchange.take()
        instance.paused = True
        self.moves.tell_no_kv()
        block_bytes, model = len(blocks[0]) * world.model.kv.block_bytes, world.model
        nbytes = {
            (source, target): block_bytes * len(world.ranks[target]._new_parts(self.name, model.kv_parts(shards)))
            for (source, target), shards in moves.items()
        }

        def commit() -> None:
            if self._flipping is not done:  # a rank was lost: it was told so
                return
            self._flipping = None
            self.written = instance.scheduler.written = None
            self.go_by(path)
            instance.paused = paused
            instance.wake()
            done.set_result(Flipped((instance.clock.now - began_s) * 1e3, sum(nbytes.values())))

        copied = Countdown(len(nbytes), lambda: instance.clock.after(model.links.flip_s, commit))

        def lose(rank: str) -> None:
            if self._flipping is done:
                self._end_flip(rank)
                instance.paused = paused
                self.follow()

        for ends, each in nbytes.items():
            world.wires.copy(ends, each, copied, lost=lose, coordinated=False)


def _fail(done: Future[Any], rank: str) -> None:
    """Have what came from, or went to, a rank that was lost not be."""
    done.set_exception(RankLost(f"rank {rank!r} was lost", rank=rank))


def _moves(before: LayerPath, after: LayerPath) -> dict[tuple[str, str], frozenset[int]]:
    """Return the shards that another path moves, by the rank that had them and the one that will."""
    moves: dict[tuple[str, str], frozenset[int]] = {}
    for shard, (old, new) in enumerate(zip(before.ranks, after.ranks, strict=True)):
        if old != new:
            moves[old, new] = moves.get((old, new), frozenset()) | {shard}
    if not moves or after.epoch <= before.epoch:
        raise StateError(f"{after} does not follow {before}")
    return moves
