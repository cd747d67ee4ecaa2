"""Ranks on threads: they serve as an engine does, refuse in words, hand over, and leave the model as it came."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

import elastic
from elastic.cluster.control.messages import Check, Drain, FreeBlocks, HandOver, Look, News, Submit
from elastic.cluster.launch.base import RankSpec
from elastic.cluster.launch.in_process import InProcessLauncher
from elastic.engines.core.kv_state import KVDirectory
from elastic.errors import ConfigError, StateError
from support.architectures import build
from support.serving.fleet_side import FleetSide
from support.serving.generations import continuation, is_continuation

PROMPT = (5, 6, 7)
PLACE = "cpu#0=8MiB"
_MODEL = build("llama-gqa")


@pytest.fixture
def model() -> Iterator[Any]:
    """A tiny model, plain again after the test."""
    yield _MODEL
    if hasattr(_MODEL, "elastic"):
        elastic.unwrap(_MODEL)


@pytest.fixture
def start(model: Any) -> Iterator[Callable[..., FleetSide]]:
    launcher = InProcessLauncher()

    def make(model: Any, name: str = "r0", places: tuple[str, ...] = (PLACE,), **options: Any) -> FleetSide:
        return FleetSide(launcher.start(RankSpec(name, model, places, **options)))

    yield make
    launcher.close()


def test_a_rank_serves_as_the_model_does_and_leaves_it_as_it_came(start: Callable[..., FleetSide], model: Any) -> None:
    rank = start(model)
    assert rank.answer("one", prompt=PROMPT, tokens=12) == continuation(model, PROMPT, 12)
    assert rank.client.hello.model.vocabulary == 96
    assert rank.client.hello.model.longest == 512
    rank.client.close()
    assert not rank.heard_all
    assert not hasattr(model, "elastic")


def test_a_wrapped_model_stays_wrapped(start: Callable[..., FleetSide], model: Any) -> None:
    elastic.wrap(model, places=[PLACE])
    rank = start(model)
    assert len(rank.answer("one")) == 8
    rank.client.close()
    assert model.elastic.status().kv is not None
    elastic.unwrap(model)


def test_requests_that_make_no_sense_are_refused_in_words(start: Callable[..., FleetSide], model: Any) -> None:
    rank = start(model)
    rank.submit("long", tokens=600)
    rank.wait(lambda: "long" in rank.refused)
    assert isinstance(rank.refused["long"], ConfigError)
    assert "512" in str(rank.refused["long"])
    assert len(rank.answer("next")) == 8


def test_what_is_asked_of_runtime_and_engine_can_be_sent(start: Callable[..., FleetSide], model: Any) -> None:
    rank = start(model)
    rank.answer("one")
    view = rank.client.ask(Look()).result(60)
    assert view.status.layers == 3
    assert view.stats.completed == 1
    assert view.controller.last_reason == "policy='manual'"
    assert rank.client.ask(Check()).result(60) is None
    assert rank.client.ask(Drain()).result(60) is None
    rank.submit("late")
    rank.wait(lambda: "late" in rank.refused)


def test_a_request_goes_on_at_another_rank_with_its_keys_and_values(
    start: Callable[..., FleetSide], model: Any
) -> None:
    source, target = start(model, "a"), start(build("llama-gqa"), "b", ("cpu#1=8MiB",))
    source.submit("one", prompt=PROMPT, tokens=200)
    source.wait(lambda: len(source.tokens["one"]) >= 20)
    handed = source.client.ask(HandOver("one")).result(60)
    memory = source.client.hello.memory
    assert memory is not None
    directory = KVDirectory(memory)
    for message in source.messages:
        if isinstance(message, News) and message.kv is not None:
            directory.apply(message.kv)
    told = source.tokens["one"]
    assert list(handed.states[0].generated) == told
    target.tokens["one"] = list(told)
    target.client.send(Submit(handed.states, 0.0, handed.kv, replace(memory, sectors=directory.sectors_of(handed.kv))))
    target.wait(lambda: "one" in target.finished)
    assert source.client.ask(FreeBlocks("one")).result(60) is None
    assert is_continuation(model, PROMPT, 200, target.tokens["one"])
    first = next(message for message in target.messages if isinstance(message, News) and message.outputs)
    assert first.outputs[0].cached_tokens == len(PROMPT) + len(told) - 1  # none was computed again


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"places": ("nowhere=1MiB",)}, "nowhere"),
        ({"places": ("cpu=1EiB",)}, "1EiB"),
        ({"engine": {"no_such": 1}}, "no option 'no_such'"),
        ({"engine": {"block_tokens": 0}}, "block_tokens=0"),
        ({"engine": {"grammars": "mine"}}, "llguidance"),
        ({"wrap": {"variants": ("int99",)}}, "int99"),
    ],
)
def test_what_cannot_start_is_an_error_in_words_and_leaves_nothing(
    start: Callable[..., FleetSide], model: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(model, **options)
    assert not hasattr(model, "elastic")


def test_nothing_is_kept_of_ranks_that_have_ended(model: Any) -> None:
    with closing(InProcessLauncher()) as launcher:
        for name in ("r0", "r1", "r2"):
            with pytest.raises(ConfigError):
                launcher.start(RankSpec(name, model, (PLACE,), engine={"no_such": 1}))
            assert [rank.name for rank in launcher._ranks] == [name]


def test_without_threads_it_is_said_that_a_rank_cannot_be_started_now(
    start: Callable[..., FleetSide], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(StateError, match="'r0' cannot be started now: can't start new thread"):
            start(model)
    start(model).client.close()


def test_a_kill_cuts_the_connection_and_ends_the_engine(start: Callable[..., FleetSide], model: Any) -> None:
    rank = start(model)
    rank.submit("one", tokens=400)
    rank.wait(lambda: rank.tokens["one"])
    rank.client.kill("for the test")
    assert rank.end() == "for the test"
    assert not rank.finished
    assert not rank.heard_all


def test_all_ranks_are_ended_before_any_is_waited_for() -> None:
    done: list[str] = []

    class Slow:
        def kill(self) -> None:
            done.append("kill")

        def wait(self, timeout_s: float) -> None:
            done.append("wait")

    launcher = InProcessLauncher()
    launcher._ranks = [Slow(), Slow()]  # type: ignore[list-item]
    launcher.close()
    assert done == ["kill", "kill", "wait", "wait"]


def test_models_that_differ_in_one_weight_differ_in_one_digest(start: Callable[..., FleetSide], model: Any) -> None:
    other = build("llama-gqa")
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    third = build("llama-gqa")
    third.model.norm.weight.data[0] += 1
    facts = [
        start(each, f"r{i}", (f"cpu#{i}=8MiB",)).client.hello.model for i, each in enumerate((model, other, third))
    ]
    same = [a == b for a, b in zip(facts[0].digests, facts[1].digests, strict=True)]
    assert same == [True, False, True]
    assert facts[0].fixed_digest == facts[1].fixed_digest != facts[2].fixed_digest
    assert facts[0].digests == facts[2].digests


def test_the_digests_of_a_wrapped_model_are_those_of_its_full_weights(
    start: Callable[..., FleetSide], model: Any
) -> None:
    plain = start(model).client
    facts = plain.hello.model
    plain.close()
    elastic.wrap(model, places=[PLACE], variants=("int8",))
    model.elastic.swap([0], "int8")
    model.elastic.release([1])
    rank = start(model)
    assert rank.client.hello.model == facts
    with pytest.raises(StateError, match="in use"):
        elastic.unwrap(model)
