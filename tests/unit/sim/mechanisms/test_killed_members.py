"""Requests of a killed rank whose layers others had computed go on from its memory file and from these, as real ones
do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.engines.core.kv_state import KVSource, LayersKV, SectorPages, SequenceKV
from elastic.errors import StateError
from elastic.memory.backends.shared_file import share
from elastic.sim.mechanisms.moves import is_told
from support.sim.layered_fleet import LAYERS, Play, burst, model, play

HALVES = {"r0": range(LAYERS // 2, LAYERS), "r1": range(LAYERS // 2)}
Killed = Callable[..., Play]


@pytest.fixture
def killed() -> Iterator[Killed]:
    """Requests that come in turn, of which so many are alive when a stage of the first two ranks is killed."""
    made: list[Play] = []

    def run(ranks: int, requests: int, at_s: float, *, moves: bool, then_s: float | None = None) -> Play:
        each = play(None, ranks, watch=True, moves=moves, routing="round_robin")
        made.append(each)
        each.come(burst(requests))
        clock = each.fleet.clock
        clock.at(0.6, lambda: each.fleet.call(lambda verbs: verbs.drop(layers=HALVES)))
        clock.at(at_s, lambda: each.fleet.kill("r1"))
        if then_s is not None:
            clock.at(then_s, lambda: each.fleet.kill("r0"))
        each.run()
        each.check_ends()
        return each

    yield run
    for each in made:
        each.fleet.finish()


def again(made: Play) -> int:
    """Count the tokens that were computed more than once; that is what the fleet says, too."""
    needed = sum(len(told.request.prompt) + told.request.max_tokens - 1 for told in made.told)
    tokens = sum(made.computed) - needed
    assert tokens == made.fleet.log.totals().recomputed_tokens
    return tokens


@pytest.mark.parametrize("at_s", [1.5, 2.0, 3.0])
@pytest.mark.parametrize(("ranks", "requests"), [(2, 4), (3, 4), (3, 8)])
def test_nothing_is_computed_again_where_memory_outlives_a_killed_member(
    killed: Killed, ranks: int, requests: int, at_s: float
) -> None:
    made = killed(ranks, requests, at_s, moves=True)
    (lost,) = [event for event in made.fleet.log.events() if event.kind == "lost"]
    assert lost.requests, "it had none"
    assert again(made) == 0
    assert made.kinds() == ["dropped", "lost", "recovered", "requests resumed"]


def test_who_has_all_layers_again_tells_of_all_of_them(killed: Killed) -> None:
    made = killed(3, 4, 2.0, moves=True, then_s=3.0)
    assert [event.requests > 0 for event in made.fleet.log.events() if event.kind == "lost"] == [True, True]
    assert again(made) == 0


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("requests", [4, 6, 8, 10])
def test_nothing_is_kept_for_ever_of_a_killed_member(killed: Killed, requests: int, *, moves: bool) -> None:
    """Two ranks have no room for what ten requests have, where one computes all layers."""
    made = killed(2, requests, 3.0, moves=moves)
    assert not any(made.fleet.world.ranks[name].books.guests for name in made.fleet.dispatcher.instances)
    assert not any(instance.moves for instance in made.fleet.dispatcher.instances.values())
    assert bool(again(made)) is (requests > 4 or not moves)
    (recovered,) = [event for event in made.fleet.log.events() if event.kind == "recovered"]
    assert bool(recovered.recomputed_tokens) is not moves, "what lives has room, before what is kept"


def test_without_memory_files_only_what_the_dead_rank_had_a_part_in_is_computed_again(killed: Killed) -> None:
    """Each of three ranks has two requests, of 64 tokens and what was generated so far; the third is by itself."""
    group, alone = killed(2, 4, 2.0, moves=False), killed(3, 6, 2.0, moves=False)
    assert again(group) > 4 * 64
    assert again(alone) == pytest.approx(again(group), rel=0.05)


def test_what_was_told_of_no_layer_or_sector_cannot_be_read(tmp_path: Any) -> None:
    layered = model()
    parts, kv = tuple(range(LAYERS)), SequenceKV("q", 40, ((3, 5, 7),))
    with (tmp_path / "memory").open("w+b") as file:
        shared = share(file.fileno())
        page = SectorPages(0, 3, tuple(range(2)), parts[:2])
        own = [replace(page, sector=sector) for sector in (3, 5, 7)]
        kept = LayersKV(
            shared, layered.page_bytes, layered.kv, {part: dict.fromkeys((3, 5, 7), (0,)) for part in (2, 3)}
        )
        source = KVSource(shared, layered.page_bytes, layered.kv, tuple(own), (kept,))
        assert is_told(source, kv)
        assert not is_told(replace(source, others=()), kv)
        assert not is_told(replace(source, sectors=tuple(own[:2])), kv)
        assert not is_told(replace(source, others=(kept.of_sectors([3, 7]),)), kv)
        assert is_told(replace(source, others=(kept.of_sectors([3, 7]),)), replace(kv, computed=16))


def test_what_is_kept_is_told_of_once_it_is_asked_for_and_leaves_before_for_those_who_live(killed: Killed) -> None:
    made = play(None, 2)
    books = made.fleet.world.ranks["r0"].books
    made.fleet.finish()
    alone = books.other_pages()
    books.open("r9", 30)
    guest = books.guests["r9"]
    guest.shards, guest.epoch = {0, 1}, 3
    with pytest.raises(StateError, match="nothing that was computed for 'r9' by path 3"):
        books.kept("r9", 3)
    books.close("r9", kept=20)
    assert books.other_pages() == alone + 20 * made.fleet.layered.kv_pages({0, 1})
    assert not books.homes
    with pytest.raises(StateError, match="by path 4"):
        books.kept("r9", 4)
    assert books.kept("r9", 3).shards == {0, 1}
    assert not books.free_kept(), "others may read it"
    guest = books.guests["r9"]
    guest.told = False
    assert books.free_kept()
    assert books.other_pages() == alone
