"""Ranks of one layer that wait for one another, and fail: nobody waits for ever, nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from random import Random
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elastic
from elastic.engines.core.step import ScheduledChunk
from elastic.engines.pipeline.forward import StageForward
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.turn import Turn
from elastic.errors import ConfigError, RankLost, StateError
from elastic.weights import batch_context
from support import architectures
from support.pipeline.queue_transport import QueueExchange
from support.pipeline.stage_ranks import Rank, Ranks, whole_text
from support.wrapped_model import layers


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(ranks: Ranks, rank: str, path: LayerPath, inputs: Any = whole_text) -> Future[Any]:
    """One rank's part of a step, which has come as far as its first exchange, and waits for the others."""
    future = ranks.begin_at(rank, path, 0, inputs)
    deadline = time.monotonic() + 10
    while not any(frm == rank for _, frm, *_ in ranks.exchange.boxes):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert ranks.ranks[rank].turn.wait_idle(10)
    return future


def test_a_rank_that_waits_inside_a_layer_lets_actions_commit_and_other_instances_compute(stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "ab", stack, 2)
    a, path = ranks.ranks["a"], ranks.path("ab/ab/ab")
    expected = ranks.logits(path, 1, whole_text)
    home = started(ranks, "a", path)
    for action in (elastic.Release((2,)), elastic.Restore((2,))):
        a.model.elastic.apply([action], wait=False).result(10)
    assert a.run(LayerPath("b", ("a", "a", "b", "b", "b", "b"), shards=2), 0, whole_text()) is None
    assert ranks.begin_at("b", path, 0, whole_text).result(10) is None
    assert torch.equal(home.result(10).logits, expected)


def test_a_lost_rank_ends_the_pass_in_the_middle_of_a_layer_and_leaves_nothing_of_it(stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "ab", stack, 2)
    a = ranks.ranks["a"]
    home = started(
        ranks, "a", ranks.path("ab/ab/ab"), lambda rank: rank.inputs([ScheduledChunk("x", 0, (5, 6, 7), True, ((),))])
    )
    ranks.exchange.lost("b")
    with pytest.raises(RankLost, match="'b' was lost"):
        home.result(10)
    assert ranks.on_thread("a", lambda: batch_context.thread.plan) is None
    a.model.elastic.apply([elastic.Release((2,))], wait=False).result(10)
    assert torch.equal(a.model(**whole_text()).logits, architectures.build("llama-gqa")(**whole_text()).logits)
    with a.turn:
        pass


class Broken(Exception):
    """What a module raises."""


def fail(*called: Any) -> None:
    raise Broken("broken")


@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.act_fn"])
def test_a_module_that_fails_ends_the_step_at_every_rank_that_waits_for_it(module: str, stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "abcd", stack, 4)
    expected = architectures.build("llama-gqa")(**whole_text()).logits

    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.text("abcd", min_size=4, max_size=4), min_size=3, max_size=3), st.integers(0, 2), st.data())
    def any_rank(layer_ranks: list[str], layer: int, data: st.DataObject) -> None:
        path, step = ranks.path("/".join(layer_ranks)), next(steps)
        failing = data.draw(st.sampled_from(sorted(set(layer_ranks[layer]))))
        behind = {"a", *"".join(layer_ranks[layer:])}
        with layers(ranks.ranks[failing].model)[layer].get_submodule(module).register_forward_pre_hook(fail):
            futures = ranks.begin(path, step, whole_text)
            for rank, future in futures.items():
                failure = future.exception(10)
                if rank == failing:
                    assert isinstance(failure, Broken)
                elif rank in behind:
                    assert isinstance(failure, StateError)
                    assert str(failure) == "broken"
                else:
                    assert failure is None
        for rank in ranks.ranks.values():
            rank.computed.clear()
        torch.testing.assert_close(ranks.logits(path, next(steps), whole_text), expected)
        assert not ranks.exchange.boxes
        assert not ranks.exchange.failed

    steps = count()
    any_rank()


def test_instances_that_compute_each_others_shards_have_a_batch_of_each_in_flight(stack: ExitStack) -> None:
    """Two threads a rank, one of them a guest of the other instance; the order of their steps is left to chance."""
    exchange = QueueExchange()
    ranks = {rank: Rank("llama-gqa", rank, exchange, stack, 2) for rank in "ab"}
    ways = {home: LayerPath(home, ("a", "b") * 3, shards=2) for home in "ab"}

    def steps(rank: str, home: str) -> list[Any]:
        return [ranks[rank].run(ways[home], step, whole_text()) for step in range(20)]

    threads = stack.enter_context(ThreadPoolExecutor(4))
    futures = {(rank, home): threads.submit(steps, rank, home) for rank in "ab" for home in "ab"}
    outputs = {key: future.result(60) for key, future in futures.items()}
    expected = outputs["a", "a"][0].logits
    for (rank, home), given_back in outputs.items():
        assert all(torch.equal(out.logits, expected) if rank == home else out is None for out in given_back)


def test_steps_that_fail_leave_those_of_other_instances_alone(stack: ExitStack) -> None:
    """Four instances, each over all four ranks, in sixteen threads; some modules fail at times, some are slow."""
    chance, exchange = Random(1), QueueExchange()
    ranks = {rank: Rank("llama-gqa", rank, exchange, stack, 4) for rank in "abcd"}
    ways = {home: LayerPath(home, tuple(chance.sample("aabbccdd" * 2, 12)), shards=4) for home in "abcd"}
    expected = architectures.build("llama-gqa")(**whole_text()).logits

    def sometimes(*called: Any) -> None:
        if chance.random() < 0.02:
            fail()
        time.sleep(chance.choice((0, 0, 0, 0.001)))

    for rank in ranks.values():
        for layer in layers(rank.model):
            stack.callback(layer.mlp.register_forward_pre_hook(sometimes).remove)

    def outcomes(rank: str, home: str) -> list[Any]:
        found: list[Any] = []
        for step in range(10):
            try:
                found.append(ranks[rank].run(ways[home], step, whole_text()))
            except (Broken, StateError) as error:
                found.append(error)
        return found

    threads = stack.enter_context(ThreadPoolExecutor(16))
    futures = {(rank, home): threads.submit(outcomes, rank, home) for home in ways for rank in ranks}
    found = {key: future.result(60) for key, future in futures.items()}
    for home in ways:
        for step, output in enumerate(found[home, home]):
            if isinstance(output, Exception):
                assert str(output) == "broken"
            else:
                torch.testing.assert_close(output.logits, expected)
                assert {found[rank, home][step] for rank in ranks if rank != home} == {None}
    assert not exchange.boxes


def test_other_threads_have_whole_layers_meanwhile(stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "ab", stack, 2)
    path = ranks.path("ab/ab/ab")
    home = started(ranks, "a", path)
    model = ranks.ranks["a"].model
    assert torch.equal(model(**whole_text()).logits, architectures.build("llama-gqa")(**whole_text()).logits)
    ranks.begin_at("b", path, 0, whole_text).result(10)
    assert home.result(10) is not None


def test_modules_are_as_they_were_behind_the_last_stage_forward(wrapped: Any) -> None:
    model = wrapped(architectures.build("gpt2"), shards=2)
    forward = StageForward(model, Turn())
    assert "forward" in layers(model)[0].mlp.c_fc.__dict__
    forward.close()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_another_librarys_forward_method_is_refused_and_kept(wrapped: Any) -> None:
    model = wrapped(architectures.build("llama-gqa"), shards=2)
    module = layers(model)[1].mlp.up_proj
    theirs = module.__dict__["forward"] = MethodType(lambda module, hidden: hidden, module)
    with pytest.raises(ConfigError, match="another library has replaced the forward method of a Linear"):
        StageForward(model, Turn())
    assert [module for module in model.modules() if "forward" in module.__dict__] == [module]
    assert module.__dict__.pop("forward") is theirs


def test_a_layer_that_is_not_here_in_full_is_refused_before_anybody_waits_in_it(stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "ab", stack, 2)
    path = ranks.path("ab/ab/ab")
    expected = ranks.logits(path, 0, whole_text)
    a = ranks.ranks["a"]
    a.model.elastic.release((1,))
    futures = ranks.begin(path, 1, whole_text)
    for future in futures.values():
        with pytest.raises(StateError, match="in host memory; restore it first"):
            future.result(10)
    assert a.computed == [0]
    a.model.elastic.restore((1,))
    for rank in ranks.ranks.values():
        rank.computed.clear()
    assert torch.equal(ranks.logits(path, 2, whole_text), expected)


def test_a_model_that_was_not_cut_is_refused(stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "ab", stack)
    path = LayerPath("a", ("a", "b") * 3, shards=2)
    futures = ranks.begin(path, 0, whole_text)
    for future in futures.values():
        with pytest.raises(StateError, match="wrap the model with shards=2"):
            future.result(10)
