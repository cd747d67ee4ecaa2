"""As many batches of an instance are in flight as its stages need, beside those of others; one when layers are back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic import ConfigError
from elastic.engines.base import Request, Sampling
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.pipeline.batches import LOOK_STEPS, BatchCount
from elastic.engines.pipeline.path import LayerPath
from support import architectures
from support.cluster.engine_group import EngineGroup, engine_groups
from support.serving.generations import Collector, Continuation, prompts
from support.wrapped_model import layers as decoder_layers

ALONE, TWO, THREE = (LayerPath("a", tuple(ranks)) for ranks in ("aaa", "aab", "abc"))


@pytest.mark.parametrize(
    ("path", "others", "count"),
    [
        (ALONE, {}, 1),
        (ALONE, {"b": 3}, 1),
        (TWO, {}, 2),
        (TWO, {"b": 0}, 1),
        (THREE, {}, 3),
        (THREE, {"b": 0}, 2),
        (THREE, {"b": 0, "c": 0}, 1),
    ],
)
def test_after_a_change_of_the_path_all_that_compute_there_count(
    path: LayerPath, others: dict[str, int], count: int
) -> None:
    assert BatchCount().of(path, 7, others) == count


def test_who_had_no_step_since_the_last_look_does_not_count() -> None:
    batches, steps = BatchCount(), 40
    assert batches.of(TWO, steps, {"b": 90}) == 1
    assert batches.of(TWO, steps + LOOK_STEPS - 1, {"b": 90}) == 1
    assert batches.of(TWO, steps + LOOK_STEPS, {"b": 90}) == 2
    assert batches.of(TWO, steps + LOOK_STEPS, {"b": 91}) == 2
    assert batches.of(TWO, steps + 2 * LOOK_STEPS, {"b": 91}) == 1
    assert batches.of(TWO, steps + 3 * LOOK_STEPS, {"b": 91}) == 2
    assert batches.of(TWO, steps + 3 * LOOK_STEPS + 1, {"b": 91, "c": 0}) == 1
    assert batches.of(TWO, steps + 4 * LOOK_STEPS + 1, {"b": 91, "c": 0}) == 2


def test_when_layers_come_back_it_is_one_at_once() -> None:
    batches = BatchCount()
    assert batches.of(TWO, 0, {}) == 2
    assert batches.of(LayerPath("a", ("a", "a", "a"), 1), 1, {}) == 1


PROMPTS = prompts([40, 25, 9, 33], architectures.VOCAB)
DRAWN = Sampling(1.2, seed=5)


@pytest.fixture
def group() -> Iterator[Callable[..., EngineGroup]]:
    """group(ranks, architecture, bytes, **options); closed and checked when the test ends."""
    with engine_groups() as make:
        yield make


def submit(engine: ContinuousEngine, heard: Collector, tokens: int, name: str, sampling: Sampling) -> list[str]:
    requests = [Request(prompt, tokens, sampling, id=f"{name}{number}") for number, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.submit(request, heard)
    return [request.id for request in requests]


def most_in_flight(engine: ContinuousEngine) -> list[int]:
    """Note from now on how many steps are in flight when one begins; the last entry is the most since it was set."""
    most, schedule = [0], engine._loop.scheduler.schedule

    def noted() -> Any:
        step = schedule()
        most[-1] = max(most[-1], len(engine._loop.scheduler._steps))
        return step

    engine._loop.scheduler.schedule = noted  # type: ignore[method-assign]
    return most


def test_two_batches_are_in_flight_after_a_drop_and_one_after_a_restore(group: Callable[..., EngineGroup]) -> None:
    ranks, heard = group("ab", nbytes=8 << 20), Collector()
    engine = ranks["a"]
    heard.wait(alone := submit(engine, heard, 40, "alone", DRAWN))
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    most = most_in_flight(engine)
    names = submit(engine, heard, 40, "r", Sampling()) + submit(engine, heard, 40, "drawn", DRAWN)
    for name in names:
        heard.wait_for_tokens(name, 4)
    assert (engine._home.cohorts, most[-1]) == (2, 2)
    ranks.check()
    ranks.part("a")
    most.append(0)
    heard.wait(names)
    heard.wait(submit(engine, heard, 8, "again", Sampling()))
    assert (engine._home.cohorts, most[-1]) == (1, 1)
    for number, prompt in enumerate(PROMPTS):
        assert heard.tokens[f"r{number}"] == Continuation(ranks.plain(), prompt, 40)
        assert heard.tokens[f"drawn{number}"] == heard.tokens[alone[number]]
    ranks.check()


def test_a_home_that_computes_layers_for_another_has_two_only_when_that_has_no_work(
    group: Callable[..., EngineGroup],
) -> None:
    ranks, heard = group("ab", nbytes=8 << 20), Collector()
    for home, guest, layers in (("a", "b", (1, 2)), ("b", "a", (0,))):
        ranks.join(home, guest)
        ranks.move(home, layers, guest)
    heard.wait(submit(ranks["a"], heard, 2, "first", Sampling()))
    assert ranks["a"]._loop.scheduler.steps < LOOK_STEPS
    assert ranks["a"]._home.cohorts == 1
    heard.wait(submit(ranks["a"], heard, LOOK_STEPS, "r", Sampling()))
    assert (ranks["a"]._home.cohorts, ranks["b"]._home.cohorts) == (2, 1)
    heard.wait(submit(ranks["b"], heard, LOOK_STEPS, "s", Sampling()))
    ranks.check()


def test_both_stages_compute_at_the_same_time(group: Callable[..., EngineGroup]) -> None:
    """The second one is held up for a while until the first computes, too: it never does with one batch in flight."""
    ranks, heard = group("ab"), Collector()
    inside, both = threading.Event(), threading.Event()

    def hold_up(*_: Any) -> None:
        inside.set()
        both.wait(1)  # the next batch begins meanwhile, but for the first one, which may have all requests that came
        inside.clear()

    def see(*_: Any) -> None:
        if inside.is_set():
            both.set()

    hooks = [
        decoder_layers(ranks.tracked["b"].model)[2].register_forward_pre_hook(hold_up),
        decoder_layers(ranks.tracked["a"].model)[0].register_forward_pre_hook(see),
    ]
    ranks.join("a", "b")
    ranks.move("a", (2,), "b")
    heard.wait(submit(ranks["a"], heard, 12, "r", Sampling()))
    assert both.is_set()
    for number, prompt in enumerate(PROMPTS):
        assert heard.tokens[f"r{number}"] == Continuation(ranks.plain(), prompt, 12)
    for hook in hooks:
        hook.remove()


def test_it_is_one_again_when_a_rank_was_lost(group: Callable[..., EngineGroup]) -> None:
    ranks, heard = group("ab", nbytes=8 << 20), Collector()
    engine = ranks["a"]
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    names = submit(engine, heard, 40, "r", DRAWN)
    heard.wait_for_tokens("r3", 4)
    assert engine._home.cohorts == 2
    engine.recovery.recover("b", lambda layers: None, ranks.kill("b"))
    heard.wait(names)
    assert engine._home.cohorts == 1
    heard.wait(again := submit(engine, heard, 40, "again", DRAWN))
    assert [heard.tokens[name] for name in names] == [heard.tokens[name] for name in again]


def test_whoever_says_how_many_gets_so_many(group: Callable[..., EngineGroup]) -> None:
    ranks, heard = group("ab", cohorts=1), Collector()
    engine = ranks["a"]
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    heard.wait(submit(engine, heard, 12, "r", Sampling()))
    assert engine._home.cohorts == 1
    engine.cohorts.set_cohorts(3)
    assert engine._home.cohorts == 3
    engine.cohorts.set_cohorts(None)
    heard.wait(submit(engine, heard, 12, "again", Sampling()))
    assert engine._home.cohorts == 2
    with pytest.raises(ConfigError, match="cohorts=0"):
        engine.cohorts.set_cohorts(0)
    assert heard.tokens["r0"] == heard.tokens["again0"]
