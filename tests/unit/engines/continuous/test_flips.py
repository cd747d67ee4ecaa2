"""Layers that change their rank: what their home waits for, and what becomes of a copy that fails at the last."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from elastic.engines.base import Request
from elastic.engines.continuous.ranks import layer_exchange
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.items import Copied, CopyItem
from elastic.engines.pipeline.stage import GuestStage
from elastic.errors import RankLost, StateError
from elastic.kvcache.storage.guest import GuestMemory
from elastic.memory.backends.shared_file import OpenFile
from support import architectures
from support.cluster.engine_group import EngineGroup
from support.processes import wait_until
from support.serving.generations import Collector, Continuation, prompts

PROMPTS = prompts([40, 25, 9, 33], architectures.VOCAB)
TOKENS = 48


@pytest.fixture
def ranks() -> Iterator[EngineGroup]:
    """Ranks a, b and c; layers of a can be computed by the others. Closed when the test ends."""
    group = EngineGroup("abc")
    for guest in "bc":
        group.join("a", guest)
    yield group
    group.close()


def begin_answers(ranks: EngineGroup) -> tuple[Collector, dict[str, list[int]]]:
    """Have some requests be answered by a; return who hears of them, and what the model alone answers."""
    model, heard = ranks.plain(), Collector()
    expected = {f"r{number}": Continuation(model, prompt, TOKENS) for number, prompt in enumerate(PROMPTS)}
    for number, prompt in enumerate(PROMPTS):
        ranks["a"].submit(Request(prompt, TOKENS, id=f"r{number}"), heard)
    heard.wait_for_tokens("r0", 2)
    return heard, expected


def prepare(ranks: EngineGroup, layer: int, rank: str) -> None:
    """Have a layer of a, where it is now, be copied to another rank: all but what steps write from now on."""
    owner = ranks["a"].path.ranks[layer]
    ranks[rank].exchange.prepare("a", (layer,), ranks["a"].exchange.begin((layer,)))
    there = ranks["a"].kv.locate((layer,)) if owner == "a" else ranks[owner].stages.of("a").layers_kv((layer,))
    ranks[rank].exchange.copy("a", (layer,), there, ranks["a"].exchange.written_blocks())


def mapped(memory: GuestMemory) -> list[tuple[int, int]]:
    """The sectors that a guest has mapped, by group."""
    return [(number, sector) for number, group in enumerate(memory.groups) for sector in group.mapped]


def test_a_step_is_begun_before_the_other_rank_has_copied(ranks: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, waited = threading.Event(), list[bool]()
    send, copied = HomeExecutor._send, GuestStage._copied

    def note_step(home: HomeExecutor, *step: Any) -> None:
        send(home, *step)
        if home.path.helpers:
            begun.set()

    def copy_late(stage: GuestStage, item: CopyItem) -> Copied:
        if item.flips:
            waited.append(begun.wait(30))
        return copied(stage, item)

    heard, expected = begin_answers(ranks)
    monkeypatch.setattr(HomeExecutor, "_send", note_step)
    monkeypatch.setattr(GuestStage, "_copied", copy_late)
    ranks.move("a", (1, 2), "b")
    assert waited == [True]
    heard.wait(list(expected))
    assert heard.tokens == expected
    ranks.part("a")


def test_what_follows_on_what_was_done_between_steps_comes_before_a_step(ranks: EngineGroup) -> None:
    heard, expected = begin_answers(ranks)
    loop = ranks["a"]._loop
    steps = [loop.between_steps(lambda: loop.scheduler.steps, follow_s=30.0) for _ in range(3)]
    steps.append(loop.between_steps(lambda: loop.scheduler.steps))  # on which nothing follows
    assert len(set(steps)) == 1
    heard.wait(list(expected))
    assert heard.tokens == expected


def test_a_hurried_flip_takes_one_pause(ranks: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_exchange, "HURRY", 1e6)
    heard, expected = begin_answers(ranks)
    home, steps = ranks["a"], list[int]()
    finish = home.exchange._finish_flip
    prepare(ranks, 1, "b")

    def note_end(flip: Any) -> Any:
        steps.append(home._loop.scheduler.steps)
        return finish(flip)

    def note_begin(*args: Any) -> Any:
        steps.append(home._loop.scheduler.steps)
        return begin(*args)

    begin = home.exchange._begin_flip
    monkeypatch.setattr(home.exchange, "_begin_flip", note_begin)
    monkeypatch.setattr(home.exchange, "_finish_flip", note_end)
    home.exchange.flip(home.path.redirected({1: "b"}), hurried=True)
    assert steps[0] == steps[1]
    heard.wait(list(expected))
    assert heard.tokens == expected
    ranks.part("a")


def test_no_pause_has_a_source_asked_for_new_sectors(ranks: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, expected = begin_answers(ranks)
    home, changed, waiting = ranks["a"], list[bool](), list[tuple[int, object]]()
    ranks.move("a", (1, 2), "b")
    flip, hear = home.exchange._flip, HomeExecutor.hear

    def map_more(change: Any, *args: Any, **options: Any) -> bool:
        if not changed:
            change.located.clear()  # as if a step had mapped sectors since the source told of its own
        changed.append(flip(change, *args, **options))
        return changed[-1]

    def note_thread(*args: Any) -> None:
        waiting.append((len(changed), threading.current_thread()))
        hear(*args)

    monkeypatch.setattr(home.exchange, "_flip", map_more)
    monkeypatch.setattr(HomeExecutor, "hear", note_thread)
    ranks.move("a", (1, 2), "a")
    assert (changed[0], changed[-1]) == (False, True)
    assert [thread is home._loop.thread for tries, thread in waiting if tries == 1] == [False]
    heard.wait(list(expected))
    assert heard.tokens == expected
    ranks.part("a")


def test_sectors_that_were_copied_ahead_go_with_those_of_their_home(ranks: EngineGroup) -> None:
    """The home had not told of them yet: the other rank kept them for good, in the place of later ones."""
    heard, expected = begin_answers(ranks)
    home, memory = ranks["a"], ranks["b"].stages.of("a").memory
    prepare(ranks, 1, "b")
    told = set(home.kv.memory.mapped_sectors)

    def copied_ahead() -> set[tuple[int, int]]:
        ranks["b"].exchange.copy("a", (1,), home.kv.locate((1,)), home.exchange.written_blocks())
        return set(mapped(memory)) - told

    wait_until(copied_ahead)
    ranks["b"].exchange.give_up("a", (1,))
    home.exchange.end()
    heard.wait(list(expected))
    home.kv.memory.trim(1 << 20)
    home.ranks.cap_reached()
    wait_until(lambda: not set(mapped(memory)) - set(home.kv.memory.mapped_sectors))
    ranks.part("a")


@pytest.mark.parametrize("owner", ["a", "c"])
def test_a_last_copy_that_fails_loses_a_rank_but_no_token(
    ranks: EngineGroup, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    if owner != "a":
        ranks.move("a", (1,), owner)
    copied = GuestStage._copied

    def fail(stage: GuestStage, item: CopyItem) -> Copied:
        with monkeypatch.context() as patch:
            if item.flips:
                patch.setattr(OpenFile, "read_into", broken)
            return copied(stage, item)

    heard, expected = begin_answers(ranks)
    monkeypatch.setattr(GuestStage, "_copied", fail)
    prepare(ranks, 1, "b")
    with pytest.raises(RankLost, match="disk"):
        ranks["a"].exchange.flip(ranks["a"].path.redirected({1: "b"}))
    end = time.monotonic() + 60
    while ranks["a"].recovery.lost_rank is None:
        assert time.monotonic() < end
        time.sleep(0.002)
    assert ranks["a"].recovery.lost_rank == "b"
    assert ranks["a"].recovery.recover("b", lambda shards: None, {}) == 0
    assert ranks["a"].path.ranks == ("a", "a", "a")
    heard.wait(list(expected))
    assert heard.tokens == expected
    ranks["a"].check()


def broken(*args: Any) -> None:
    raise StateError("the disk is broken")


def test_a_rank_keeps_what_it_gave_until_it_was_copied_and_no_longer(ranks: EngineGroup) -> None:
    ranks.move("a", (1,), "c")
    heard, expected = begin_answers(ranks)
    seen = list[tuple[int, ...]]()
    confirm = ranks["a"]._home.confirm

    def look() -> int:
        seen.append(ranks["c"].stages.by_home["a"].memory.layers)
        return confirm()

    ranks["a"]._home.confirm = look  # type: ignore[method-assign]
    ranks.move("a", (1,), "b")
    assert seen[0] == (1,)
    ranks["a"]._home.still_at("c", (), 10.0)  # it has done what it was told
    assert ranks["c"].stages.by_home["a"].memory.layers == ()
    heard.wait(list(expected))
    assert heard.tokens == expected
    ranks.part("a")


def test_sectors_that_were_given_back_since_their_rank_told_of_them_are_asked_for_again(
    ranks: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numbers are soon those of others, in other pages: here c hears of neither before it has told."""
    a, b, c = (ranks[rank] for rank in "abc")
    expected = Continuation(ranks.plain(), PROMPTS[2], 120)
    layers, heard, told_of = (1, 2), Collector(), threading.Event()
    ranks.move("a", layers, "c")
    for number, prompt in enumerate(PROMPTS[:2]):
        a.submit(Request(prompt, 60, id=f"r{number}"), heard)
    heard.wait(["r0", "r1"])
    a.submit(Request(PROMPTS[2], 120, id="r2"), heard)
    heard.wait_for_tokens("r2", 3)
    a.exchange.pause()
    do = GuestStage._do

    def do_late(stage: GuestStage, item: Any) -> bool:
        return (stage is not c.stages.by_home["a"] or told_of.wait(30)) and do(stage, item)

    with monkeypatch.context() as patch:
        patch.setattr(GuestStage, "_do", do_late)
        a._memory.trim(a._memory.mapped_pages)  # as weights that come back have it do
        b.exchange.prepare("a", layers, a.exchange.begin(layers))
        blocks, told = a.exchange.written_blocks(), c.stages.of("a").layers_kv(layers)
        b.exchange.copy("a", layers, told, blocks)
        told_of.set()
    while c.stages.by_home["a"].memory.mapped_count > a._memory.mapped_count:
        time.sleep(0.001)
    c.submit(Request(PROMPTS[0], 5, id="own"), heard)  # it gets their pages
    heard.wait(["own"])
    a.exchange.resume()
    heard.wait_for_tokens("r2", 100)
    now = c.stages.of("a").layers_kv(layers).pages[1]
    assert any(told.pages[1].get(sector, pages) != pages for sector, pages in now.items())
    a.exchange.flip(a.path.redirected(dict.fromkeys(layers, "b")), {("c", "b"): told})
    heard.wait(["r2"])
    assert heard.tokens["r2"] == expected
    ranks.part("a")


def test_what_a_request_leaves_that_is_cancelled_as_layers_begin_to_move_goes_with_them(ranks: EngineGroup) -> None:
    """Its blocks come free behind the step whose report says so, and others share them from then on."""
    a, heard, go_on = ranks["a"], Collector(), threading.Event()
    expected = Continuation(ranks.plain(), PROMPTS[0], TOKENS)
    a.submit(Request(PROMPTS[0], TOKENS, id="first"), heard)
    heard.wait_for_tokens("first", 2)
    a._loop.post(lambda: go_on.wait(30))
    a.cancel("first")
    with ThreadPoolExecutor(1) as threads:
        moved = threads.submit(ranks.move, "a", (1, 2), "b")
        while len(a._loop._commands) < 2:
            time.sleep(0.001)
        go_on.set()
        moved.result(60)
    a.submit(Request(PROMPTS[0], TOKENS, id="again"), heard)
    heard.wait(["again"])
    assert heard.tokens["again"] == expected, heard.ends["again"]
    assert ranks.tracked["a"].computed < 2 * len(PROMPTS[0]) + TOKENS, "most of the prompt was there"
    ranks.part("a")


class FakePeers:
    """Other ranks, whom nobody asks."""

    name = "a"

    def open_memory(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(args)


def test_models_whose_layers_were_exchanged_go_when_their_engines_have_ended() -> None:
    """What copies let pass is an engine, which has its model."""
    group = EngineGroup("ab")
    for rank in "ab":
        group[rank].ranks.use_peers(FakePeers())
    group.join("a", "b")
    models = [weakref.ref(group.tracked[rank].model) for rank in "ab"]
    group.close()
    del group
    gc.collect()
    assert [model() for model in models] == [None, None]
