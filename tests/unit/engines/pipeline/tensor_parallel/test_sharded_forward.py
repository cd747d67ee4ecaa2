"""A model whose layers several ranks compute together: the logits of one rank to rounding, the same bits at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from itertools import count
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

import elastic
from elastic.engines.core.step import Chunk
from elastic.engines.pipeline.forward import StageForward
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.queue_transport import QueueExchange
from elastic.engines.pipeline.transport import Key
from elastic.engines.pipeline.turn import Turn
from elastic.errors import ConfigError, RankLost, StateError
from elastic.planning.sharding.heads import kv_parts
from elastic.weights import batch_context
from support import architectures
from support.pipeline.stage_ranks import Rank, Ranks, whole_text
from support.serving.generations import SERVED
from support.wrapped_model import layers

PATHS = {2: ("ab/ab/ab", "ba/bb/ab"), 4: ("aabb/aabb/bbaa", "abcd/abcd/abcd", "aaaa/cbdb/dddd", "abab/cccc/dcba")}
"""Shards -> the ranks of three layers; home is a. Tensor parallelism of two and four ranks, and of both kinds."""
TEXTS = [architectures.prompt(length=64, seed=seed)["input_ids"] for seed in (1, 2)]
CUTS = [((0, 20), (0, 9)), ((20, 21), (9, 40)), ((21, 22), (40, 41))]
"""Of the tokens of both texts, those of each step: prompts, a prompt beside a token, tokens."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@cache
def exact(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model in float64, with the weights that it has in another dtype."""
    model = architectures.build(name, dtype).double()
    model.config._experts_implementation = "eager"  # no other is there for float64
    return model


def error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return (logits.double() - expected).norm().item()


def chunks(step: int) -> list[Chunk]:
    return [
        Chunk(name, start, tuple(text[0, start:stop].tolist()), True, ((),))
        for name, text, (start, stop) in zip("xy", TEXTS, CUTS[step], strict=True)
    ]


@pytest.mark.parametrize("shards", PATHS)
@pytest.mark.parametrize("name", sorted(architectures.CONFIGS.keys() - SERVED))
@torch.no_grad()
def test_a_text_gives_the_logits_of_one_rank_to_rounding(name: str, shards: int, stack: ExitStack) -> None:
    ranks = Ranks(name, "abcd"[:shards], stack, shards)
    expected, plain = exact(name)(**whole_text()).logits, architectures.build(name)(**whole_text()).logits
    for step, path in enumerate(PATHS[shards]):
        logits = ranks.logits(ranks.path(path), step, whole_text)
        assert error(logits, expected) <= 2 * error(plain, expected), path
        assert torch.equal(logits.argmax(-1), plain.argmax(-1)), path
    assert not ranks.exchange.boxes


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@torch.no_grad()
def test_a_text_gives_them_in_half_precision(name: str, stack: ExitStack) -> None:
    ranks = Ranks(name, "abcd", stack, 4, torch.bfloat16)
    expected = exact(name, torch.bfloat16)(**whole_text()).logits
    plain = architectures.build(name, torch.bfloat16)(**whole_text()).logits
    for step, path in enumerate(PATHS[4]):
        assert error(ranks.logits(ranks.path(path), step, whole_text), expected) <= 2 * error(plain, expected)


@pytest.mark.parametrize("shards", PATHS)
@pytest.mark.parametrize("name", sorted(SERVED))
@torch.no_grad()
def test_prompts_and_decoding_in_blocks_give_them_too(name: str, shards: int, stack: ExitStack) -> None:
    ranks = Ranks(name, "abcd"[:shards], stack, shards)
    plain = Rank(name, "plain", ranks.exchange, stack)
    texts = [exact(name)(input_ids=text, use_cache=False).logits[0] for text in TEXTS]
    for path in PATHS[shards]:
        for rank in ranks.ranks.values():
            rank.clear()
        for step, cuts in enumerate(CUTS):
            expected = torch.cat([text[slice(*cut)] for text, cut in zip(texts, cuts, strict=True)])[None]
            single = plain.model(**plain.inputs(chunks(step))).logits
            logits = ranks.logits(ranks.path(path), step, lambda rank, step=step: rank.inputs(chunks(step)))
            assert error(logits, expected) <= 2 * error(single, expected), (path, step)
            assert torch.equal(logits.argmax(-1), single.argmax(-1)), (path, step)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 3), (8, 1)])
@torch.no_grad()
def test_heads_need_not_be_as_many_for_each_shard(
    heads: int, kv_heads: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads of four shards, so that some have none; six of them; one KV head, which all ranks have."""
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = architectures.CONFIGS["llama-gqa"]().to_dict() | sizes | {"head_dim": 8}
    monkeypatch.setitem(architectures.CONFIGS, "odd", lambda: LlamaConfig(**config))
    ranks = Ranks("odd", "abcd", stack, 4)
    plain = Rank("odd", "plain", ranks.exchange, stack)
    for rank in (plain, *ranks.ranks.values()):
        rank.make_cache(stack)
        rank.computed.clear()
    singles = [plain.model(**plain.inputs(chunks(step))).logits for step in range(3)]
    for path in PATHS[4][1:]:
        for step, single in enumerate(singles):
            logits = ranks.logits(ranks.path(path), step, lambda rank, step=step: rank.inputs(chunks(step)))
            torch.testing.assert_close(logits, single)


def test_a_rank_needs_no_keys_and_values_but_those_of_its_shards(stack: ExitStack) -> None:
    ranks = Ranks("mistral-sliding", "abc", stack, 4)
    path = ranks.path("aabb/cbca/cccc")
    expected = [ranks.logits(path, step, lambda rank, step=step: rank.inputs(chunks(step))) for step in range(3)]
    for name, rank in ranks.ranks.items():
        rank.keep(kv_parts(path.shards_of(name), path.shards, rank.cache.kv_shards))
        rank.clear()
    for step in range(3):
        logits = ranks.logits(path, step, lambda rank, step=step: rank.inputs(chunks(step)))
        assert torch.equal(logits, expected[step])


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "phi3", "qwen3-moe"])
@torch.no_grad()
def test_a_rank_needs_no_weights_but_those_of_its_shards(name: str, stack: ExitStack) -> None:
    """They are dropped, so that its pages are others'; and come back from the ranks that have them."""
    ranks = Ranks(name, "ab", stack, 4)
    path, plain = ranks.path("aabb/abba/bbbb"), architectures.build(name)(**whole_text()).logits
    runtimes = {rank: ranks.ranks[rank].model.elastic for rank in "ab"}
    expected = ranks.logits(path, 0, whole_text)
    for rank, other in ("ab", "ba"):
        runtimes[rank].digests(shards=path.shards_of(other))
        runtimes[rank].drop(shards=path.shards_of(other))
    for step in (1, 2):
        assert torch.equal(ranks.logits(path, step, whole_text), expected)
    for rank, other in ("ab", "ba"):
        with pytest.raises(StateError, match="dropped"):
            ranks.ranks[rank].model(**whole_text())
        come = path.shards_of(other)
        runtimes[rank].fetch((), runtimes[other].weights_source(shards=come), shards=come)
        assert torch.equal(ranks.ranks[rank].model(**whole_text()).logits, plain)
        runtimes[rank].check()


def test_any_path_gives_them(stack: ExitStack) -> None:
    ranks = Ranks("qwen3-moe", "abc", stack, 4)
    with torch.no_grad():
        expected = exact("qwen3-moe")(**whole_text()).logits
        plain = error(architectures.build("qwen3-moe")(**whole_text()).logits, expected)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.text("abc", min_size=4, max_size=4), min_size=3, max_size=3))
    def any_path(path: list[str]) -> None:
        logits = ranks.logits(ranks.path("/".join(path)), 0, whole_text)
        assert error(logits, expected) <= 2 * plain
        assert not ranks.exchange.boxes

    any_path()


def test_every_rank_of_a_layer_has_the_bits_of_the_others_and_attention_those_of_one(stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "ab", stack, 2)
    ranks.ranks["plain"] = plain = Rank("llama-gqa", "plain", ranks.exchange, stack)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in ranks.ranks}
    for name, rank in ranks.ranks.items():
        for layer in layers(rank.model):
            keep = seen[name].append
            layer.self_attn.o_proj.register_forward_hook(lambda module, args, out, keep=keep: keep(out.clone()))
            layer.register_forward_hook(lambda module, args, out, keep=keep: keep(out.clone()))
    with torch.no_grad():
        plain.model(**plain.inputs(chunks(0)))
    plain.computed.clear()
    ranks.logits(ranks.path("ab/ab/ab"), 0, lambda rank: rank.inputs(chunks(0)))
    assert len(seen["b"]) == 2 * ranks.layers - 1, "the pass of b ends in its last layer"
    assert all(map(torch.equal, seen["a"], seen["b"]))
    assert torch.equal(seen["a"][0], seen["plain"][0])


def counted(transport_of: Any, sent: list[int], home: str) -> Any:
    """A transport that notes the bytes of all that is sent."""
    transport = transport_of(home)
    send = transport.send

    def noted(to: str, hidden: torch.Tensor, key: Key) -> None:
        sent.append(hidden.nbytes)
        send(to, hidden, key)

    transport.send = noted
    return transport


def test_bytes_are_the_other_ranks_heads_and_sums(stack: ExitStack) -> None:
    ranks, sent = Ranks("llama-gqa", "abcd", stack, 4), list[int]()
    for rank in ranks.ranks.values():
        rank.transport_of = partial(counted, rank.transport_of, sent)
    config, tokens = ranks.ranks["a"].model.config, 29
    for path, degree in (("aabb/aabb/aabb", 2), ("abcd/abcd/abcd", 4)):
        ranks.logits(ranks.path(path), degree, lambda rank: rank.inputs(chunks(0)))
        # each of the degree ranks sends its heads, of all of them one share, and a partial sum, to all the others
        elements = config.hidden_size + degree * config.hidden_size
        assert sum(sent) == ranks.layers * (degree - 1) * tokens * elements * 4
        sent.clear()


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
    home = started(ranks, "a", ranks.path("ab/ab/ab"), lambda rank: rank.inputs(chunks(0)))
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
