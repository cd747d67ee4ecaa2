"""The parts of a layer come from several other ranks at once; what one cannot give comes from elsewhere. (AMOEBA)"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic import ConfigError, RankLost, StateError
from elastic.actions import fetch
from elastic.memory.backends.rank_memory import Pieces
from elastic.memory.backends.shared_file import OpenFile
from elastic.memory.rate_limit import YieldingPace
from elastic.types import RankMemory, SharedFile, WeightsSource
from support.weights.sharded import SHARDS, place, wide
from support.wrapped_model import assert_same_bits, bits

PACE = YieldingPace(lambda seconds: True, lambda: 0.0)


class OtherRank:
    """A reader of the memory of one rank, which the test may hold up or lose."""

    waits, device = True, torch.device("cpu")

    def __init__(self, ranks: OtherRanks, name: str) -> None:
        self._ranks, self._name = ranks, name

    def read(self, address: int, pieces: Pieces) -> None:
        ranks = self._ranks
        ranks.on_read(self._name)
        if self._name in ranks.lost:
            raise RankLost(f"rank {self._name!r} has gone", rank=self._name)
        with closing(OpenFile(ranks.files[self._name])) as file:
            file.read(address, pieces)
        ranks.read[self._name] += sum(nbytes for _, nbytes in pieces)

    def close(self) -> None:
        pass


class OtherRanks:
    """`Peers` whose answers come from their memory files."""

    name = "here"

    def __init__(self) -> None:
        self.files: dict[str, SharedFile] = {}
        self.lost: set[str] = set()
        self.read: Counter[str] = Counter()
        """Bytes, by rank."""
        self.on_read: Callable[[str], object] = lambda name: None

    def open_memory(self, memory: RankMemory, device: torch.device, *, coordinated: bool) -> OtherRank:
        return OtherRank(self, memory.rank)


class World:
    """A rank, and others with parts of the same model."""

    def __init__(self, wrapped: Any, folder: Path) -> None:
        self._wrapped, self._folder = wrapped, str(folder)
        wide().save_pretrained(folder)
        self.model, self.others, self.made = wide(), OtherRanks(), list[Any]()
        self.before = bits(self.model)
        self.rt = self.begin(self.model, "cpu")

    def begin(self, model: Any, name: str, **options: Any) -> Any:
        rt = self._wrapped(model, place(name), shards=SHARDS, **options).elastic
        rt.exchange_with(self.others, PACE)
        return rt

    def has(self, name: str, *parts: int) -> WeightsSource:
        """Have a rank with these parts of layer 0; return where they are."""
        self.made.append(self.begin(wide(), f"cpu#{name}", checkpoint=self._folder))
        self.made[-1].drop(shards=[part for part in range(SHARDS) if part not in parts])
        source = self.made[-1].weights_source(shards=parts)
        self.others.files[name] = source.file
        return replace(source, file=None, memory=RankMemory(name, source.memory.place))

    def overwrite(self, number: int) -> None:
        """Have another rank's weights change, which it has told where they are."""
        rt = self.made[number]
        (part, *_) = rt.shards_here[0]
        rt.weights.part_tensors(0, (part,))["mlp.down_proj.weight"][0].zero_()


@pytest.fixture
def world(wrapped: Any, tmp_path: Path) -> Iterator[World]:
    one = World(wrapped, tmp_path)
    yield one
    for rt in one.made:
        rt.drop(0)
        rt.restore(0)


def sizes(rt: Any) -> dict[int, int]:
    """The bytes of each part of layer 0."""
    (unit, *_) = rt.weights.units_of([0])
    return {part: sum(piece.nbytes for piece in unit.pieces(part)) for part in range(SHARDS)}


@pytest.mark.parametrize("here", [(0,), ()])
def test_parts_are_read_at_all_that_have_them_before_any_has_answered(world: World, here: tuple[int, ...]) -> None:
    names = [f"r{part}" for part in range(SHARDS) if part not in here]
    sources = [world.has(f"r{part}", part) for part in range(SHARDS) if part not in here]
    all_asked, met = threading.Barrier(len(names)), set[str]()

    def wait_for_the_others(name: str) -> None:
        if name not in met:
            met.add(name)
            all_asked.wait(20)  # broken unless each of them is being read

    world.others.on_read = wait_for_the_others
    world.rt.drop(shards=[part for part in range(SHARDS) if part not in here])
    change = world.rt.fetch((), sources, shards=[part for part in range(SHARDS) if part not in here])
    assert_same_bits(world.model, world.before)
    read, each = world.others.read, sizes(world.rt)
    assert change.moved_bytes == sum(read.values())
    common = change.moved_bytes - sum(nbytes for part, nbytes in each.items() if part not in here)
    assert (common > 0) is (not here)
    assert {name: read[name] for name in names[1:]} == {name: each[int(name[1:])] for name in names[1:]}


def test_no_more_are_read_at_once_than_may_be(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MOST_AT_ONCE", 2)
    threads = set[int]()
    world.others.on_read = lambda _: threads.add(threading.get_ident())
    sources = [world.has(f"r{part}", part) for part in range(1, SHARDS)]
    world.rt.drop(shards=(1, 2, 3))
    world.rt.fetch((), sources, shards=(1, 2, 3))
    assert len(threads) <= 2
    assert_same_bits(world.model, world.before)


@pytest.mark.parametrize("fault", ["lost", "overwritten"])
def test_what_one_cannot_give_comes_from_another_that_has_it(
    world: World, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    sources = [world.has("a", 1), world.has("b", 2), world.has("c", 1, 3)]
    if fault == "lost":
        world.others.lost.add("a")
    else:
        world.overwrite(0)
    world.rt.drop(shards=(1, 2, 3))
    world.rt.fetch((), sources, shards=(1, 2, 3))  # no checkpoint has them
    assert_same_bits(world.model, world.before)
    assert "model.layers.0 is read from another process instead" in caplog.text
    each = sizes(world.rt)
    assert (world.others.read["b"], world.others.read["c"]) == (each[2], each[1] + each[3])


def test_what_none_of_them_can_give_comes_from_the_checkpoint_alone(world: World, tmp_path: Path) -> None:
    kept, sources = world.begin(model := wide(), "cpu#kept", checkpoint=str(tmp_path)), [world.has("a", 1)]
    sources.append(world.has("b", 2, 3))
    world.others.lost.add("a")
    kept.drop(shards=(1, 2, 3))
    kept.fetch((), sources, shards=(1, 2, 3))
    assert_same_bits(model, world.before)
    each = sizes(kept)
    assert world.others.read == {"b": each[2] + each[3]}
    world.rt.drop(shards=(1, 2, 3))
    owners, capacity = world.rt.status().places[0].owners, world.rt.kv.capacity_bytes
    with pytest.raises(StateError, match="rank 'a' has gone"):
        world.rt.fetch((), sources, shards=(1, 2, 3))
    assert (world.rt.status().places[0].owners, world.rt.kv.capacity_bytes) == (owners, capacity)
    assert world.rt.dropped_shards == (1, 2, 3)
    world.others.lost.clear()
    world.rt.fetch((), sources, shards=(1, 2, 3))
    assert_same_bits(world.model, world.before)


def test_sources_of_other_weights_are_passed_over_where_others_have_all(world: World, wrapped: Any) -> None:
    stranger = wrapped(wide(seed=7), place("cpu#stranger"), shards=SHARDS).elastic.weights_source(0)
    world.rt.drop(shards=(1, 2))
    with pytest.raises(StateError, match=r"other weights of model\.layers\.0 than were dropped here"):
        world.rt.fetch((), [stranger, world.has("a", 1)], shards=(1, 2))
    with pytest.raises(ConfigError, match=r"parts \[2\] of model\.layers\.0 are not in the source; it has \(1,\) of 4"):
        world.rt.fetch((), [world.has("b", 1)], shards=(1, 2))
    with pytest.raises(ConfigError, match=r"layer 0 is not in the source; it has none"):
        world.rt.fetch((), [], shards=(1, 2))
    world.rt.fetch((), [stranger, world.has("c", 1, 2)], shards=(1, 2))
    assert_same_bits(world.model, world.before)
