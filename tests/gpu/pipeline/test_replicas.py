"""Engines on GPUs whose layers have a second copy at another rank: batches of both in flight, and KV to and fro."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from support import architectures
from support.child_process import wait_for_the_janitor
from support.cluster.engine_group import EngineGroup, require_plain_tokens
from support.serving.generations import prompts

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
PROMPTS = prompts([9, 40, 17, 5], architectures.VOCAB)
NAMES = [f"r{number}" for number in range(len(PROMPTS))]
LAYERS, TOKENS = 3, 30
ENGINE: dict[str, Any] = {"nbytes": 256 << 20, "block_tokens": 4096}
"""Blocks so large that each request or two need a sector of their own."""


@pytest.fixture(params=[("cuda:0",), pytest.param(("cuda:0", "cuda:1"), marks=TWO_DEVICES)], ids=["one", "two"])
def group(request: pytest.FixtureRequest) -> Iterator[Callable[..., EngineGroup]]:
    """group(ranks, architecture): on one device, or on two, guests of "a" joined; closed when the test ends."""
    made: list[EngineGroup] = []

    def make(ranks: str, architecture: str = "llama-gqa") -> EngineGroup:
        made.append(EngineGroup(ranks, architecture, devices=request.param, **ENGINE))
        for guest in ranks[1:]:
            made[-1].join("a", guest)
        return made[-1]

    yield make
    for each in made:
        each.close()


def replicate(ranks: EngineGroup, layers: tuple[int, ...], rank: str) -> None:
    """Have a rank have the second copy of layers of "a"."""
    if ranks["a"].path.copies == 1:
        ranks["a"].cohorts.set_copies(2)
    ranks.move("a", tuple(LAYERS + layer for layer in layers), rank)


def evict(ranks: EngineGroup, *layers: int) -> None:
    ranks.move("a", tuple(LAYERS + layer for layer in layers), "a")
    if ranks["a"].path.alike:
        ranks["a"].cohorts.set_copies(1)


@pytest.mark.parametrize("architecture", ["llama-gqa", "gemma3"])
def test_replicas_come_and_go_under_running_requests(group: Callable[..., EngineGroup], architecture: str) -> None:
    ranks = group("abc", architecture)
    heard = ranks.submit("a", PROMPTS, TOKENS)
    heard["a"].wait_for_tokens("r0", 2)
    replicate(ranks, (1, 2), "b")
    heard["a"].wait_for_tokens("r0", 6)
    replicate(ranks, (0,), "c")
    assert [ranks["a"].path.copies_of(layer) for layer in range(2)] == [(("a",), ("c",)), (("a",), ("b",))]
    ranks.check()
    heard["a"].wait_for_tokens("r1", 10)
    evict(ranks, 1)
    evict(ranks, 0, 2)
    ranks.check()
    heard["a"].wait_for_tokens("r2", 14)
    replicate(ranks, (0, 1), "b")
    require_plain_tokens(heard, PROMPTS, TOKENS, architecture)
    assert ranks.tracked["a"].computed == sum(len(prompt) + TOKENS - 1 for prompt in PROMPTS), "none is computed again"
    ranks.part("a")


def live_blocks(ranks: EngineGroup) -> dict[tuple[str, int], torch.Tensor]:
    """What is in the blocks of each sequence of "a", by layer, at the rank that computes it for that sequence."""
    engine, found = ranks["a"], {}
    scheduler = engine._loop.scheduler
    for name, sequence in scheduler.sequences.items():
        ranks_of = engine.path.of_copy(sequence.cohort.copy).ranks
        for layer, owner in enumerate(ranks_of):
            memory = engine._memory if owner == "a" else ranks[owner].stages.by_home["a"].memory
            group = engine._memory.group_of(layer)
            size = memory.groups[group].group.block_bytes
            shown = memory.groups[group].view(layer, torch.uint8)
            blocks = [shown[block * size : (block + 1) * size].cpu() for block in sequence.table.blocks[group]]
            found[name, layer] = torch.cat([torch.empty(0, dtype=torch.uint8), *blocks])
    return found


def test_a_replica_takes_the_bits_of_its_half_of_the_requests(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = group("abc")
    compared = ranks.record_flips("a", lambda: live_blocks(ranks), monkeypatch)
    heard = ranks.submit("a", PROMPTS, 400)
    for name in NAMES:
        heard["a"].wait_for_tokens(name, 2)
    replicate(ranks, (1, 2), "b")
    replicate(ranks, (0,), "c")
    evict(ranks, 2)
    evict(ranks, 0, 1)
    for name in NAMES:
        ranks["a"].cancel(name)
    assert len(compared) == 4
    for before, after in compared:
        assert len(before) == len(NAMES) * LAYERS
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], blocks) and blocks.any() for key, blocks in before.items())
    ranks.part("a")


def test_steps_of_both_copies_stop_no_device_and_map_no_page(
    group: Callable[..., EngineGroup], simulator: ModuleType
) -> None:
    ranks = group("ab")
    replicate(ranks, (0, 1, 2), "b")
    heard = ranks.submit("a", PROMPTS, TOKENS)
    for name in NAMES:
        heard["a"].wait_for_tokens(name, 3)
    wait_for_the_janitor()  # which creates pages ahead of time
    counts = {name: simulator.count(name) for name in (*simulator.PAGE_CALLS, "device_sync")}
    heard["a"].wait_for_tokens("r0", TOKENS - 2)
    assert {name: simulator.count(name) for name in counts} == counts
    require_plain_tokens(heard, PROMPTS, TOKENS, "llama-gqa")
    evict(ranks, 0, 1, 2)
    ranks.part("a")


def test_a_lost_replica_costs_no_token(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    replicate(ranks, (1, 2), "b")
    heard = ranks.submit("a", PROMPTS, TOKENS)
    for name in NAMES:
        heard["a"].wait_for_tokens(name, 4)
    ranks.lose("b")
    until_s = time.monotonic() + 60
    while ranks["a"].recovery.lost_rank is None:
        assert time.monotonic() < until_s
        time.sleep(0.002)
    again = ranks["a"].recovery.recover("b", lambda shards: None)
    assert 0 < again < sum(len(prompt) + TOKENS for prompt in PROMPTS), "the home's own half goes on as it was"
    require_plain_tokens(heard, PROMPTS, TOKENS, "llama-gqa")
    assert (ranks["a"].path.copies, ranks["a"].path.helpers) == (1, ())
    ranks["a"].check()
