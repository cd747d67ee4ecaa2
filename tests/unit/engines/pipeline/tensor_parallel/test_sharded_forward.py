"""A model whose layers several ranks compute together: the logits of one rank to rounding, the same bits at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from elastic.engines.core.step import ScheduledChunk
from elastic.engines.pipeline.transport import Key
from elastic.errors import StateError
from elastic.planning.sharding.heads import kv_parts
from support import architectures
from support.architectures import in_turn
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


def chunks(step: int) -> list[ScheduledChunk]:
    return [
        ScheduledChunk(name, start, tuple(text[0, start:stop].tolist()), True, ((),))
        for name, text, (start, stop) in zip("xy", TEXTS, CUTS[step], strict=True)
    ]


@pytest.mark.parametrize(("name", "shards"), in_turn(sorted(architectures.CONFIGS.keys() - SERVED), list(PATHS)))
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


@pytest.mark.parametrize(("name", "shards"), in_turn(sorted(SERVED), list(PATHS)))
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
