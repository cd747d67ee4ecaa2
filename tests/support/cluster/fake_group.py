"""Ranks without a model that compute each other's layers: they keep the books of real ones, and forgive nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from elastic import CapacityError, ConfigError, StateError
from elastic.cluster.control import stage_questions as ask
from elastic.cluster.control.messages import Apply, Look, ModelFacts, RuntimeView
from elastic.engines.core.kv_state import KVFormat, KVSource, LayersKV
from elastic.engines.core.load import EngineLoad
from elastic.engines.pipeline.path import LayerPath
from elastic.memory.backends.shared_file import SharedFile
from elastic.planning.arrangement.step_pages import StepPages
from elastic.planning.sharding.heads import kv_parts
from elastic.planning.sharding.numbers import by_layer
from elastic.planning.sharding.shard_pages import ShardPages
from elastic.types import Change, Drop, Fetch, PlanStep, Restore
from support.cluster.fake_rank import BLOCK, FakeRank

LAYERS, SECTOR, WEIGHT, COMMON = 6, 1, 8, 2
"""Decoder layers; pages of a sector in a part of the KV cache; of the weights of a layer, and of those all parts need.

Parts of a layer whose bound is not at the end of a page have that page in common.
"""
ALONE = 20
"""Sectors that a rank has by itself."""
MODEL = ModelFacts(tuple(range(LAYERS)), 3, 1000, None, (), ())


def kv_of(kv_shards: int = 1) -> KVFormat:
    """The form of keys and values of layers in so many parts."""
    parts = tuple(range(LAYERS * kv_shards))
    return KVFormat(BLOCK, "head_centric", "float32", 2, 8, ((parts, None),), kv_shards)


KV = kv_of()


def whole(pages: int) -> ShardPages:
    """The weights of a layer that is not cut."""
    return ShardPages((), ((range(pages),),))


def pages_of(shards: int) -> ShardPages:
    """The weights of a layer in so many shards."""
    cut = WEIGHT - COMMON
    bounds = [(part * cut // shards, -(-(part + 1) * cut // shards)) for part in range(shards)]
    return ShardPages((range(COMMON),), tuple((range(COMMON + a, COMMON + b),) for a, b in bounds))


def places(shards: Collection[int], path: LayerPath, kv_shards: int) -> tuple[int, ...]:
    """The parts of a rank's KV cache that shards of any copies of the layers need."""
    return kv_parts({shard % path.numbers for shard in shards}, path.shards, kv_shards)


class Flipped(NamedTuple):
    stalled_ms: float
    copied_bytes: int


@dataclass
class Guest:
    """What a rank has of another one's instance."""

    sectors: int
    path: LayerPath
    kv_shards: int
    shards: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)

    def pages(self, more: Collection[int] = ()) -> int:
        """Those of its sectors, with further shards."""
        parts = places(self.shards | self.coming | set(more), self.path, self.kv_shards)
        return self.sectors * SECTOR * len(parts)


class GroupRank(FakeRank):
    """A rank that is as full as its cap allows, and frees a sector whenever it is asked whether it has reached it."""

    def __init__(self, name: str, world: dict[str, GroupRank], shards: int = 1, kv_shards: int = 1) -> None:
        super().__init__(name, model=MODEL)
        kv = kv_of(kv_shards)
        memory = KVSource(SharedFile("elsewhere", 1, 1, 1), 4096, kv)  # nobody reads it
        self.hello = replace(self.hello, kv=kv, memory=memory)
        self.world, self.kv_shards = world, kv_shards
        world[name] = self
        self.budget = LAYERS * WEIGHT + ALONE * SECTOR * LAYERS * kv_shards
        self.resident = set(range(LAYERS * shards))
        self.path = LayerPath.alone(name, LAYERS, shards)
        self.cap: int | None = None
        self.committed = ALONE
        self.stuck = False
        self.defers = False
        """Whether weights that are to come wait for pages."""
        self.awaited: set[int] = set()
        self.step_s, self.step_memory = 0.0, StepPages()
        self.guests: dict[str, Guest] = {}
        self.stages: set[str] = set()
        self.home_coming: set[int] = set()
        self.exchanging = False
        self.asked: list[Any] = []
        self.fails: Callable[[Any], Exception | None] = lambda question: None

    # -- books

    @property
    def shards(self) -> set[int]:
        """Those that have keys and values of its own instance here."""
        return set(self.path.shards_of(self.name)) | self.home_coming

    def weights(self, shards: Collection[int] | None = None) -> int:
        """Count the pages of the weights that are here, or would be."""
        layer = pages_of(self.path.shards)
        here = self.resident if shards is None else shards
        return sum(layer.pages(parts) for parts in by_layer(here, self.path.shards).values())

    @property
    def needed(self) -> set[int]:
        """The shards that are computed here."""
        guests = (guest.shards for guest in self.guests.values())
        return {shard % self.path.numbers for shard in set(self.path.shards_of(self.name)).union(*guests)}

    def own_pages(self, more: Collection[int] = (), committed: int | None = None) -> int:
        parts = places(self.shards | set(more), self.path, self.kv_shards)
        return (self.committed if committed is None else committed) * SECTOR * len(parts)

    @property
    def name(self) -> str:
        return self.hello.name

    def free(self, committed: int | None = None) -> int:
        guests = sum(guest.pages() for guest in self.guests.values())
        return self.budget - self.weights() - guests - self.own_pages(committed=committed)

    def fill(self) -> None:
        """Have its requests take all that they may."""
        while (self.cap is None or self.committed < self.cap) and self.may_grow():
            self.committed += 1

    def may_grow(self) -> bool:
        there = all(self.committed < self.world[r].guests[self.name].sectors for r in self.path.helpers)
        return there and self.free(self.committed + 1) >= 0

    def check(self) -> None:
        assert self.free() >= 0, (self.name, self.free())
        assert not self.exchanging
        assert not self.home_coming
        for shard, rank in enumerate(self.path.ranks):
            other = self.world[rank]
            assert shard % self.path.numbers in other.resident, (
                f"{rank} computes shard {shard} of {self.name} without weights"
            )
            if rank != self.name:
                assert shard in other.guests[self.name].shards
                assert other.guests[self.name].sectors >= self.committed
                assert rank in self.stages
        for home, guest in self.guests.items():
            assert not guest.coming
            assert guest.shards == set(self.world[home].path.shards_of(self.name))

    # -- what it is asked

    def ask(self, question: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.lost:
            answer.set_exception(StateError("it has gone"))
            return answer
        self.asked.append(question)
        error = self.fails(question)
        handler = getattr(self, "on_" + re.sub(r"\B([A-Z])", r"_\1", type(question).__name__).lower(), None)
        if error is None and handler is None:
            return super().ask(question)
        try:
            if error is not None:
                raise error
            answer.set_result(handler(question))
        except (CapacityError, ConfigError, StateError) as error:
            answer.set_exception(error)
        return answer

    def _need(self, pages: int) -> None:
        if pages > 0 and self.free() < pages:
            raise CapacityError("no room", requested_bytes=pages, free_bytes=self.free(), total_bytes=self.budget)

    def on_look(self, _: Look) -> RuntimeView:
        return RuntimeView(SimpleNamespace(places=(), residencies={}), None)

    def on_open_peers(self, _: ask.OpenPeers) -> Any:
        return "127.0.0.1", 1

    def on_measure_room(self, _: ask.MeasureRoom) -> ask.Room:
        kv = self.budget - self.weights()
        pages, weights = (SECTOR,) * LAYERS * self.kv_shards, (pages_of(self.path.shards),) * LAYERS
        resident = frozenset(self.resident)
        return ask.Room(
            self.path,
            kv,
            4096,
            pages,
            1000,
            self.committed,
            tuple(self.committed * 4096 * size for size in pages),
            weights,
            resident,
            step_s=self.step_s,
            steps=self.step_memory,
        )

    def on_set_cap(self, question: ask.SetCap) -> EngineLoad:
        self.cap = question.sectors
        return self.load()

    def on_cap_reached(self, _: ask.CapReached) -> bool:
        if not self.stuck and self.cap is not None and self.committed > self.cap:
            self.committed -= 1
        return self.cap is None or self.committed <= self.cap

    def on_open_stage(self, question: ask.OpenStage) -> None:
        assert question.home not in self.guests
        self.guests[question.home] = Guest(question.sectors, question.path, self.kv_shards)

    def on_attach_stage(self, question: ask.AttachStage) -> None:
        assert question.rank not in self.stages
        self.stages.add(question.rank)

    def on_detach_stage(self, question: ask.DetachStage) -> None:
        assert question.rank not in self.path.helpers
        self.stages.discard(question.rank)

    def on_close_stage(self, question: ask.CloseStage) -> None:
        self.guests.pop(question.home, None)

    def on_allot(self, question: ask.Allot) -> None:
        guest = self.guests[question.home]
        home = self.world[question.home]
        if question.sectors < home.committed and guest.shards:
            raise StateError("so much is mapped")
        self._need(replace(guest, sectors=question.sectors).pages() - guest.pages())
        guest.sectors = question.sectors

    def on_begin_exchange(self, question: ask.BeginExchange) -> str:
        assert not self.exchanging
        self.exchanging = True
        return "mapped"

    def on_end_exchange(self, _: ask.EndExchange) -> None:
        self.exchanging = False

    def on_prepare_layers(self, question: ask.PrepareLayers) -> None:
        assert question.exchange == "mapped"
        if question.home == self.name:
            self._need(self.own_pages(question.shards) - self.own_pages())
            self.home_coming.update(question.shards)
            return
        guest = self.guests[question.home]
        self._need(guest.pages(question.shards) - guest.pages())
        guest.coming.update(question.shards)

    def on_give_up_layers(self, question: ask.GiveUpLayers) -> None:
        coming = self.home_coming if question.home == self.name else self.guests[question.home].coming
        coming.difference_update(question.shards)

    def on_layers_memory(self, question: ask.LayersMemory) -> Any:
        shards = self.shards if question.home == self.name else self.guests[question.home].shards
        assert set(question.shards) <= shards
        parts = kv_parts(question.shards, self.path.shards, self.kv_shards)
        return LayersKV(None, 4096, KV, {part: {} for part in parts})

    def on_copy_layers(self, question: ask.CopyLayers) -> int:
        coming = self.home_coming if question.home == self.name else self.guests[question.home].coming
        assert question.source.pages
        assert question.source.pages.keys() <= set(kv_parts(coming, self.path.shards, self.kv_shards))
        return 100

    def on_written_blocks(self, _: ask.WrittenBlocks) -> Any:
        return ((1, 2),)

    def on_flip_layers(self, question: ask.FlipLayers) -> Flipped:
        before, after = self.path, question.path
        assert self.exchanging
        assert after.epoch == before.epoch + 1
        moved = {shard for shard, rank in enumerate(after.ranks) if before.ranks[shard] != rank}
        for shard in moved:
            target = self.world[after.ranks[shard]]
            coming = self.home_coming if target is self else target.guests[self.name].coming
            assert shard in coming
            assert shard % before.numbers in target.resident
            coming.remove(shard)
            if target is not self:
                target.guests[self.name].shards.add(shard)
            if before.ranks[shard] != self.name:
                self.world[before.ranks[shard]].guests[self.name].shards.remove(shard)
        self.path = after
        self.exchanging = False
        return Flipped(1.0, 10)

    def on_set_copies(self, question: ask.SetCopies) -> LayerPath:
        assert not self.exchanging
        self.path = self.path.with_copies(question.copies)
        for rank in self.path.helpers:
            self.world[rank].guests[self.name].shards = set(self.path.shards_of(rank))
        for rank in self.stages:
            self.world[rank].guests[self.name].path = self.path
        return self.path

    def on_weight_digests(self, question: ask.WeightDigests) -> dict[int, int]:
        assert set(question.shards) <= self.resident
        return {shard: 100 + shard for shard in question.shards}

    def on_weights_of(self, question: ask.WeightsOf) -> Any:
        assert set(question.shards) <= self.resident
        return self.name, frozenset(question.shards)

    def on_recover(self, question: ask.Recover) -> int:
        for rank in self.stages:
            self.world[rank].guests.pop(self.name, None)
        self.path = LayerPath.alone(self.name, LAYERS, self.path.shards)
        self.stages.clear()
        self.home_coming.clear()
        self.exchanging = False
        self.committed = 0
        self.resident = set(range(len(self.path.ranks)))
        return 7

    def on_apply(self, question: Apply) -> tuple[Change | PlanStep, ...]:
        (action,) = question.actions
        assert isinstance(action, Drop | Fetch | Restore)
        if question.dry_run:
            assert isinstance(action, Drop)
            assert self.resident.issuperset(action.shards)
            return (PlanStep(action, "applied", 0, 0, 0, 0.0),)
        before, shards = self.weights(), set(action.shards)
        if isinstance(action, Drop):
            assert shards <= self.resident | self.awaited
            assert shards.isdisjoint(self.needed), "weights that steps are computed with are dropped"
            self.resident -= shards
            self.awaited -= shards
            return (Change("applied", (), released_bytes=(before - self.weights()) * 4096),)
        if isinstance(action, Fetch):
            told: list[Any] = list(action.sources)
            assert shards == set().union(*(theirs for _, theirs in told))
        if self.defers:
            self.awaited |= shards
            return (Change("deferred", (), tuple(by_layer(shards, self.path.shards))),)
        self._need(self.weights(self.resident | shards) - before)
        self.resident |= shards
        return (Change("applied", (), moved_bytes=(self.weights() - before) * 4096),)
