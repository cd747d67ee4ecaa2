"""Engines whose layers other ranks compute: the tokens of one alone, none computed twice, none lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from elastic import CapacityError, ConfigError, StateError
from elastic.cluster.control.connection import queue_pair
from elastic.engines.base import Output, Request, Sampling
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.pipeline.forward import StageTiming
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.stage import GuestStage
from elastic.engines.pipeline.turn import Turn
from elastic.errors import RankLost
from elastic.kvcache.storage.guest import GuestMemory
from elastic.memory.backends.shared_file import OpenFile
from support import architectures
from support.architectures import in_turn
from support.cluster.engine_group import EngineGroup, engine_groups, read_file
from support.processes import wait_until
from support.serving.generations import Collector, Continuation, prompts
from support.wrapped_model import layers as decoder_layers

PROMPTS = prompts([40, 25, 9, 33], architectures.VOCAB)


@pytest.fixture
def group() -> Iterator[Callable[..., EngineGroup]]:
    """group(ranks, architecture, bytes, **options); closed and checked when the test ends."""
    with engine_groups() as make:
        yield make


def requests(tokens: int, name: str = "r") -> list[Request]:
    return [Request(prompt, tokens, id=f"{name}{number}") for number, prompt in enumerate(PROMPTS)]


def test_layers_that_another_rank_computes_give_the_tokens_of_one_rank(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    expected = {f"r{i}": Continuation(ranks.plain(), prompt, 24) for i, prompt in enumerate(PROMPTS)}
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    heard = Collector()
    for request in requests(24):
        ranks["a"].submit(request, heard)
    heard.wait(list(expected))
    assert heard.tokens == expected
    assert ranks["a"].path.ranks == ("a", "b", "b")
    ranks.check()
    ranks.part("a")
    assert ranks["a"].path.ranks == ("a",) * 3
    ranks.check()


def plain(group: EngineGroup, tokens: int, name: str = "r") -> dict[str, Any]:
    model = group.plain()
    return {f"{name}{i}": Continuation(model, prompt, tokens) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize(
    ("architecture", "cohorts"),
    in_turn(
        ["llama-gqa", "mistral-sliding", "gemma3", "qwen3-moe", "gpt2", "gpt-oss"],
        [2, 1],
        ["gemma3", "gpt2", "gpt-oss"],
    ),
)
def test_layers_go_there_and_back_while_requests_run(
    group: Callable[..., EngineGroup], architecture: str, cohorts: int
) -> None:
    ranks = group("ab", architecture, nbytes=8 << 20)
    expected = plain(ranks, 48)
    for home, guest in ("ab", "ba"):
        ranks.join(home, guest)
        ranks[home].cohorts.set_cohorts(cohorts)
    heard = {home: Collector() for home in "ab"}
    for home in "ab":
        for request in requests(48):
            ranks[home].submit(request, heard[home])
    for layers in ((1, 2), (2,), (0,), (0, 1)):
        for home, guest in ("ab", "ba"):
            heard[home].wait_for_tokens("r0", 4)
            ranks.move(home, layers, guest)
        ranks.check()
        for home in "ab":
            ranks.move(home, layers, home)
        ranks.check()
    for home in "ab":
        heard[home].wait(list(expected))
        assert heard[home].tokens == expected
        assert ranks.tracked[home].computed == sum(len(prompt) + 47 for prompt in PROMPTS)
        ranks.part(home)


def live_bytes(ranks: EngineGroup, home: str) -> dict[tuple[str, int], list[bytes]]:
    """What is in the blocks of each sequence, by layer, wherever that is; nothing of the home is in flight."""
    engine = ranks[home]
    found: dict[tuple[str, int], list[bytes]] = {}
    for layer, owner in enumerate(engine.path.ranks):
        kv = engine.kv.locate([layer]) if owner == home else ranks[owner].stages.of(home).layers_kv([layer])
        group, size = engine._memory.group_of(layer), kv.format.block_bytes
        per_sector = engine._memory.blocks_per_sector(group)
        with closing(OpenFile(kv.file)) as file:
            sectors = {
                sector: b"".join(read_file(file, page * kv.page_bytes, kv.page_bytes) for page in pages)
                for sector, pages in kv.pages[layer].items()
            }
        for name, sequence in engine._loop.scheduler.sequences.items():
            places = [divmod(block, per_sector) for block in sequence.table.blocks[group]]
            found[name, layer] = [sectors[sector][i * size : (i + 1) * size] for sector, i in places]
    return found


@pytest.mark.parametrize(("architecture", "rounds"), in_turn(["llama-gqa", "gemma3"], [1, 3]))
def test_a_flip_changes_no_bit_of_keys_and_values(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch, architecture: str, rounds: int
) -> None:
    ranks = group("abc", architecture)
    engine = ranks["a"]
    compared = ranks.record_flips("a", lambda: live_bytes(ranks, "a"), monkeypatch)
    for guest in "bc":
        ranks.join("a", guest)
    heard = Collector()
    for request in requests(60):
        engine.submit(request, heard)
    heard.wait_for_tokens("r3", 2)
    copied = 0
    for layers, rank in (((1, 2), "b"), ((2,), "c"), ((1,), "c"), ((0,), "b"), ((1, 2), "a"), ((0,), "a")):
        copied += ranks.move("a", layers, rank, rounds).copied_bytes
    for before, after in compared:
        assert before == after
        assert any(map(any, before.values()))
    heard.wait([f"r{i}" for i in range(len(PROMPTS))])
    assert len(compared) == 6
    assert copied > 0


def test_what_is_kept_for_reuse_goes_with_its_layers_and_what_is_free_does_not(
    group: Callable[..., EngineGroup],
) -> None:
    ranks = group("ab")
    engine, heard = ranks["a"], Collector()
    ranks.join("a", "b")
    prompt = PROMPTS[0][:1] * 40
    engine.submit(Request(prompt, 3, id="first"), heard)
    heard.wait(["first"])
    held, layers = engine._blocks.pools[0].held, (1, 2)
    assert 0 < held < engine._memory.mapped_count * engine._memory.blocks_per_sector(0)
    assert engine.reports.kv_room().held_bytes == (held * engine.kv_format.block_bytes,) * 3
    copies = list[int]()
    copy = ranks["b"].exchange.copy
    ranks["b"].exchange.copy = lambda *args, **options: copies.append(copy(*args, **options))  # type: ignore[method-assign,func-returns-value]
    ranks.move("a", layers, "b", rounds=1)
    assert copies == [len(layers) * held * engine.kv_format.block_bytes]
    before = ranks.tracked["a"].computed
    engine.submit(Request(prompt, 10, id="second"), heard)
    heard.wait(["second"])
    assert ranks.tracked["a"].computed - before < len(prompt), "most of the prompt was there"
    assert heard.tokens["second"] == Continuation(ranks.plain(), prompt, 10)
    ranks.part("a")


def test_blocks_that_cannot_be_copied_leave_everything_as_it_was(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = group("ab")
    expected = plain(ranks, 50)
    ranks.join("a", "b")
    ranks.move("a", (2,), "b")
    path = ranks["a"].path
    heard = Collector()
    for request in requests(50):
        ranks["a"].submit(request, heard)
    heard.wait_for_tokens("r0", 2)
    with monkeypatch.context() as patch:
        patch.setattr(OpenFile, "read_into", broken)
        for layers, rank in (((1,), "b"), ((2,), "a")):
            with pytest.raises(StateError, match="disk"):
                ranks.move("a", layers, rank, rounds=0)
            assert ranks["a"].path == path
            ranks.check()
    ranks.move("a", (1,), "b")
    ranks.move("a", (1, 2), "a")
    heard.wait(list(expected))
    assert heard.tokens == expected
    ranks.part("a")


def broken(*args: Any) -> None:
    raise StateError("the disk is broken")


def test_prepared_layers_that_are_given_up_leave_nothing(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    ranks.join("a", "b")
    pages = ranks["b"].runtime.status().places[0].owners
    began = ranks["a"].exchange.begin((1, 2))
    ranks["b"].exchange.prepare("a", (1, 2), began)
    assert ranks["b"].runtime.status().places[0].owners != pages
    ranks["b"].exchange.give_up("a", (1, 2))
    ranks["a"].exchange.end()
    assert ranks["b"].runtime.status().places[0].owners == pages
    ranks.move("a", (1, 2), "b")
    wait_until(lambda: ranks["b"].stages.by_home["a"].path == ranks["a"].path)  # the log is read by another thread
    with pytest.raises(StateError, match="are computed here"):
        ranks["b"].exchange.give_up("a", (1,))
    ranks.part("a")


def test_room_is_made_between_two_steps_of_others_unless_it_is_in_a_hurry(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    ranks.join("a", "b")
    pages, began = ranks["b"].runtime.status().places[0].owners, ranks["a"].exchange.begin((1, 2))

    def prepare(*, coordinated: bool) -> threading.Thread:
        asked = partial(ranks["b"].exchange.prepare, "a", (1, 2), began, coordinated=coordinated)
        thread = threading.Thread(target=asked)
        thread.start()
        return thread

    with ranks["b"]._home._turn:  # as a step that computes
        prepare(coordinated=False).join(30)
        assert ranks["b"].runtime.status().places[0].owners != pages
        ranks["b"].exchange.give_up("a", (1, 2))
        waits = prepare(coordinated=True)
        wait_until(lambda: bool(ranks["b"]._home._turn._waiting))
        assert ranks["b"].runtime.status().places[0].owners == pages
    waits.join(30)
    assert ranks["b"].runtime.status().places[0].owners != pages
    ranks["b"].exchange.give_up("a", (1, 2))
    ranks["a"].exchange.end()
    ranks.part("a")


def test_parts_that_were_prepared_leave_where_another_finds_no_room(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = group("ab")
    ranks.join("a", "b")
    pages, began = ranks["b"].runtime.status().places[0].owners, ranks["a"].exchange.begin((1, 2))
    add, added = GuestMemory.add_layers, list[tuple[int, ...]]()

    def refuse_the_second(memory: GuestMemory, layers: Sequence[int], *more: Any) -> None:
        added.append(tuple(layers))
        if len(added) == 2:
            raise CapacityError("no room", requested_bytes=1, free_bytes=0, total_bytes=0)
        add(memory, layers, *more)

    monkeypatch.setattr(GuestMemory, "add_layers", refuse_the_second)
    with pytest.raises(CapacityError, match="no room"):
        ranks["b"].exchange.prepare("a", (1, 2), began)
    assert added == [(1,), (2,)]
    assert ranks["b"].runtime.status().places[0].owners == pages
    ranks["b"].exchange.prepare("a", (1, 2), began)
    ranks["b"].exchange.give_up("a", (1, 2))
    ranks["a"].exchange.end()
    ranks.part("a")


def test_a_flip_ends_its_exchange_and_one_that_fails_does_not(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    ranks.join("a", "b")
    engine = ranks["a"]
    began = engine.exchange.begin((1, 2))
    with pytest.raises(StateError, match="not prepared"):
        engine.exchange.flip(engine.path.redirected({1: "b", 2: "b"}))
    assert engine.exchange.written_blocks() == ((),)
    ranks["b"].exchange.prepare("a", (1, 2), began)
    ranks["b"].exchange.copy("a", (1, 2), engine.kv.locate((1, 2)), engine.exchange.written_blocks())
    engine.exchange.flip(engine.path.redirected({1: "b", 2: "b"}))
    with pytest.raises(StateError, match="no exchange has begun"):
        engine.exchange.written_blocks()
    engine.exchange.begin((1,))
    engine.exchange.end()
    ranks.part("a")


def test_a_stage_that_has_no_addresses_leaves_the_model_as_it_was(group: Callable[..., EngineGroup]) -> None:
    ranks, (_, log) = group("ab"), queue_pair()
    with pytest.raises(ConfigError, match="sectors=1000000000: there are addresses for"):
        ranks["b"].stages.open("a", log, ranks.exchange.transport("b", "a"), ranks["a"].path, 1_000_000_000)
    assert not any("forward" in vars(layer) for layer in decoder_layers(ranks["b"]._model))


def test_layers_with_room_for_them_nowhere_are_refused_before_anything_changes(
    group: Callable[..., EngineGroup],
) -> None:
    ranks = group("ab", nbytes=1 << 20)
    ranks.join("a", "b", sectors=4)
    ranks["b"].runtime.kv.resize(0)
    with pytest.raises(CapacityError):
        ranks.move("a", (1, 2), "b")
    assert ranks["a"].path.ranks == ("a", "a", "a")
    ranks["b"].runtime.kv.resize("max")
    ranks.check()
    ranks.part("a")


def test_a_path_that_does_not_follow_is_refused(group: Callable[..., EngineGroup]) -> None:
    ranks = group("abc")
    for guest in "bc":
        ranks.join("a", guest)
    engine = ranks["a"]
    with pytest.raises(StateError, match="no exchange"):
        engine.exchange.flip(engine.path.redirected({1: "b"}))
    engine.exchange.begin((1,))
    for path, words in (
        (replace(engine.path, ranks=("a", "b", "b"), epoch=5), "does not follow"),
        (replace(engine.path, ranks=("a", "a", "a"), epoch=1), "changes no shard"),
        (replace(engine.path, ranks=("a", "b", "c"), epoch=1), "not prepared"),
        (replace(engine.path, ranks=("a", "x", "a"), epoch=1), "not attached"),
        (replace(engine.path, ranks=("a", "b", "a"), epoch=1), "not prepared"),
    ):
        with pytest.raises((ConfigError, StateError), match=words):
            engine.exchange.flip(path)
        assert engine.path.epoch == 0
    engine.exchange.end()
    ranks.part("a")


def test_requests_of_a_group_are_not_moved_with_their_keys_and_values(group: Callable[..., EngineGroup]) -> None:
    ranks = group("abc")
    ranks.join("a", "b")
    heard = Collector()
    ranks["a"].submit(requests(30)[0], heard)
    heard.wait_for_tokens("r0", 1)
    for asked in (ranks["a"].moves.locate, ranks["a"].moves.hand_over):
        with pytest.raises(StateError, match="shared with other ranks"):
            asked("r0")
    heard.wait(["r0"])
    ranks.part("a")
    assert ranks["a"].moves.locate("r0") == ()


@pytest.mark.parametrize("cohorts", [1, 2])
def test_what_is_told_of_the_cache_begins_anew_whenever_layers_have_changed_their_rank(
    group: Callable[..., EngineGroup], cohorts: int
) -> None:
    ranks, heard = group("ab", cohorts=cohorts), Collector()
    expected = plain(ranks, 60)
    for request in requests(60):
        ranks["a"].submit(request, heard)
    heard.wait_for_tokens("r3", 2)
    ranks.join("a", "b")
    ranks.move("a", (1,), "b")
    ranks["a"]._loop.between_steps(partial(told_is_there, ranks, (0, 2)))
    heard.wait_for_tokens("r3", 12)
    ranks["a"].cancel("r0")
    heard.wait(["r0"])
    ranks["a"]._loop.between_steps(partial(told_is_there, ranks, (0, 2)))
    ranks.part("a")
    ranks["a"]._loop.between_steps(partial(told_is_there, ranks, (0, 1, 2)))
    heard.wait(list(expected))
    assert {name: heard.tokens[name] for name in ("r1", "r2", "r3")} == {n: expected[n] for n in ("r1", "r2", "r3")}


def told_is_there(ranks: EngineGroup, layers: tuple[int, ...]) -> None:
    """Between two steps of a: it has told where all of its sequences are, in the layers that it computes."""
    tracked = ranks.tracked["a"]
    ranks["a"]._loop.settle_intact()
    ranks["a"]._loop._tell(always=True)
    sequences = list(ranks["a"]._loop.scheduler.sequences.values())
    assert sequences
    for sequence in sequences:
        kv = tracked.directory.of(sequence.id, len(sequence.tokens))
        assert kv == (sequence.kv() if sequence.computed else None)
        for sector in tracked.directory.sectors_of([kv] if kv is not None else []):
            assert sector.layers == layers
            assert sector.pages == ranks["a"]._memory.groups[sector.group].pages_of(sector.sector, layers)


def test_everything_that_can_be_asked_for_is_what_one_rank_answers(group: Callable[..., EngineGroup]) -> None:
    ranks = group("abc", share_prefixes=False)
    asked = [
        Request(PROMPTS[0], 12, id="drawn", sampling=Sampling(temperature=0.9, top_k=20, seed=5), n=2),
        Request(PROMPTS[1], 12, id="scored", prompt_logprobs=2, logprobs=1),
        Request(PROMPTS[2], 12, id="stopped", stop_tokens=tuple(range(40))),
    ]
    for guest in "bc":
        ranks.join("a", guest)
    ranks.move("a", (1,), "b")
    ranks.move("a", (2,), "c")
    alone, piped = ([told(ranks[rank], request) for request in asked] for rank in "ba")
    assert [{key: output[0] for key, output in each.items()} for each in piped] == [
        {key: output[0] for key, output in each.items()} for each in alone
    ]
    (_, _, prompt), (_, _, same) = alone[1][0], piped[1][0]
    assert prompt is not None
    assert [None if each is None else round(each.logprob, 4) for each in prompt] == [
        None if each is None else round(each.logprob, 4) for each in same
    ]
    ranks.part("a")


def told(engine: ContinuousEngine, request: Request) -> dict[int, tuple[list[int], Any, Any]]:
    """The tokens of each answer, its end, and the log-probabilities of the prompt."""
    outputs: dict[int, list[Output]] = {}
    done = threading.Event()

    def listen(output: Output) -> None:
        outputs.setdefault(output.index, []).append(output)
        if len(outputs) == request.n and all(each[-1].finish for each in outputs.values()):
            done.set()

    engine.submit(request, listen)
    assert done.wait(60)
    return {
        index: ([token for each in told for token in each.tokens], told[-1].finish, told[0].prompt_logprobs)
        for index, told in outputs.items()
    }


def test_no_token_comes_while_steps_are_paused_and_layers_change_their_rank_meanwhile(
    group: Callable[..., EngineGroup],
) -> None:
    ranks = group("ab")
    expected = plain(ranks, 60)
    ranks.join("a", "b")
    heard = Collector()
    for request in requests(60)[:2]:
        ranks["a"].submit(request, heard)
    heard.wait_for_tokens("r1", 2)
    ranks["a"].exchange.pause()
    told = {name: list(tokens) for name, tokens in heard.tokens.items()}
    for request in requests(60)[2:]:
        ranks["a"].submit(request, heard)
    assert ranks.move("a", (1, 2), "b").copied_bytes == 0  # nothing was written since the first copy
    ranks.check()
    assert heard.tokens == told
    ranks["a"].exchange.resume()
    heard.wait(list(expected))
    assert heard.tokens == expected
    ranks["a"].exchange.resume()
    ranks.part("a")


def test_a_rank_that_waits_for_the_next_step_of_live_requests_is_in_a_bubble(
    group: Callable[..., EngineGroup],
) -> None:
    """Whichever stage it is, though none of its steps has begun."""
    ranks = group("ab")
    ranks.join("a", "b")
    ranks.move("a", (0,), "b")
    (request,) = requests(60)[:1]
    heard, rows = Collector(), ranks["b"].stages.by_home["a"]._runner.rows
    ranks["a"].submit(request, heard)
    heard.wait_for_tokens("r0", 2)
    ranks["a"].exchange.pause()
    before = ranks["b"].stages.turn.times
    wait_until(lambda: ranks["b"].stages.turn.times.bubble_s > before.bubble_s, "the time is not counted")
    assert ranks["b"].stages.turn.times.waiting_s == before.waiting_s, "no step waits in it"
    ranks["a"].exchange.resume()
    heard.wait(["r0"])
    wait_until(lambda: not rows, "it has not heard that the request has ended")
    ended = ranks["b"].stages.turn.times
    assert ranks["b"].stages.turn.times.bubble_s == ended.bubble_s, "there is no work"
    ranks.part("a")


@pytest.mark.parametrize("cohorts", [1, 2])
def test_two_stages_compute_at_the_same_time(group: Callable[..., EngineGroup], cohorts: int) -> None:
    """The first one its second batch, while the second one has the first; no batch waits for that to end."""
    ranks, heard = group("ab"), Collector()
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    ranks["a"].cohorts.set_cohorts(cohorts)
    meeting, passes = threading.Barrier(2), {"a": 0, "b": 1}

    def meet(rank: str, *called: object) -> None:
        passes[rank] += 1
        if passes[rank] == 2:
            with suppress(threading.BrokenBarrierError):
                meeting.wait(10 if cohorts > 1 else 0.2)

    with ExitStack() as hooks:
        for rank, layer in (("a", 0), ("b", 1)):
            child = next(decoder_layers(ranks.tracked[rank].model)[layer].children())
            hooks.callback(child.register_forward_pre_hook(partial(meet, rank)).remove)
        ranks["a"].exchange.pause()
        for request in requests(8):
            ranks["a"].submit(request, heard)
        ranks["a"].exchange.resume()
        heard.wait([request.id for request in requests(8)])
    assert meeting.broken is (cohorts == 1)
    ranks.part("a")


# -- ranks that are lost, and steps that fail


def test_who_recovers_is_paused_no_more(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    expected = plain(ranks, 30)
    ranks.join("a", "b")
    ranks.move("a", (1,), "b")
    heard = Collector()
    ranks["a"].exchange.pause()
    for request in requests(30):
        ranks["a"].submit(request, heard)
    ranks.lose("b")
    wait_until(lambda: ranks["a"].recovery.lost_rank is not None)
    ranks["a"].recovery.recover("b", lambda layers: None)
    heard.wait(list(expected))
    assert heard.tokens == expected


def test_a_lost_rank_costs_no_token_and_only_what_was_computed(group: Callable[..., EngineGroup]) -> None:
    ranks = group("abc")
    expected = plain(ranks, 60)
    for home, guest in ("ab", "ac", "ba"):
        ranks.join(home, guest)
    ranks.move("a", (1,), "b")
    ranks.move("a", (2,), "c")
    ranks.move("b", (0,), "a")
    heard = {home: Collector() for home in "ab"}
    for home in "ab":
        for request in requests(60):
            ranks[home].submit(request, heard[home])
    heard["a"].wait_for_tokens("r3", 4)
    ranks.lose("c")
    wait_until(lambda: ranks["a"].recovery.lost_rank is not None)
    restored: list[tuple[int, ...]] = []
    again = ranks["a"].recovery.recover("c", restored.append)
    assert restored == [(1, 2)]
    assert ranks["a"].path.ranks == ("a", "a", "a")
    assert ranks["a"].recovery.lost_rank is None
    for home in "ab":
        heard[home].wait(list(expected))
        assert heard[home].tokens == expected
    least = sum(len(prompt) + 59 for prompt in PROMPTS)
    assert 0 < again < least
    wait_until(lambda: ranks["b"].stages.by_home["a"].ended)
    ranks["b"].stages.close("a")
    ranks.join("a", "b")
    ranks.move("a", (1,), "b")
    ranks.part("a")
    ranks.part("b")


@pytest.mark.parametrize(
    ("architecture", "cohorts"), in_turn(["llama-gqa", "gemma3", "mistral-sliding", "qwen3-moe"], [1, 2])
)
def test_what_a_killed_rank_had_is_read_from_its_memory_and_not_computed_again(
    group: Callable[..., EngineGroup], architecture: str, cohorts: int
) -> None:
    ranks = group("abc", architecture)
    expected = plain(ranks, 60)
    for home, guest in ("ab", "ac", "ba"):
        ranks.join(home, guest)
    ranks.move("a", (1,), "b")
    ranks.move("a", (0, 2), "c")
    ranks.move("b", (0,), "a")
    ranks["a"].cohorts.set_cohorts(cohorts)
    heard = Collector()
    for request in requests(60):
        ranks["a"].submit(request, heard)
    for request in requests(60):
        heard.wait_for_tokens(request.id, 6)
    memories = ranks.kill("c")
    wait_until(lambda: ranks["a"].recovery.lost_rank is not None)
    assert ranks["a"].recovery.recover("c", lambda layers: None, memories) == 0
    assert ranks["a"].path.helpers == ()
    heard.wait(list(expected))
    assert heard.tokens == expected
    for rank in "ab":
        ranks[rank].check()
    ranks.part("b")


def test_what_a_killed_rank_did_not_tell_is_computed_again(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = group("ab")
    expected = plain(ranks, 60)
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    monkeypatch.setattr(GuestStage, "_answer", lambda *_: None)
    heard = Collector()
    for request in requests(60):
        ranks["a"].submit(request, heard)
    heard.wait_for_tokens("r3", 4)
    memories = ranks.kill("b")
    wait_until(lambda: ranks["a"].recovery.lost_rank is not None)
    assert ranks["a"].recovery.recover("b", lambda layers: None, memories) > 0
    heard.wait(list(expected))
    assert heard.tokens == expected


@pytest.mark.parametrize("others", [False, True], ids=["nobody", "others"])
def test_a_request_that_never_fits_alone_fails_or_leaves_when_its_group_is_lost(
    group: Callable[..., EngineGroup], others: bool
) -> None:
    ranks = group("ab", nbytes=200 << 10)
    engine, alone = ranks["a"], ranks.sectors_alone("a")
    expected = Continuation(architectures.plain("llama-gqa"), PROMPTS[1], 30)
    ranks.join("a", "b", sectors=1)
    ranks.move("a", (1, 2), "b")
    ranks["b"].stages.of("a").memory.allot(alone + alone // 2)
    engine.ranks.set_cap(alone + alone // 2)
    tokens = engine._memory.blocks_per_sector(0) * engine.kv_format.block_tokens * (alone + 1)
    long, short = Request(PROMPTS[0], tokens - len(PROMPTS[0]), id="long"), Request(PROMPTS[1], 30, id="short")
    heard = Collector()
    for request in (short, long):
        engine.submit(request, heard)
    heard.wait_for_tokens("long", 1)
    ranks.lose("b")
    wait_until(lambda: engine.recovery.lost_rank is not None)
    left = list[str]()
    if others:
        engine.moves.on_impossible = lambda request, error: left.append(f"{request}: {type(error).__name__}")
    engine.recovery.recover("b", lambda layers: None)
    heard.wait(["short"] if others else ["short", "long"])
    assert left == (["long: CapacityError"] if others else [])
    assert others or heard.ends["long"].finish == "failed"
    assert heard.tokens["short"] == expected


def test_weights_that_cannot_be_restored_leave_the_engine_waiting(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    expected = plain(ranks, 40)
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    heard = Collector()
    for request in requests(40):
        ranks["a"].submit(request, heard)
    heard.wait_for_tokens("r3", 2)
    ranks.lose("b")
    with pytest.raises(CapacityError):
        ranks["a"].recovery.recover("b", no_room)
    assert ranks["a"].recovery.lost_rank == "b"
    with pytest.raises(RankLost):
        ranks["a"].exchange.begin((0,))
    ranks["a"].recovery.recover("b", lambda layers: None)
    heard.wait(list(expected))
    assert heard.tokens == expected


def no_room(layers: tuple[int, ...]) -> None:
    raise CapacityError("no room", requested_bytes=1, free_bytes=0, total_bytes=0)


@pytest.mark.parametrize(("failing", "cohorts"), in_turn(["a", "b", "c"], [1, 2]))
def test_an_error_of_the_model_anywhere_ends_its_step_and_no_other(
    group: Callable[..., EngineGroup], failing: str, cohorts: int
) -> None:
    ranks = group("abc")
    expected = plain(ranks, 20)
    for guest in "bc":
        ranks.join("a", guest)
    for layer, rank in ((1, "b"), (2, "c")):
        ranks.move("a", (layer,), rank)
    ranks["a"].cohorts.set_cohorts(cohorts)
    own = {"a": 0, "b": 1, "c": 2}[failing]
    layer = decoder_layers(ranks.tracked[failing].model)[own]

    def fail(module: Any, args: Any) -> None:
        hook.remove()
        raise RuntimeError("out of order")

    hook = next(layer.children()).register_forward_pre_hook(fail)
    heard = Collector()
    bad = Request(PROMPTS[1], 20, id="bad")
    ranks["a"].submit(bad, heard)
    heard.wait(["bad"])
    assert heard.ends["bad"].finish == "failed"
    assert "out of order" in (heard.ends["bad"].error or "")
    for request in requests(20):
        ranks["a"].submit(request, heard)
    heard.wait(list(expected))
    assert {name: heard.tokens[name] for name in expected} == expected
    ranks.part("a")


def test_a_rank_that_does_not_answer_counts_as_lost(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = group("ab")
    expected = plain(ranks, 30)
    ranks.join("a", "b")
    ranks.move("a", (2,), "b")
    heard = Collector()
    for request in requests(30):
        ranks["a"].submit(request, heard)
    heard.wait_for_tokens("r0", 2)
    go_on = threading.Event()
    copied = GuestStage._copied
    monkeypatch.setattr(GuestStage, "_copied", lambda stage, item: (go_on.wait(60), copied(stage, item))[1])
    began = ranks["a"].exchange.begin((1,))
    ranks["b"].exchange.prepare("a", (1,), began)
    ranks["b"].exchange.copy("a", (1,), ranks["a"].kv.locate((1,)), ranks["a"].exchange.written_blocks())
    with pytest.raises(RankLost, match="did not answer"):
        ranks["a"].exchange.flip(ranks["a"].path.redirected({1: "b"}), timeout_s=0.1)
    wait_until(lambda: ranks["a"].recovery.lost_rank == "b")
    assert ranks["a"].path.ranks == ("a", "a", "b")
    go_on.set()
    ranks["a"].recovery.recover("b", lambda layers: None)
    heard.wait(list(expected))
    assert heard.tokens == expected


def test_a_stage_refuses_a_step_of_another_epoch(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    ranks.join("a", "b")
    ranks.move("a", (2,), "b")
    engine = ranks["a"]
    engine._loop.between_steps(lambda: setattr(engine._home, "path", replace(engine.path, epoch=7)))
    heard = Collector()
    expected = plain(ranks, 8)
    for request in requests(8):
        engine.submit(request, heard)
    wait_until(lambda: engine.recovery.lost_rank == "b")
    assert ranks["b"].stages.by_home["a"].ended
    assert not heard.tokens
    engine.recovery.recover("b", lambda layers: None)
    heard.wait(list(expected))
    assert heard.tokens == expected


def test_cancelled_requests_leave_nothing_at_any_rank(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    ranks["a"].cohorts.set_cohorts(2)
    heard = Collector()
    for request in requests(200):
        ranks["a"].submit(request, heard)
    heard.wait_for_tokens("r0", 3)
    for number in range(4):
        ranks["a"].cancel(f"r{number}")
    heard.wait([f"r{number}" for number in range(4)])
    wait_until(lambda: not ranks["b"].stages.by_home["a"]._runner.rows)
    ranks["a"].runtime.kv.resize(0)
    assert ranks["a"].ranks.cap_reached()
    wait_until(lambda: not ranks["b"].stages.by_home["a"].memory.mapped_sectors)
    ranks["a"].runtime.kv.resize("max")
    ranks.part("a")


def test_the_model_is_as_it_was_when_nothing_is_shared_any_more(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    before = [set(layer.__dict__) for rank in "ab" for layer in decoder_layers(ranks.tracked[rank].model)]
    ranks.join("a", "b")
    ranks.move("a", (1,), "b")
    ranks.part("a")
    assert [set(layer.__dict__) for rank in "ab" for layer in decoder_layers(ranks.tracked[rank].model)] == before
    assert ranks["a"].stages._forward is None
    assert ranks["b"].stages._forward is None


def test_the_seconds_of_a_step_are_those_of_steps_that_a_rank_computes_by_itself(
    group: Callable[..., EngineGroup],
) -> None:
    ranks, heard = group("ab"), Collector()
    assert ranks["a"].step_times == (0.0, 0.0)
    for request in requests(8, "alone"):
        ranks["a"].submit(request, heard)
    heard.wait([f"alone{number}" for number in range(4)])
    alone_s, hop_s = ranks["a"].step_times
    assert alone_s > hop_s == 0.0
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    for request in requests(8):
        ranks["a"].submit(request, heard)
    heard.wait([f"r{number}" for number in range(4)])
    assert (ranks["a"].step_times[0], ranks["b"].step_times) == (alone_s, (0.0, 0.0))


@pytest.mark.parametrize(("ranks", "hop_s"), [("aabb", 0.25), ("abbb", 0.0), ("bbbb", 0.0)])
def test_a_hop_is_what_a_step_waits_beyond_what_others_compute_as_fast(ranks: str, hop_s: float) -> None:
    home = HomeExecutor(cast(Any, None), cast(Any, None), Turn(), LayerPath.alone("a", 4))
    home._learn_hop(LayerPath("a", tuple(ranks)), StageTiming(computed_s=2.0, waited_s=2.5))
    assert home.hop_s == hop_s, "two hops"


def test_what_a_hop_takes_is_seen_where_steps_go_by_others(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, heard, seen = group("ab"), Collector(), list[StageTiming]()
    monkeypatch.setattr(ranks["a"]._home, "_learn_hop", lambda path, timing: seen.append(timing))
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    for request in requests(8):
        ranks["a"].submit(request, heard)
    heard.wait([f"r{number}" for number in range(4)])
    assert all(timing.computed_s > 0 and timing.waited_s > 0 for timing in seen)
    assert len(seen) >= 8
