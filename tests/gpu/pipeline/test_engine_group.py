"""Engines on GPUs that compute each other's layers: work of several threads on one device, and of several devices."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic.engines.base import Request
from support import architectures
from support.child_process import in_child
from support.cluster.engine_group import EngineGroup
from support.processes import wait_until
from support.serving.generations import Collector, continuation, prompts, same_unless_close
from support.static_quant import pack_static

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
PROMPTS = prompts([9, 40, 17, 5], architectures.VOCAB)
ENGINE: dict[str, Any] = {"nbytes": 256 << 20, "block_tokens": 4096}
"""Blocks so large that each request or two need a sector of their own."""
CLOSE = 0.03
"""Of logits: products of variants are in bfloat16 or in float32, whichever was faster where a model was packed."""


@pytest.fixture(params=[("cuda:0",), pytest.param(("cuda:0", "cuda:1"), marks=TWO_DEVICES)], ids=["one", "two"])
def group(request: pytest.FixtureRequest) -> Iterator[Callable[..., EngineGroup]]:
    """group(ranks, architecture, **options): on one device, or on two; closed and checked when the test ends."""
    made: list[EngineGroup] = []

    def make(ranks: str, architecture: str = "llama-gqa", **options: Any) -> EngineGroup:
        made.append(EngineGroup(ranks, architecture, devices=request.param, **ENGINE | options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def requests(tokens: int) -> list[Request]:
    return [Request(prompt, tokens, id=f"r{number}") for number, prompt in enumerate(PROMPTS)]


def plain(architecture: str, tokens: int) -> dict[str, list[int]]:
    model = architectures.build(architecture)
    return {f"r{i}": continuation(model, prompt, tokens) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("architecture", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("cohorts", [1, 2])
def test_layers_go_there_and_back_while_requests_run(
    group: Callable[..., EngineGroup], architecture: str, cohorts: int
) -> None:
    expected = plain(architecture, 30)
    ranks = group("ab", architecture)
    for home, guest in ("ab", "ba"):
        ranks.join(home, guest)
        ranks[home].cohorts.set_cohorts(cohorts)
    heard = {home: Collector() for home in "ab"}
    for home in "ab":
        for request in requests(30):
            ranks[home].submit(request, heard[home])
    for layers in ((1, 2), (0,)):
        for home, guest in ("ab", "ba"):
            heard[home].wait_for_tokens("r0", 2)
            ranks.move(home, layers, guest)
        ranks.check()
        for home in "ab":
            ranks.move(home, layers, home)
        ranks.check()
    for home in "ab":
        heard[home].wait(list(expected))
        assert heard[home].tokens == expected
        assert ranks.tracked[home].computed == sum(len(prompt) + 29 for prompt in PROMPTS)
        ranks.part(home)


def live_blocks(ranks: EngineGroup, home: str) -> dict[tuple[str, int], torch.Tensor]:
    """What is in the blocks of each sequence, by layer, wherever that is; nothing of the home is in flight."""
    engine, found = ranks[home], {}
    for layer, owner in enumerate(engine.path.ranks):
        memory = engine._memory if owner == home else ranks[owner].stages.by_home[home].memory
        group = engine._memory.group_of(layer)
        size = memory.groups[group].group.block_bytes
        shown = memory.groups[group].view(layer, torch.uint8)
        for name, sequence in engine._loop.scheduler.sequences.items():
            blocks = [shown[block * size : (block + 1) * size].cpu() for block in sequence.table.blocks[group]]
            found[name, layer] = torch.cat([torch.empty(0, dtype=torch.uint8), *blocks])
    return found


@pytest.mark.parametrize("cohorts", [1, 2])
def test_blocks_that_move_together_keep_their_bits_at_all_ranks(
    group: Callable[..., EngineGroup], cohorts: int
) -> None:
    ranks = group("ab", block_tokens=1024, max_requests=64)
    engine, heard = ranks["a"], Collector()
    ranks.join("a", "b")
    engine.cohorts.set_cohorts(cohorts)
    ranks.move("a", (1, 2), "b")
    for number in range(24):
        engine.submit(Request(PROMPTS[number % 4], 60, id=f"r{number}"), heard)
    for number in range(24):
        heard.wait_for_tokens(f"r{number}", 2)
    engine.exchange.pause()
    for number in range(4, 20):
        engine.cancel(f"r{number}")
    engine._loop.between_steps(engine._loop.settle_all)
    before, sectors = live_blocks(ranks, "a"), engine._memory.mapped_count
    tables = {name: list(each.table.blocks[0]) for name, each in engine._loop.scheduler.sequences.items()}
    engine.ranks.set_cap(sectors - 1)
    assert engine.ranks.cap_reached()
    assert {name: each.table.blocks[0] for name, each in engine._loop.scheduler.sequences.items()} != tables
    after = live_blocks(ranks, "a")
    assert all(torch.equal(content, after[key]) for key, content in before.items())
    engine.exchange.resume()
    expected = plain("llama-gqa", 60)
    for number in (*range(4), *range(20, 24)):
        heard.wait([f"r{number}"])
        assert heard.tokens[f"r{number}"] == expected[f"r{number % 4}"]
    ranks.part("a")


def test_a_flip_changes_no_bit_of_keys_and_values(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = group("abc")
    engine = ranks["a"]
    compared = ranks.record_flips("a", lambda: live_blocks(ranks, "a"), monkeypatch)
    for guest in "bc":
        ranks.join("a", guest)
    heard = Collector()
    for request in requests(400):
        engine.submit(request, heard)
    heard.wait_for_tokens("r3", 2)
    for layers, rank in (((1, 2), "b"), ((2,), "c"), ((1,), "c"), ((0,), "b"), ((1, 2), "a"), ((0,), "a")):
        ranks.move("a", layers, rank)
    for name in [f"r{i}" for i in range(len(PROMPTS))]:
        engine.cancel(name)
    for before, after in compared:
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], blocks) for key, blocks in before.items())
        assert all(blocks.any() for blocks in before.values())
    assert len(compared) == 6


def test_layers_go_to_several_ranks_and_come_from_several_at_one_pause(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From home to two guests, from these to two others, and home from both; keys and values bit for bit."""
    ranks = group("abcd")
    engine = ranks["a"]
    compared = ranks.record_flips("a", lambda: live_blocks(ranks, "a"), monkeypatch)
    for guest in "bcd":
        ranks.join("a", guest)
    heard = ranks.submit("a", PROMPTS, 400)["a"]
    for name in requests(1):
        heard.wait_for_tokens(name.id, 2)
    for goes in ({0: "b", 1: "c"}, {0: "d", 1: "d", 2: "d"}, {0: "a", 1: "b", 2: "c"}, {1: "d", 2: "d"}):
        ranks.move_all("a", goes)
        assert all(engine.path.ranks[layer] == rank for layer, rank in goes.items())
        ranks.check()
    ranks.move_all("a", {1: "a", 2: "a"})
    for name in requests(1):
        engine.cancel(name.id)
    assert len(compared) == 5
    for before, after in compared:
        assert before.keys() == after.keys()
        assert before
        assert all(torch.equal(after[key], blocks) and blocks.any() for key, blocks in before.items())
    ranks.part("a")


@pytest.mark.parametrize("cohorts", [1, 2])
def test_hidden_states_go_over_sockets_as_well(group: Callable[..., EngineGroup], cohorts: int) -> None:
    expected = plain("llama-gqa", 20)
    ranks = group("ab")
    ranks.join("a", "b")
    stage = ranks["b"].stages.by_home["a"]
    home = ranks["a"]._home
    home.transport.close()
    home.transport = ranks.hubs["a"].transport("a")
    stage._transport.close()
    stage._transport = ranks.hubs["b"].transport("a")
    ranks["a"].cohorts.set_cohorts(cohorts)
    ranks.move("a", (1,), "b")
    heard = Collector()
    for request in requests(20):
        ranks["a"].submit(request, heard)
    heard.wait(list(expected))
    assert heard.tokens == expected
    ranks.part("a")


def test_blocks_of_ended_requests_go_to_others_at_every_rank(group: Callable[..., EngineGroup]) -> None:
    """Sectors come and go at both ranks while steps of two cohorts, and their copies, are queued."""
    expected = plain("llama-gqa", 12)
    ranks = group("ab")
    ranks.join("a", "b")
    ranks["a"].cohorts.set_cohorts(2)
    ranks.move("a", (1, 2), "b")
    engine, memory, others = ranks["a"], ranks["b"].stages.by_home["a"].memory, ("r0", "r1", "r3")
    for turn in range(4):
        heard = Collector()
        for request in requests(12):
            engine.submit(request, heard)
        heard.wait_for_tokens("r0", 2)
        engine.cancel("r2")
        heard.wait(list(expected))
        assert {name: heard.tokens[name] for name in others} == {name: expected[name] for name in others}
        if turn % 2:
            engine.runtime.kv.resize(0)
            wait_until(lambda: engine.ranks.cap_reached() and not memory.mapped_sectors)
            engine.runtime.kv.resize("max")
        ranks.check()
    ranks.part("a")


@pytest.mark.parametrize("failing", ["a", "b"])
@pytest.mark.parametrize("cohorts", [1, 2])
def test_requests_go_on_after_a_step_that_failed_half_way(
    group: Callable[..., EngineGroup], failing: str, cohorts: int
) -> None:
    expected = plain("llama-gqa", 12)
    ranks = group("ab")
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    ranks["a"].cohorts.set_cohorts(cohorts)
    layer = ranks.tracked[failing].model.model.layers["ab".index(failing)]

    def fail(*_: Any) -> None:
        hook.remove()
        raise RuntimeError("half way")

    hook = layer.register_forward_hook(fail)
    heard = Collector()
    ranks["a"].submit(Request(PROMPTS[1], 20, id="bad"), heard)
    heard.wait(["bad"])
    assert heard.ends["bad"].finish == "failed"
    for request in requests(12):
        ranks["a"].submit(request, heard)
    heard.wait(list(expected))
    assert {name: heard.tokens[name] for name in expected} == expected
    ranks.part("a")


def test_a_lost_rank_costs_no_token(group: Callable[..., EngineGroup]) -> None:
    expected = plain("llama-gqa", 30)
    ranks = group("abc")
    for home, guest in ("ab", "ac", "ba"):
        ranks.join(home, guest)
    ranks.move("a", (1,), "b")
    ranks.move("a", (2,), "c")
    ranks.move("b", (0,), "a")
    heard = {home: Collector() for home in "ab"}
    for home in "ab":
        for request in requests(30):
            ranks[home].submit(request, heard[home])
    heard["a"].wait_for_tokens("r3", 4)
    ranks.lose("c")
    wait_until(lambda: ranks["a"].recovery.lost_rank is not None)
    assert ranks["a"].recovery.recover("c", lambda layers: None) > 0
    for home in "ab":
        heard[home].wait(list(expected))
        assert heard[home].tokens == expected
    ranks.part("b")


def test_a_variant_that_is_swapped_in_computes_the_layers_of_other_instances_too(
    group: Callable[..., EngineGroup],
) -> None:
    """Here a pruned one, while the rank computes requests of its own."""
    plain_model, pruned = architectures.build("llama-gqa"), architectures.build("llama-gqa")
    for layer in pruned.model.layers:
        pack_static(layer, elastic.Variant.parse("2:4"))
    ranks = group("ab", wrap={"variants": ["2:4"]})
    here, there = (ranks[rank].runtime for rank in "ab")
    ranks.join("a", "b")
    ranks.move("a", (1, 2), "b")
    beside = Collector()
    ranks["b"].submit(Request(PROMPTS[0], 400, id="beside"), beside)
    beside.wait_for_tokens("beside", 2)
    found = []
    for model in (pruned, plain_model):
        if model is pruned:
            there.swap((1, 2), "2:4")
            here.swap((0,), "2:4")
        else:
            there.restore()
            here.restore()
        told = ranks.submit("a", PROMPTS, 12)["a"]
        told.wait([request.id for request in requests(12)])
        found.append(told.tokens)
        close = 1e-3 if model is plain_model else CLOSE
        assert all(same_unless_close(model, text, told.tokens[f"r{i}"], close) for i, text in enumerate(PROMPTS))
    assert found[0] != found[1], "the variant says the same: nothing was tested"
    ranks["b"].cancel("beside")
    ranks.part("a")


RANKS = """
    import sys
    import torch
    sys.path[:0] = {paths!r}
    from support.architectures import VOCAB
    from support.cluster.engine_group import EngineGroup
    from support.serving.generations import Collector, prompts
    from elastic.engines.base import Request

    def alone(done):
        assert not torch._C._cuda_hasPrimaryContext(0), done

    of = {shards}
    last = tuple(layer * of + of - 1 for layer in (1, 2))
    options = {{"devices": ["cuda:1"], "block_tokens": 4096, "wrap": {{"shards": of}}}}
    ranks = EngineGroup("ab", nbytes=256 << 20, **options)
    alone("made")
    heard = Collector()
    for text in prompts([5, 9], VOCAB):
        ranks["a"].submit(Request(text, 20), heard)
    ranks.join("a", "b")
    alone("joined")
    ranks.move("a", last, "b")
    alone("moved")
    ranks["a"].cohorts.set_cohorts(2)
    request = Request(prompts([7], VOCAB)[0], 6)
    ranks["a"].submit(request, heard)
    heard.wait([request.id])
    alone("served")
    here, there = (ranks[rank].runtime for rank in "ab")
    assert here.digests([1]) == there.digests([1])
    here.drop(shards=last[:1])
    here.fetch((), there.weights_source([1]), shards=last[:1])
    alone("fetched")
    ranks.part("a")
    alone("parted")
    ranks.close()
    alone("closed")
"""


@TWO_DEVICES
@pytest.mark.parametrize("shards", [1, 2])
def test_layers_go_from_rank_to_rank_without_a_context_on_another_device(shards: int) -> None:
    """It takes some hundred MiB of a GPU that may be another program's. Of layers that are cut, half goes."""
    in_child(textwrap.dedent(RANKS).format(paths=[str(Path(__file__).parents[2])], shards=shards))
