"""Engines on GPUs that share each layer: work of several threads on one device, and of several devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from elastic.engines.base import Request
from elastic.planning.sharding.heads import kv_parts
from support import architectures
from support.child_process import wait_for_the_janitor
from support.cluster.engine_group import EngineGroup, require_plain_tokens, shards_of
from support.serving.generations import Collector, prompts

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
PROMPTS = prompts([9, 40, 17, 5], architectures.VOCAB)
NAMES = [f"r{number}" for number in range(len(PROMPTS))]
TOKENS = 30
LAYERS = 3
ENGINE: dict[str, Any] = {"nbytes": 256 << 20, "block_tokens": 8192}
"""Blocks so large that each request or two need a sector of their own."""


@pytest.fixture(params=[("cuda:0",), pytest.param(("cuda:0", "cuda:1"), marks=TWO_DEVICES)], ids=["one", "two"])
def group(request: pytest.FixtureRequest) -> Iterator[Callable[..., EngineGroup]]:
    """group(ranks, shards, architecture): on one device, or on two; closed and checked when the test ends."""
    made: list[EngineGroup] = []

    def make(ranks: str, shards: int, architecture: str = "llama-gqa") -> EngineGroup:
        made.append(EngineGroup(ranks, architecture, devices=request.param, wrap={"shards": shards}, **ENGINE))
        return made[-1]

    yield make
    for each in made:
        each.close()


def begin(ranks: EngineGroup, homes: str, tokens: int = TOKENS) -> dict[str, Collector]:
    return ranks.submit(homes, PROMPTS, tokens)


def end(heard: dict[str, Collector], architecture: str = "llama-gqa", tokens: int = TOKENS) -> None:
    require_plain_tokens(heard, PROMPTS, tokens, architecture)


def share(ranks: EngineGroup, shards: int) -> None:
    """Have a and b compute half of each layer of both."""
    half = shards // 2
    for home, guest, parts in (("a", "b", range(half, shards)), ("b", "a", range(half))):
        ranks.join(home, guest)
        ranks.move(home, shards_of(parts, shards), guest)


@pytest.mark.parametrize(
    ("architecture", "shards", "cohorts"),
    [("llama-gqa", 2, 1), ("llama-gqa", 4, 2), ("gemma3", 2, 2), ("qwen3-moe", 4, 1), ("phi3", 2, 1)],
)
def test_two_instances_share_every_layer_and_part_again(
    group: Callable[..., EngineGroup], architecture: str, shards: int, cohorts: int
) -> None:
    ranks = group("ab", shards, architecture)
    for home, guest in ("ab", "ba"):
        ranks.join(home, guest)
        ranks[home].cohorts.set_cohorts(cohorts)
    heard = begin(ranks, "ab")
    half, layers = shards // 2, len(ranks["a"].path.ranks) // shards
    for layer in range(layers):
        heard["a"].wait_for_tokens("r0", 2 * (layer + 1))
        ranks.move("a", shards_of(range(half, shards), shards, range(layer, layer + 1)), "b")
        ranks.move("b", shards_of(range(half), shards, range(layer, layer + 1)), "a")
    assert ranks["a"].path.ranks == ranks["b"].path.ranks == (("a",) * half + ("b",) * half) * layers
    ranks.check()
    heard["a"].wait_for_tokens("r0", TOKENS // 2)
    for home in "ab":
        ranks.part(home)
    ranks.check()
    end(heard, architecture)
    for home in "ab":
        assert ranks.tracked[home].computed == sum(len(prompt) + TOKENS - 1 for prompt in PROMPTS)


def test_steps_of_instances_that_share_layers_stop_no_device_and_map_no_page(
    group: Callable[..., EngineGroup], simulator: ModuleType
) -> None:
    ranks = group("ab", 4)
    share(ranks, 4)
    for home in "ab":
        ranks[home].cohorts.set_cohorts(2)
    heard = begin(ranks, "ab")
    for home in "ab":
        for name in NAMES:
            heard[home].wait_for_tokens(name, 3)
    wait_for_the_janitor()  # which creates pages ahead of time
    names = (*simulator.PAGE_CALLS, "device_sync")
    counts = {name: simulator.count(name) for name in names}
    for home in "ab":
        heard[home].wait_for_tokens("r0", TOKENS - 2)
    assert {name: simulator.count(name) for name in names} == counts
    end(heard)
    for home in "ab":
        ranks.part(home)


def test_four_ranks_share_some_layers_and_others_go_elsewhere(group: Callable[..., EngineGroup]) -> None:
    ranks = group("abcd", 4)  # two KV heads: two ranks each have the same ones
    for guest in "bcd":
        ranks.join("a", guest)
    heard = begin(ranks, "a")
    heard["a"].wait_for_tokens("r2", 3)
    for part, guest in enumerate("bcd", 1):
        ranks.move("a", shards_of(range(part, part + 1), 4, range(2)), guest)
    ranks.move("a", shards_of(range(4), 4, range(2, 3)), "c")
    ranks.check()
    heard["a"].wait_for_tokens("r2", 12)
    ranks.move("a", shards_of(range(1, 2), 4, range(2)), "d")  # from a guest to another one
    ranks.check()
    end(heard)
    ranks.part("a")


def live_blocks(ranks: EngineGroup, home: str) -> dict[tuple[str, int], torch.Tensor]:
    """What is in the blocks of each sequence, by part of the KV cache; the same at all ranks that have it."""
    engine, found = ranks[home], dict[tuple[str, int], torch.Tensor]()
    for shard, owner in enumerate(engine.path.ranks):
        (part,) = kv_parts([shard], engine.path.shards, engine.kv_format.kv_shards)
        memory = engine._memory if owner == home else ranks[owner].stages.by_home[home].memory
        group = engine._memory.group_of(part)
        size = memory.groups[group].group.block_bytes
        shown = memory.groups[group].view(part, torch.uint8)
        for name, sequence in engine._loop.scheduler.sequences.items():
            blocks = [shown[block * size : (block + 1) * size].cpu() for block in sequence.table.blocks[group]]
            here = torch.cat([torch.empty(0, dtype=torch.uint8), *blocks])
            assert torch.equal(found.setdefault((name, part), here), here)
    return found


def test_a_flip_of_shards_changes_no_bit_of_keys_and_values(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = group("abc", 4)
    engine = ranks["a"]
    compared = ranks.record_flips("a", lambda: live_blocks(ranks, "a"), monkeypatch)
    for guest in "bc":
        ranks.join("a", guest)
    heard = begin(ranks, "a", 400)
    heard["a"].wait_for_tokens("r3", 2)
    one = range(1)
    moves = [(range(2, 4), range(3), "b"), (range(1, 2), one, "c"), (range(3, 4), one, "c"), (range(1, 4), one, "a")]
    for parts, layers, rank in moves:
        for layer in layers:
            for part in parts:
                ranks.move("a", (layer * 4 + part,), rank)
    for name in NAMES:
        engine.cancel(name)
    assert len(compared) == 6 + 1 + 1 + 3
    for before, after in compared:
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], blocks) for key, blocks in before.items())
    assert any(before and all(blocks.any() for blocks in before.values()) for before, _ in compared)


@pytest.mark.parametrize("cohorts", [1, 2])
def test_heads_and_sums_go_over_sockets_as_well(group: Callable[..., EngineGroup], cohorts: int) -> None:
    ranks = group("ab", 2)
    ranks.join("a", "b")
    stage = ranks["b"].stages.by_home["a"]
    home = ranks["a"]._home
    home.transport.close()
    home.transport = ranks.hubs["a"].transport("a")
    stage._transport.close()
    stage._transport = ranks.hubs["b"].transport("a")
    ranks["a"].cohorts.set_cohorts(cohorts)
    ranks.move("a", shards_of(range(1, 2), 2), "b")
    end(begin(ranks, "a"))
    ranks.part("a")


def test_blocks_of_ended_requests_go_to_others_at_every_rank(group: Callable[..., EngineGroup]) -> None:
    """Sectors come and go at both ranks while steps of two cohorts, and their copies, are queued."""
    ranks = group("ab", 2)
    share(ranks, 2)
    engine, memory = ranks["a"], ranks["b"].stages.by_home["a"].memory
    engine.cohorts.set_cohorts(2)
    for _ in range(2):
        end(begin(ranks, "ab", 12), tokens=12)
        engine.runtime.kv.resize(0)
        until_s = time.monotonic() + 60
        while not engine.ranks.cap_reached() or memory.mapped_sectors:
            assert time.monotonic() < until_s
            time.sleep(0.002)
        engine.runtime.kv.resize("max")
        ranks.check()
    for home in "ab":
        ranks.part(home)


@pytest.mark.parametrize("failing", ["a", "b"])
@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.act_fn"])
def test_requests_go_on_after_a_step_that_failed_in_the_middle_of_a_layer(
    group: Callable[..., EngineGroup], failing: str, module: str
) -> None:
    ranks = group("ab", 2)
    share(ranks, 2)
    layer = ranks.tracked[failing].model.model.layers[1].get_submodule(module)

    def fail(*_: Any) -> None:
        hook.remove()
        raise RuntimeError("half way")

    hook = layer.register_forward_hook(fail)
    heard = Collector()
    ranks["a"].submit(Request(PROMPTS[1], 20, id="bad"), heard)
    heard.wait(["bad"])
    assert heard.ends["bad"].finish == "failed"
    end(begin(ranks, "ab", 12), tokens=12)
    for home in "ab":
        ranks.part(home)


def test_a_lost_rank_costs_no_token(group: Callable[..., EngineGroup]) -> None:
    ranks = group("abc", 4)
    for guest in "bc":
        ranks.join("a", guest)
    ranks.move("a", shards_of(range(1, 2), 4), "b")
    ranks.move("a", shards_of(range(2, 4), 4), "c")
    heard = begin(ranks, "a")
    heard["a"].wait_for_tokens("r3", 4)
    ranks.lose("c")
    until_s = time.monotonic() + 60
    while ranks["a"].recovery.lost_rank is None:
        assert time.monotonic() < until_s
        time.sleep(0.002)
    restored: list[tuple[int, ...]] = []
    assert ranks["a"].recovery.recover("c", restored.append) > 0
    assert restored == [shards_of(range(1, 4), 4)]
    end(heard)
    ranks["a"].check()
