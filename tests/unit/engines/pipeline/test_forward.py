"""A model's layers computed by several ranks, each a copy on a thread of its own: the bits of one that has them all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import MethodType
from typing import Any

import pytest
import torch

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
from support.serving.generations import SERVED
from support.wrapped_model import layers

PATHS = ("aab", "abb", "abc", "aba", "baa", "bab", "bbb", "bcb", "cab")  # home is a


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("name", sorted(architectures.CONFIGS))
def test_a_text_gives_the_same_bits_by_every_path(name: str, stack: ExitStack) -> None:
    ranks = Ranks(name, "abc", stack)
    expected = architectures.build(name)(**whole_text()).logits
    for step, path in enumerate(PATHS):
        assert torch.equal(ranks.logits(ranks.path(path), step, whole_text), expected), path


@pytest.mark.parametrize("name", sorted(SERVED))
def test_prompts_and_decoding_in_blocks_give_the_same_bits_by_any_path(name: str, stack: ExitStack) -> None:
    """Each path for several of the architectures: a third of the paths for each of these."""
    ranks = Ranks(name, "abc", stack)
    plain = Rank(name, "plain", ranks.exchange, stack)
    x, y = (architectures.prompt(length=64, seed=seed)["input_ids"][0].tolist() for seed in (1, 2))
    for path in PATHS[sorted(SERVED).index(name) % 3 :: 3]:  # each begins anew, over what the path before has written
        for step, (cut_x, cut_y) in enumerate([((0, 20), (0, 9)), ((20, 21), (9, 40)), ((21, 22), (40, 41))]):
            chunks = [
                ScheduledChunk("x", cut_x[0], tuple(x[slice(*cut_x)]), True, ((),)),
                ScheduledChunk("y", cut_y[0], tuple(y[slice(*cut_y)]), True, ((),)),
            ]
            with torch.no_grad():
                expected = plain.model(**plain.inputs(chunks)).logits
            got = ranks.logits(ranks.path(path), step, lambda rank, chunks=chunks: rank.inputs(chunks))
            assert torch.equal(got, expected), (path, step)


def started(ranks: Ranks, rank: str, path: LayerPath, computed: list[int]) -> Future[Any]:
    """One rank's part of a step, which has come as far as this and waits for another's."""
    future = ranks.begin_at(rank, path, 0, whole_text)
    deadline = time.monotonic() + 10
    while ranks.ranks[rank].computed != computed:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return future


def test_a_rank_that_waits_lets_actions_commit_and_other_instances_compute(stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "ab", stack)
    a, path = ranks.ranks["a"], ranks.path("aba")
    home = started(ranks, "a", path, [0])
    a.model.elastic.apply([elastic.Release((2,))], wait=False).result(10)
    assert a.run(LayerPath("b", ("a", "b", "b")), 0, whole_text()) is None
    assert a.computed == [0, 0]
    assert ranks.begin_at("b", path, 0, whole_text).result(10) is None
    assert torch.equal(home.result(10).logits, architectures.build("llama-gqa")(**whole_text()).logits)
    assert a.computed == [0, 0, 2]


def test_a_lost_rank_ends_the_pass_and_leaves_nothing_of_it(stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "ab", stack)
    a = ranks.ranks["a"]
    home = started(ranks, "a", ranks.path("abb"), [0])
    ranks.exchange.lost("b")
    with pytest.raises(RankLost, match="'b' was lost"):
        home.result(10)
    assert ranks.on_thread("a", lambda: batch_context.thread.plan) is None
    a.model.elastic.apply([elastic.Release((2,))], wait=False).result(10)
    assert torch.equal(a.model(**whole_text()).logits, architectures.build("llama-gqa")(**whole_text()).logits)
    with a.turn:
        pass


@pytest.mark.parametrize("path", ["abc", "aba", "cab"])
def test_a_layer_that_fails_ends_the_step_at_every_rank_behind_it_and_no_other(path: str, stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "abc", stack)
    way = ranks.path(path)
    expected = ranks.logits(way, 0, whole_text)

    def fail(*called: Any) -> None:
        raise ValueError("broken")

    failing = path[1]
    with layers(ranks.ranks[failing].model)[1].mlp.register_forward_pre_hook(fail):
        futures = ranks.begin(way, 1, whole_text)
        for rank in path[2:]:
            with pytest.raises(StateError, match="broken"):
                futures[rank].result(10)
        with pytest.raises(ValueError, match="broken"):
            futures[failing].result(10)
        with pytest.raises((StateError, ValueError), match="broken"):
            futures["a"].result(10)
    for rank in ranks.ranks.values():
        rank.computed.clear()
    assert torch.equal(ranks.logits(way, 2, whole_text), expected)
    assert not ranks.exchange.boxes


def test_a_rank_behind_one_that_lost_its_own_is_told_which(stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "abc", stack)
    path = ranks.path("abc")
    futures = [ranks.begin_at(rank, path, 0, whole_text) for rank in "ac"]
    ranks.exchange.lost("b")
    for future in futures:
        with pytest.raises(RankLost) as error:
            future.result(10)
        assert error.value.rank == "b"


def test_instances_that_compute_each_others_layers_do_not_block_each_other(stack: ExitStack) -> None:
    """Two threads a rank, one of them a guest of the other instance; the order of their steps is left to chance."""
    exchange = QueueExchange()
    ranks = {rank: Rank("llama-gqa", rank, exchange, stack) for rank in "ab"}
    ways = {"a": LayerPath("a", ("a", "b", "a")), "b": LayerPath("b", ("a", "b", "a"))}
    expected = architectures.build("llama-gqa")(**whole_text()).logits

    def steps(rank: str, home: str) -> list[Any]:
        return [ranks[rank].run(ways[home], step, whole_text()) for step in range(40)]

    threads = stack.enter_context(ThreadPoolExecutor(4))
    futures = {(rank, home): threads.submit(steps, rank, home) for rank in "ab" for home in "ab"}
    for (rank, home), future in futures.items():
        outputs = future.result(60)
        assert all(torch.equal(output.logits, expected) if rank == home else output is None for output in outputs)


def test_layers_are_as_they_were_behind_the_last_stage_forward(wrapped: Any) -> None:
    model = wrapped(architectures.build("gpt2"))
    forward = StageForward(model, Turn())
    assert all("forward" in layer.__dict__ for layer in layers(model))
    forward.close()
    forward.close()
    assert not any("forward" in layer.__dict__ for layer in layers(model))


def test_another_librarys_forward_method_is_refused_and_kept(wrapped: Any) -> None:
    model = wrapped(architectures.build("llama-gqa"))
    layer = layers(model)[1]
    theirs = layer.__dict__["forward"] = MethodType(lambda layer, *args: args[0], layer)
    with pytest.raises(ConfigError, match="another library"):
        StageForward(model, Turn())
    assert [layer.__dict__.get("forward") for layer in layers(model)] == [None, theirs, None]
    del layer.__dict__["forward"]


def test_a_model_whose_layers_hand_each_other_keys_and_values_is_refused(wrapped: Any) -> None:
    model = wrapped(architectures.build("gemma4"))
    model.config.num_kv_shared_layers = 1
    with pytest.raises(ConfigError, match="num_kv_shared_layers=1"):
        StageForward(model, Turn())
    assert not any("forward" in layer.__dict__ for layer in layers(model))
