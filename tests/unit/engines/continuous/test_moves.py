"""Requests that move between engines with their keys and values: the same tokens, none computed twice, nothing left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic import CapacityError, ConfigError, Overloaded, StateError
from elastic.engines.base import Grammar, Output, Request, Sampling
from elastic.engines.core.kv_state import SequenceKV
from elastic.engines.core.step import SequenceState
from elastic.memory.backends.shared_file import OpenFile
from support import architectures
from support.serving.generations import Collector, continuation, is_continuation, prompts
from support.serving.kv_digests import kv_digests, layer_digests
from support.serving.tracked_engine import TrackedEngine

PROMPT = prompts([70], architectures.VOCAB)[0]


class Answers(Collector):
    """By request and index; keeps the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, list[Output]] = {}

    def __call__(self, output: Output) -> None:
        name = f"{output.request}/{output.index}"
        self.outputs.setdefault(name, []).append(output)
        super().__call__(replace(output, request=name))


@pytest.fixture
def engines() -> Iterator[Callable[..., TrackedEngine]]:
    """engine(architecture, bytes, **options), started; closed and checked when the test ends."""
    made: list[TrackedEngine] = []

    def engine(name: str = "llama-gqa", nbytes: int = 4 << 20, **options: Any) -> TrackedEngine:
        made.append(TrackedEngine(architectures.build(name), nbytes, **options))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def in_flight(call: Callable[[], Any]) -> Future[Any]:
    """Call in another thread."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def hand_over_after(source: TrackedEngine, request: str, steps: int) -> Any:
    """Stop a request when so many steps are over, the first of an engine, none of which may begin before."""
    source.go_on(steps - 1)
    while source.engine.reports.load().steps < steps:
        time.sleep(0.001)
    asked = in_flight(lambda: source.engine.moves.hand_over(request))
    while not source.engine._loop._commands and not asked.done():
        time.sleep(0.001)
    source.go_on(1)
    return asked.result(60)


def move(source: TrackedEngine, target: TrackedEngine, request: str, listener: Any) -> tuple[SequenceState, ...]:
    """The rest of a move: hand over, copy, adopt, release."""
    handed = source.engine.moves.hand_over(request)
    assert handed is not None
    states, kv = handed
    told = tuple(replace(each, exact=False) for each in kv)
    assert source.mirrored(states) == told or any(w for _, w in source.engine.kv_format.groups)
    if kv:
        target.engine.moves.receive(states, kv, source.sources_of(kv))
    last = {state.id: len(state.request.prompt) + len(state.generated) - 1 for state in states}
    taken = target.engine.adopt(states, listener, kv=kv)
    assert taken >= sum(min(one.computed, last[one.sequence]) for one in kv)
    source.engine.moves.release(request)
    return states


@pytest.mark.parametrize(
    ("name", "layout", "shards"),
    [
        ("llama-gqa", "head_centric", 1),
        ("llama-gqa", "token_major", 1),
        ("llama-gqa", "head_centric", 2),
        ("qwen2-sliding", "head_centric", 1),
        ("mistral-sliding", "token_major", 1),
        ("gemma3", "head_centric", 1),
        ("gemma3", "token_major", 4),
        ("opt", "token_major", 1),
    ],
)
def test_a_request_moves_while_it_generates_and_no_token_is_computed_twice(
    name: str, layout: str, shards: int, engines: Any
) -> None:
    a, b = (engines(name, block_layout=layout, block_tokens=6, wrap={"shards": shards}) for _ in range(2))
    heard, request = Collector(), Request(PROMPT, 60)

    def listener(output: Output) -> None:
        a.engine._loop.paused |= len(heard.tokens.get(request.id, ())) + 1 in (1, 9, 30)  # else it may end before
        heard(output)

    a.engine.submit(request, listener)
    begun = (SequenceState(request.id, request, 0, 0),)
    rounds = []
    for tokens in (1, 9, 30):
        heard.wait_for_tokens(request.id, tokens)
        kv = a.engine.moves.locate(request.id)
        if tokens < 30:
            a.engine.exchange.resume()
        rounds.append(b.engine.moves.receive(begun, kv, a.sources_of(kv), coordinated=tokens > 1))
    assert all(rounds)
    if all(window is None for _, window in a.engine.kv_format.groups):
        assert rounds[0] > sum(rounds[1:]), "what is there is not copied again"
    states, kv = a.engine.moves.hand_over(request.id)
    assert b.engine.moves.receive(states, kv, a.sources_of(kv)) >= 0
    table = b.engine.moves.received._requests[request.id].sequences[request.id].table
    there = SequenceKV(request.id, kv[0].computed, tuple(map(tuple, table.blocks)))
    assert layer_digests(b.engine, there) == kv_digests(a.engine, request.id)[request.id]
    assert b.engine.adopt(states, heard, kv=kv) == kv[0].computed == len(PROMPT) + len(states[0].generated) - 1
    heard.wait([request.id])
    a.engine.moves.release(request.id)
    assert is_continuation(architectures.build(name), PROMPT, 60, heard.tokens[request.id])
    assert a.computed + b.computed == len(PROMPT) + 59


def test_room_that_comes_free_behind_the_last_step_is_told(engines: Any) -> None:
    one, heard, request = engines(), Collector(), Request(PROMPT, 3)
    one.engine.submit(request, heard)
    heard.wait([request.id])
    while not one.rooms:
        time.sleep(0.001)
    assert one.loads[-1].free_blocks < one.rooms[-1].free_blocks == one.rooms[-1].total_blocks


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_prompt_goes_on_elsewhere_where_it_stopped(name: str, steps: int, engines: Any) -> None:
    a, b = engines(name), engines(name)
    a.only(0)
    heard, request = Collector(), Request(PROMPT, 20)
    a.engine.submit(request, heard)
    states, kv = hand_over_after(a, request.id, steps)
    assert kv == (replace(kv[0], computed=32 * steps, decoding=False),)
    assert states[0].generated == ()
    b.engine.moves.receive(states, kv, a.sources_of(kv))
    b.engine.adopt(states, heard, kv=kv)
    heard.wait([request.id])
    a.engine.moves.release(request.id)
    assert is_continuation(architectures.build(name), PROMPT, 20, heard.tokens[request.id])
    assert (a.computed, b.computed) == (32 * steps, 70 - 32 * steps + 19)


@pytest.mark.parametrize("share", [True, False])
def test_several_answers_move_together_and_share_the_prompts_blocks_there_too(share: bool, engines: Any) -> None:
    rule = Sampling(1.2, seed=5, repetition_penalty=1.1, frequency_penalty=0.2)
    request = Request(PROMPT, 30, rule, n=3, logprobs=2)
    alone, a, b = (engines(share_prefixes=share) for _ in range(3))
    expected, heard = Answers(), Answers()
    names = [f"{request.id}/{i}" for i in range(3)]
    alone.engine.submit(request, expected)
    expected.wait(names)
    moves = threading.Event()

    def listen(output: Output) -> None:
        heard(output)
        if names[0] in heard.ends and all(len(heard.tokens.get(name, ())) >= 5 for name in names[1:]):
            moves.wait(30)  # or they might end before

    a.engine.submit(request, listen)
    heard.wait_for_tokens(names[0], 3)
    a.engine.cancel(request.id, 0)
    heard.wait(names[:1])
    for name in names[1:]:
        heard.wait_for_tokens(name, 5)
    moves.set()
    states = move(a, b, request.id, heard)
    assert [state.index for state in states] == [1, 2]
    heard.wait(names)
    for name in names[1:]:
        assert heard.tokens[name] == expected.tokens[name]
        logprobs = [[o.logprobs[0] for o in each.outputs[name] if o.tokens] for each in (heard, expected)]
        for one, other in zip(*logprobs, strict=True):
            assert (one.token, one.rank) == (other.token, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    assert b.computed == sum(30 - len(state.generated) for state in states)


def test_blocks_that_answers_share_are_shared_where_they_go(engines: Any) -> None:
    a, b = engines(), engines()
    heard, request = Answers(), Request(PROMPT, 40, Sampling(1.5, seed=2), n=3)
    a.engine.submit(request, heard)
    for i in range(3):
        heard.wait_for_tokens(f"{request.id}/{i}", 4)
    states, kv = a.engine.moves.hand_over(request.id)
    copied = b.engine.moves.receive(states, kv, a.sources_of(kv))
    taken = b.engine.moves.received._requests[request.id].sequences
    tables = [taken[one.sequence].table.blocks[0] for one in kv]
    full = len(PROMPT) // 8
    assert tables[0][:full] == tables[1][:full] == tables[2][:full]
    assert len({block for table in tables for block in table}) == len({b for one in kv for b in one.blocks[0]})
    assert copied == len({b for one in kv for b in one.blocks[0]}) * 3 * a.engine.kv_format.block_bytes
    b.engine.check()
    b.engine.adopt(states, heard, kv=kv)
    a.engine.moves.release(request.id)
    heard.wait([f"{request.id}/{i}" for i in range(3)])


def test_answers_that_wait_for_the_prompt_wait_for_it_elsewhere_too(engines: Any) -> None:
    a, b = engines(), engines()
    a.only(0)
    heard, request = Answers(), Request(PROMPT, 10, n=3)
    a.engine.submit(request, heard)
    states, kv = hand_over_after(a, request.id, 1)
    assert (len(states), len(kv)) == (3, 1)
    b.engine.moves.receive(states, kv, a.sources_of(kv))
    b.engine.adopt(states, heard, kv=kv)
    heard.wait([f"{request.id}/{i}" for i in range(3)])
    a.engine.moves.release(request.id)
    expected = continuation(architectures.build("llama-gqa"), PROMPT, 10)
    assert [heard.tokens[f"{request.id}/{i}"] for i in range(3)] == [expected] * 3
    assert b.computed == (70 - 32) + 2 * (70 - 64) + 3 * 9, "the prompt is computed once"


def test_what_the_target_has_of_a_prompt_is_not_copied(engines: Any) -> None:
    a, b = engines(), engines()
    heard, before, request = Collector(), Request(PROMPT, 2), Request(PROMPT, 40)
    b.engine.submit(before, heard)
    heard.wait([before.id])
    computed = b.computed
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    states, kv = a.engine.moves.hand_over(request.id)
    copied = b.engine.moves.receive(states, kv, a.sources_of(kv))
    assert copied == (len(kv[0].blocks[0]) - len(PROMPT) // 8) * 3 * a.engine.kv_format.block_bytes
    b.engine.adopt(states, heard, kv=kv)
    heard.wait([request.id])
    a.engine.moves.release(request.id)
    assert is_continuation(architectures.build("llama-gqa"), PROMPT, 40, heard.tokens[request.id])
    assert b.computed - computed == 40 - len(states[0].generated)


def test_what_was_copied_of_a_request_that_ended_meanwhile_is_nobodys_prefix(engines: Any) -> None:
    """Its blocks had another owner before they were read: only its own request would have noticed."""
    a, b = engines(share_prefixes=False), engines()
    heard, request, other = Collector(), Request(PROMPT, 20), Request(prompts([100], architectures.VOCAB, 3)[0], 2)
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    kv = a.engine.moves.locate(request.id)
    source = a.sources_of(kv)
    heard.wait([request.id])
    a.engine.submit(other, heard)
    heard.wait([other.id])
    b.engine.moves.receive((SequenceState(request.id, request, 0, 0),), kv, source)
    b.engine.moves.give_up(request.id)
    again = Request(PROMPT, 20)
    b.engine.submit(again, heard)
    heard.wait([again.id])
    assert heard.tokens[again.id] == heard.tokens[request.id]


def test_a_request_that_began_anew_is_copied_anew(engines: Any) -> None:
    """Its blocks have the same numbers, and other tokens."""
    b, heard = engines(), Collector()
    for prompt in prompts([70, 70], architectures.VOCAB, seed=4):
        a = engines()
        request = Request(prompt, 20, id="again")
        a.engine.submit(request, Collector())
        while not (kv := a.engine.moves.locate(request.id)) or not kv[0].decoding:
            time.sleep(0.001)
        b.engine.moves.receive((SequenceState(request.id, request, 0, 0),), kv, a.sources_of(kv))
    state = SequenceState(request.id, request, 0, 0)
    assert b.engine.adopt([state], heard, kv=kv) == 69
    heard.wait([request.id])
    assert is_continuation(architectures.build("llama-gqa"), request.prompt, 20, heard.tokens[request.id])


class Alternating:
    """A compiler of one grammar: even and odd tokens in turn."""

    def matcher(self, grammar: Grammar) -> Any:
        class Matcher:
            even = True

            def fill_mask(self, mask: torch.Tensor) -> None:
                mask.fill_(0x55555555 if self.even else -0x55555556)

            def accept(self, token: int) -> None:
                assert token % 2 == (not self.even)
                self.even = not self.even

        return Matcher()


def test_a_grammar_goes_on_where_it_was(engines: Any) -> None:
    a, b = (engines(grammars=Alternating()) for _ in range(2))
    heard, request = Collector(), Request(PROMPT, 41, Sampling(1.0, seed=1), grammar=Grammar("regex", "x"))
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 5)
    move(a, b, request.id, heard)
    heard.wait([request.id])
    assert heard.ends[request.id].finish == "length"
    assert [token % 2 for token in heard.tokens[request.id]] == [i % 2 for i in range(41)]


# -- log-probabilities of prompts, which are known only where they were computed


def test_a_prompt_whose_scores_were_begun_is_computed_anew_elsewhere(engines: Any) -> None:
    a, b = engines(), engines()
    a.only(0)
    heard, request = Collector(), Request(PROMPT, 5, prompt_logprobs=1)
    a.engine.submit(request, heard)
    states, kv = hand_over_after(a, request.id, 1)
    assert b.engine.moves.receive(states, kv, a.sources_of(kv)) == 0
    assert b.engine.adopt(states, heard, kv=kv) == 0
    heard.wait([request.id])
    a.engine.moves.release(request.id)
    scores = heard.first[request.id].prompt_logprobs
    assert scores is not None
    assert [score and score.token for score in scores] == [None, *PROMPT[1:]]
    assert b.computed == 70 + 4


def test_a_request_that_is_taken_back_goes_on_as_if_nothing_had_been(engines: Any) -> None:
    a = engines()
    a.only(0)
    heard, request = Answers(), Request(PROMPT, 5, prompt_logprobs=1, n=2)
    a.engine.submit(request, heard)
    hand_over_after(a, request.id, 1)
    assert a.engine.moves.locate(request.id)
    a.go_on()
    a.engine.moves.take_back(request.id)
    heard.wait([f"{request.id}/0", f"{request.id}/1"])
    scores = heard.first[f"{request.id}/0"].prompt_logprobs
    assert scores is not None
    assert [score and score.token for score in scores] == [None, *PROMPT[1:]]
    expected = continuation(architectures.build("llama-gqa"), PROMPT, 5)
    assert [heard.tokens[f"{request.id}/{i}"] for i in range(2)] == [expected] * 2
    assert a.computed == 70 + 4 + (70 - 64) + 4


# -- what cannot be


def test_a_request_is_handed_over_once_and_only_while_it_lives(engines: Any) -> None:
    a = engines()
    heard, request = Collector(), Request(PROMPT, 200)
    assert a.engine.moves.hand_over("unknown") is None
    assert a.engine.moves.locate("unknown") == ()
    a.engine.moves.release("unknown")
    a.engine.moves.give_up("unknown")
    with pytest.raises(StateError, match="was not handed over"):
        a.engine.moves.take_back(request.id)
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    handed = a.engine.moves.hand_over(request.id)
    assert handed is not None
    assert a.engine.moves.hand_over(request.id) == handed
    told = len(heard.tokens[request.id])
    assert told == len(handed[0][0].generated), "tokens of a step in flight are told"
    a.engine.cancel(request.id)
    assert a.engine.export(request.id) == ()
    with pytest.raises(ConfigError, match="in use"):
        a.engine.submit(request, heard)
    with pytest.raises(ConfigError, match="in use"):
        a.engine.moves.receive(handed[0], handed[1], a.source)
    a.engine.moves.take_back(request.id)
    heard.wait([request.id])
    assert heard.ends[request.id].finish == "length"
    assert a.engine.moves.hand_over(request.id) is None


def test_a_listener_may_not_move_a_request(engines: Any) -> None:
    a, errors = engines(), []
    ended = threading.Event()

    def listener(output: Output) -> None:
        with pytest.raises(StateError, match="another thread") as caught:
            a.engine.moves.hand_over(output.request)
        errors.append(caught.value)
        if output.finish is not None:
            ended.set()

    a.engine.submit(Request(PROMPT, 2), listener)
    assert ended.wait(60)
    assert len(errors) == 2


def test_a_target_without_room_says_so_and_keeps_nothing(engines: Any) -> None:
    a, b = engines(), engines()
    heard, request = Collector(), Request(PROMPT, 100)
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    states, kv = a.engine.moves.hand_over(request.id)
    source = a.sources_of(kv)
    b.engine.runtime.kv.resize(b.engine._memory.sector_pages * 3 * b.engine.runtime.status().places[0].page_bytes)
    with pytest.raises(Overloaded):
        b.engine.moves.receive(states, kv, source)
    with pytest.raises(Overloaded):
        b.engine.adopt(states, heard, kv=kv, source=source)
    assert b.engine.reports.load().running == 0
    assert b.engine.runtime.kv.used_bytes == 0
    assert not b.engine.moves.received._requests
    a.engine.moves.take_back(request.id)
    heard.wait([request.id])
    assert is_continuation(architectures.build("llama-gqa"), PROMPT, 100, heard.tokens[request.id])
    never = replace(request, max_tokens=400, id="never")
    tiny = engines(nbytes=300_000)
    with pytest.raises(CapacityError, match="never fits"):
        tiny.engine.moves.receive([replace(states[0], request=never)], kv, source)


def test_blocks_that_were_received_are_in_use_until_they_are_given_up(engines: Any) -> None:
    a, b = engines(), engines()
    heard, request = Collector(), Request(PROMPT, 100)
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    states, kv = a.engine.moves.hand_over(request.id)
    before = b.engine.reports.load()
    b.engine.moves.receive(states, kv, a.sources_of(kv))
    after = b.engine.reports.load()
    assert (before.running, after.running) == (0, 1)
    assert before.free_blocks - after.free_blocks >= -(-170 // 8), "all that it may still need is promised"
    kv_of_b = b.engine.runtime.kv
    assert kv_of_b.used_bytes > 0
    kv_of_b.resize(0)
    kv_of_b.trim()
    table = b.engine.moves.received._requests[request.id].sequences[request.id].table
    there = SequenceKV(request.id, kv[0].computed, tuple(map(tuple, table.blocks)))
    assert layer_digests(b.engine, there) == kv_digests(a.engine, request.id)[request.id], "nobody took the blocks"
    b.engine.moves.give_up(request.id)
    assert kv_of_b.used_bytes == 0
    kv_of_b.resize("max")
    assert b.engine.adopt(states, heard, kv=kv) == 0, "it is computed anew"
    a.engine.moves.release(request.id)
    heard.wait([request.id])
    assert is_continuation(architectures.build("llama-gqa"), PROMPT, 100, heard.tokens[request.id])


def test_blocks_of_another_form_are_not_taken(engines: Any) -> None:
    a, b = engines(block_layout="token_major"), engines()
    heard, request = Collector(), Request(PROMPT, 30)
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    states, kv = a.engine.moves.hand_over(request.id)
    with pytest.raises(ConfigError, match="token_major"):
        b.engine.moves.receive(states, kv, a.sources_of(kv))
    assert b.engine.adopt(states, heard, kv=kv, source=a.sources_of(kv)) == 0
    a.engine.moves.release(request.id)
    heard.wait([request.id])
    assert is_continuation(architectures.build("llama-gqa"), PROMPT, 30, heard.tokens[request.id])


@pytest.mark.parametrize("wrong", ["file", "sectors", "blocks"])
def test_what_cannot_be_read_is_computed_anew(wrong: str, engines: Any) -> None:
    a, b = engines(), engines()
    heard, request = Collector(), Request(PROMPT, 30)
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    states, kv = a.engine.moves.hand_over(request.id)
    source = a.sources_of(kv)
    if wrong == "file":
        source = replace(source, file=replace(source.file, descriptor=1 << 20))
    elif wrong == "sectors":
        source = a.source
    else:
        kv = (replace(kv[0], blocks=(kv[0].blocks[0][:2],)),)
    with pytest.raises(StateError):
        b.engine.moves.receive(states, kv, source)
    assert b.engine.reports.load().running == 0
    assert b.engine.adopt(states, heard, kv=kv, source=source) == 0
    a.engine.moves.release(request.id)
    heard.wait([request.id])
    assert is_continuation(architectures.build("llama-gqa"), PROMPT, 30, heard.tokens[request.id])
    assert heard.first[request.id].cached_tokens == 0


def test_an_adopted_answer_says_how_many_tokens_it_came_with(engines: Any) -> None:
    a, b = engines(), engines()
    heard, there, request = Collector(), Collector(), Request(PROMPT, 30)
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    states, kv = a.engine.moves.hand_over(request.id)
    assert b.engine.adopt(states, there, kv=kv, source=a.sources_of(kv), waited_s=5.0) == kv[0].computed
    there.wait([request.id])
    a.engine.moves.release(request.id)
    assert there.first[request.id].cached_tokens == kv[0].computed
    assert b.engine.counters.read().ttft_s.mean >= 5.0


# -- beside the engine's steps


def test_an_engine_goes_on_while_blocks_are_copied_into_it(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = engines(), engines()
    heard, request, other = Collector(), Request(PROMPT, 20), Request(PROMPT[:9], 60)
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    states, kv = a.engine.moves.hand_over(request.id)
    copying, go_on, read = threading.Event(), threading.Event(), OpenFile.read_into

    def slow(self: OpenFile, *args: int) -> None:
        copying.set()
        assert go_on.wait(60)
        read(self, *args)

    monkeypatch.setattr(OpenFile, "read_into", slow)
    copied = in_flight(lambda: b.engine.moves.receive(states, kv, a.sources_of(kv)))
    assert copying.wait(60)
    b.engine.submit(other, heard)
    heard.wait([other.id])
    given_up = in_flight(lambda: b.engine.moves.give_up(request.id))
    assert b.engine.reports.load().running == 1, "nothing comes free under a copy"
    go_on.set()
    given_up.result(60)
    with pytest.raises(StateError, match="given up"):
        copied.result(60)
    assert b.engine.reports.load().running == 0
    a.engine.moves.take_back(request.id)
    heard.wait([request.id])


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_that_stops_leaves_nothing_of_what_it_held_or_received(drain: bool, engines: Any) -> None:
    a, b = engines(), engines()
    heard, request = Collector(), Request(PROMPT, 60)
    descriptors = len(os.listdir("/proc/self/fd"))
    a.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 2)
    states, kv = a.engine.moves.hand_over(request.id)
    b.engine.moves.receive(states, kv, a.sources_of(kv))
    told = len(heard.tokens[request.id])
    for each in (a, b):
        each.engine.stop(drain=drain)
        assert each.engine.runtime.kv.used_bytes == 0
        each.engine.runtime.kv.trim()
        each.engine.runtime.check()
        assert each.engine.runtime.status().places[0].owners.get("kv", 0) == 0
        assert each.engine.counters.read().running == 0
    assert len(heard.tokens[request.id]) == told
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(StateError):
        b.engine.moves.receive(states, kv, a.sources_of(kv))
    with pytest.raises(StateError):
        a.engine.moves.hand_over(request.id)


# -- what is told after each step


def test_what_ended_is_told_before_its_blocks_can_be_anybody_elses(engines: Any) -> None:
    """Also not as pages of weights, which another thread takes."""
    a = engines(share_prefixes=False)
    engine, heard = a.engine, Collector()
    requests = [Request(p, 12) for p in prompts([30, 30, 30], architectures.VOCAB)]
    where: dict[str, SequenceKV] = {}
    seen: list[str] = []
    mirror = engine.reports.on_step

    def hear(report: Any) -> None:
        mirror(report)
        for kv in report.sequences:
            where[kv.sequence] = a.directory.of(kv.sequence, 30 + 11)
        for name in report.ended:
            assert heard.ends[name].finish == "length", "its end was told before"
            before = layer_digests(engine, replace(where[name], computed=40))
            taker = threading.Thread(target=lambda: engine.runtime.kv.trim())
            taker.start()
            taker.join()
            assert layer_digests(engine, replace(where[name], computed=40)) == before
            assert a.directory.of(name, 41) is None
            seen.append(name)

    engine._loop.scheduler.journal._listener = hear
    for request in requests:
        engine.submit(request, heard)
    heard.wait([request.id for request in requests])
    while engine.reports.load().running:
        time.sleep(0.001)
    assert sorted(seen) == sorted(request.id for request in requests)
    assert engine.runtime.kv.used_bytes == 0


def test_reports_tell_what_changed_and_no_more(engines: Any) -> None:
    a = engines()
    heard, request = Collector(), Request(PROMPT, 40)
    a.engine.submit(request, heard)
    heard.wait([request.id])
    while a.engine.reports.load().running:
        time.sleep(0.001)
    told = [report.sequences for report in a.reports]
    assert [kv.computed for (kv,) in told[:3]] == [32, 64, 70]
    assert [kv.decoding for (kv,) in told[:3]] == [False, False, True]
    assert sum(bool(sequences) for sequences in told[3:]) == -(-(70 + 39) // 8) - -(-70 // 8)
    assert sum(len(kv.blocks[0]) for sequences in told for kv in sequences) == -(-(70 + 39) // 8)
    assert [report.ended for report in a.reports if report.ended] == [(request.id,)]
    assert len(a.reports) == 3 + 39


def test_a_listener_of_steps_that_fails_hurts_no_request(engines: Any) -> None:
    a = engines()

    def bad(report: Any) -> None:
        raise OSError("the fleet is gone")

    a.engine._loop.scheduler.journal._listener = bad
    heard, request = Collector(), Request(PROMPT, 10)
    a.engine.submit(request, heard)
    heard.wait([request.id])
    assert heard.ends[request.id].finish == "length"
