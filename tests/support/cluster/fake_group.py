"""Ranks without a model that compute each other's layers: they keep the books of real ones, and forgive nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from elastic import CapacityError, StateError
from elastic.cluster.control import stage_questions as ask
from elastic.cluster.control.messages import Apply, ModelFacts
from elastic.engines.core.kv_state import KVFormat, KVSource
from elastic.engines.pipeline.path import LayerPath
from elastic.memory.backends.shared_file import SharedFile
from elastic.types import Change, Drop, Fetch, Restore
from support.cluster.fake_rank import BLOCK, FakeRank

LAYERS, SECTOR, WEIGHT = 6, 1, 8
"""Decoder layers; pages of a sector in one, and of the weights of one."""
ALONE = 20
"""Sectors that a rank has by itself."""
KV = KVFormat(BLOCK, "head_centric", "float32", 2, 8, ((tuple(range(LAYERS)), None),))
MODEL = ModelFacts(tuple(range(LAYERS)), 3, 1000, None, (), ())


class Flipped(NamedTuple):
    stalled_ms: float
    copied_bytes: int


@dataclass
class Guest:
    """What a rank has of another one's instance."""

    sectors: int
    layers: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)

    @property
    def pages(self) -> int:
        return self.sectors * SECTOR * len(self.layers | self.coming)


class GroupRank(FakeRank):
    """A rank that is as full as its cap allows, and frees a sector whenever it is asked whether it has reached it."""

    def __init__(self, name: str, world: dict[str, GroupRank]) -> None:
        super().__init__(name, model=MODEL)
        memory = KVSource(SharedFile("elsewhere", 1, 1, 1), 4096, KV)  # nobody reads it
        self.hello = replace(self.hello, kv=KV, memory=memory)
        self.world = world
        world[name] = self
        self.budget = LAYERS * WEIGHT + ALONE * SECTOR * LAYERS
        self.resident = set(range(LAYERS))
        self.path = LayerPath.alone(name, LAYERS)
        self.cap: int | None = None
        self.committed = ALONE
        self.stuck = False
        self.guests: dict[str, Guest] = {}
        self.stages: set[str] = set()
        self.home_coming: set[int] = set()
        self.exchanging = False
        self.asked: list[Any] = []
        self.fails: Callable[[Any], Exception | None] = lambda question: None

    # -- books

    @property
    def layers(self) -> set[int]:
        """Those that have keys and values of its own instance here."""
        return set(self.path.layers_of(self.name)) | self.home_coming

    @property
    def name(self) -> str:
        return self.hello.name

    def free(self, committed: int | None = None) -> int:
        guests = sum(guest.pages for guest in self.guests.values())
        own = (self.committed if committed is None else committed) * SECTOR * len(self.layers)
        return self.budget - len(self.resident) * WEIGHT - guests - own

    def fill(self) -> None:
        """Have its requests take all that they may."""
        while (self.cap is None or self.committed < self.cap) and self.may_grow():
            self.committed += 1

    def may_grow(self) -> bool:
        there = all(self.committed < self.world[r].guests[self.name].sectors for r in self.path.guests)
        return there and self.free(self.committed + 1) >= 0

    def check(self) -> None:
        assert self.free() >= 0, (self.name, self.free())
        assert not self.exchanging
        assert not self.home_coming
        for layer, rank in enumerate(self.path.ranks):
            other = self.world[rank]
            assert layer in other.resident, f"{rank} computes layer {layer} of {self.name} without weights"
            if rank != self.name:
                assert layer in other.guests[self.name].layers
                assert other.guests[self.name].sectors >= self.committed
                assert rank in self.stages
        for home, guest in self.guests.items():
            assert not guest.coming
            assert guest.layers == set(self.world[home].path.layers_of(self.name))

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
        except (CapacityError, StateError) as error:
            answer.set_exception(error)
        return answer

    def _need(self, pages: int) -> None:
        if self.free() < pages:
            raise CapacityError("no room", requested_bytes=pages, free_bytes=self.free(), total_bytes=self.budget)

    def on_open_peers(self, _: ask.OpenPeers) -> Any:
        return "127.0.0.1", 1

    def on_measure_room(self, _: ask.MeasureRoom) -> ask.Room:
        kv = self.budget - len(self.resident) * WEIGHT
        pages, weights = (SECTOR,) * LAYERS, (WEIGHT,) * LAYERS
        return ask.Room(self.path, kv, 4096, pages, 1000, self.committed, weights, frozenset(self.resident))

    def on_set_cap(self, question: ask.SetCap) -> None:
        self.cap = question.sectors

    def on_cap_reached(self, _: ask.CapReached) -> bool:
        if not self.stuck and self.cap is not None and self.committed > self.cap:
            self.committed -= 1
        return self.cap is None or self.committed <= self.cap

    def on_open_stage(self, question: ask.OpenStage) -> None:
        assert question.home not in self.guests
        self.guests[question.home] = Guest(question.sectors)

    def on_attach_stage(self, question: ask.AttachStage) -> None:
        assert question.rank not in self.stages
        self.stages.add(question.rank)

    def on_detach_stage(self, question: ask.DetachStage) -> None:
        assert question.rank not in self.path.guests
        self.stages.discard(question.rank)

    def on_close_stage(self, question: ask.CloseStage) -> None:
        self.guests.pop(question.home, None)

    def on_allot(self, question: ask.Allot) -> None:
        guest = self.guests[question.home]
        home = self.world[question.home]
        if question.sectors < home.committed and guest.layers:
            raise StateError("so much is mapped")
        self._need((question.sectors - guest.sectors) * SECTOR * len(guest.layers))
        guest.sectors = question.sectors

    def on_begin_exchange(self, question: ask.BeginExchange) -> str:
        assert not self.exchanging
        self.exchanging = True
        return "mapped"

    def on_end_exchange(self, _: ask.EndExchange) -> None:
        self.exchanging = False

    def on_prepare_layers(self, question: ask.PrepareLayers) -> None:
        assert question.exchange == "mapped"
        own = question.home == self.name
        sectors = self.committed if own else self.guests[question.home].sectors
        self._need(sectors * SECTOR * len(question.layers))
        (self.home_coming if own else self.guests[question.home].coming).update(question.layers)

    def on_give_up_layers(self, question: ask.GiveUpLayers) -> None:
        coming = self.home_coming if question.home == self.name else self.guests[question.home].coming
        coming.difference_update(question.layers)

    def on_layers_memory(self, question: ask.LayersMemory) -> Any:
        layers = self.layers if question.home == self.name else self.guests[question.home].layers
        assert set(question.layers) <= layers
        return None

    def on_copy_layers(self, question: ask.CopyLayers) -> int:
        return 100

    def on_written_blocks(self, _: ask.WrittenBlocks) -> Any:
        return ((1, 2),)

    def on_flip_layers(self, question: ask.FlipLayers) -> Flipped:
        before, after = self.path, question.path
        assert self.exchanging
        assert after.epoch == before.epoch + 1
        moved = {layer for layer, rank in enumerate(after.ranks) if before.ranks[layer] != rank}
        for layer in moved:
            target = self.world[after.ranks[layer]]
            coming = self.home_coming if target is self else target.guests[self.name].coming
            assert layer in coming
            assert layer in target.resident
            coming.remove(layer)
            if target is not self:
                target.guests[self.name].layers.add(layer)
            if before.ranks[layer] != self.name:
                self.world[before.ranks[layer]].guests[self.name].layers.remove(layer)
        self.path = after
        self.exchanging = False
        return Flipped(1.0, 10)

    def on_weight_digests(self, question: ask.WeightDigests) -> dict[int, int]:
        assert set(question.layers) <= self.resident
        return {layer: 100 + layer for layer in question.layers}

    def on_weights_of(self, question: ask.WeightsOf) -> Any:
        assert set(question.layers) <= self.resident
        return self.name

    def on_recover(self, question: ask.Recover) -> int:
        for rank in self.stages:
            self.world[rank].guests.pop(self.name, None)
        self.path = LayerPath.alone(self.name, LAYERS)
        self.stages.clear()
        self.home_coming.clear()
        self.exchanging = False
        self.committed = 0
        self.resident = set(range(LAYERS))
        return 7

    def on_apply(self, question: Apply) -> tuple[Change, ...]:
        (action,) = question.actions
        layers = action.layers  # type: ignore[union-attr]
        if isinstance(action, Drop):
            assert set(layers) <= self.resident
            self.resident -= set(layers)
            return (Change("applied", layers, released_bytes=len(layers) * WEIGHT * 4096),)
        assert isinstance(action, Fetch | Restore)
        self._need(WEIGHT * len(layers))
        self.resident |= set(layers)
        return (Change("applied", layers, moved_bytes=len(layers) * WEIGHT * 4096),)
