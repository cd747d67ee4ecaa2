"""Forward passes of ranks on GPUs that share layers: attention by parts of the KV cache, and sums over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType

import pytest
import torch

from elastic.engines.core.step import ScheduledChunk
from elastic.planning.sharding.heads import kv_parts
from support import architectures
from support.child_process import wait_for_the_janitor
from support.cluster.joined_runtimes import joined
from support.pipeline.stage_ranks import Rank, Ranks, whole_text
from support.wrapped_model import layers

pytestmark = pytest.mark.cuda
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
ON_ONE_AND_TWO = pytest.mark.parametrize(
    "devices", [("cuda:0",), pytest.param(("cuda:0", "cuda:1"), marks=TWO_DEVICES)], ids=["one", "two"]
)
TEXTS = [architectures.prompt(length=64, seed=seed)["input_ids"] for seed in (1, 2)]
STOPPING = ("device_sync", "pageable_h2d", "pageable_d2h")
"""Waits for a whole device, and copies that the host waits for."""
CUTS = [((0, 20), (0, 9)), ((20, 21), (9, 40)), ((21, 22), (40, 41)), ((22, 23), (41, 42))]
"""Of the tokens of both texts, those of each step: prompts, a prompt beside a token, tokens."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def chunks(step: int) -> list[ScheduledChunk]:
    return [
        ScheduledChunk(name, start, tuple(text[0, start:stop].tolist()), True, ((),))
        for name, text, (start, stop) in zip("xy", TEXTS, CUTS[step], strict=True)
    ]


@ON_ONE_AND_TWO
@pytest.mark.parametrize(
    ("name", "shards", "layer_ranks"),
    [
        ("llama-gqa", 2, "ab/ba/ab"),
        ("llama-gqa", 4, "abcd/aaaa/cbdb"),
        ("mistral-sliding", 4, "abab/cccc/dcba"),
        ("gemma3", 2, "ab/ab/bb"),
        ("qwen3-moe", 4, "abab/abcd/bbaa"),
        ("phi3", 4, "aabb/abba/abcd"),
    ],
)
def test_prompts_and_decoding_in_blocks_give_the_logits_of_one_rank(
    name: str, shards: int, layer_ranks: str, devices: tuple[str, ...], stack: ExitStack
) -> None:
    """Each rank has the keys and values of its shards alone; all others are not there, or NaN."""
    ranks = Ranks(name, "abcd"[:shards], stack, shards, devices=devices)
    plain, path = Rank(name, "plain", ranks.exchange, stack), ranks.path(layer_ranks)
    for rank_name, rank in ranks.ranks.items():
        parts = kv_parts(path.shards_of(rank_name), shards, rank.cache.kv_shards)
        if parts:
            rank.keep(parts)
    for step in range(len(CUTS)):
        expected = plain.model(**plain.inputs(chunks(step))).logits
        logits = ranks.logits(path, step, lambda rank, step=step: rank.inputs(chunks(step)))
        torch.testing.assert_close(logits.cpu(), expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(logits.argmax(-1).cpu(), expected.argmax(-1))
    assert not ranks.exchange.boxes


@ON_ONE_AND_TWO
def test_all_ranks_of_a_layer_have_the_same_bits(devices: tuple[str, ...], stack: ExitStack) -> None:
    ranks = Ranks("llama-gqa", "abcd", stack, 4, devices=devices)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in ranks.ranks}
    for name, rank in ranks.ranks.items():
        for layer in layers(rank.model):
            keep = seen[name].append
            layer.self_attn.o_proj.register_forward_hook(lambda module, args, out, keep=keep: keep(out.clone()))
            layer.register_forward_hook(lambda module, args, out, keep=keep: keep(out.clone()))
    ranks.logits(ranks.path("abcd/abcd/abcd"), 0, lambda rank: rank.inputs(chunks(0)))
    for rank in "bcd":
        assert all(torch.equal(one.cpu(), two.cpu()) for one, two in zip(seen["a"], seen[rank], strict=False))
        assert len(seen[rank]) == 2 * ranks.layers - 1, "the pass of a guest ends in its last layer"


@ON_ONE_AND_TWO
@pytest.mark.parametrize(
    ("name", "layer_ranks"), [("llama-gqa", "aabb"), ("llama-gqa", "abab"), ("phi3", "abcd"), ("qwen3-moe", "abab")]
)
def test_a_decode_step_over_ranks_maps_no_page_and_waits_for_no_copy_of_its_own(
    name: str, layer_ranks: str, devices: tuple[str, ...], stack: ExitStack, simulator: ModuleType
) -> None:
    """What the host copies to a GPU waits for all that is queued there: each rank copies what one alone does."""
    ranks = Ranks(name, "abcd", stack, 4, devices=devices)

    def counted(path: str, step: int) -> dict[str, int]:
        wait_for_the_janitor()  # which creates pages ahead of time
        before = {call: simulator.count(call) for call in (*simulator.PAGE_CALLS, *STOPPING)}
        ranks.logits(ranks.path(path), step, lambda rank: rank.inputs(chunks(min(step, len(CUTS) - 1))))
        return {call: simulator.count(call) - count for call, count in before.items()}

    path = "/".join([layer_ranks] * 3)
    over_ranks = [counted(path, step) for step in range(len(CUTS))][-1]
    alone = counted("aaaa/aaaa/aaaa", len(CUTS))
    assert alone["pageable_h2d"] > 0
    assert over_ranks == {call: len(set(layer_ranks)) * count for call, count in alone.items()}
    assert not any(over_ranks[call] for call in (*simulator.PAGE_CALLS, "device_sync", "pageable_d2h"))


@ON_ONE_AND_TWO
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-moe", "phi3"])
def test_ranks_without_the_weights_of_others_give_them_too(
    name: str, devices: tuple[str, ...], stack: ExitStack
) -> None:
    ranks = Ranks(name, "ab", stack, 4, devices=devices)
    path = ranks.path("aabb/abba/bbbb")
    expected = ranks.logits(path, 0, whole_text)
    runtimes = {rank: ranks.ranks[rank].model.elastic for rank in "ab"}
    for rank, other in ("ab", "ba"):
        runtimes[rank].digests(shards=path.shards_of(other))
        runtimes[rank].drop(shards=path.shards_of(other))
        runtimes[rank].kv.trim()
    found = [ranks.logits(path, step, whole_text) for step in (1, 2)]
    assert all(torch.equal(logits, expected) for logits in found)
    joined(stack, **runtimes)
    for rank, other in ("ab", "ba"):
        come = path.shards_of(other)
        runtimes[rank].fetch((), runtimes[other].weights_source(shards=come), shards=come)
        runtimes[rank].check()
    assert torch.equal(ranks.logits(path, 3, whole_text), expected)
