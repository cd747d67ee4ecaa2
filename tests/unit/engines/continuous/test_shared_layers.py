"""Engines that share each layer with other ranks: shards go there and back while requests run, and nothing is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from transformers import LlamaConfig

from elastic import ConfigError, StateError
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.engines.pipeline.items import Copied
from elastic.engines.pipeline.stage import GuestStage
from elastic.memory.backends.shared_file import OpenFile
from elastic.planning.sharding.heads import kv_parts
from support import architectures
from support.architectures import long_ones
from support.child_process import wait_for_the_janitor
from support.cluster.engine_group import EngineGroup, engine_groups, read_file, require_plain_tokens, shards_of
from support.serving.generations import Collector, prompts

LAYERS = 3
PROMPTS = prompts([40, 25, 9], architectures.VOCAB)
TOKENS = 40


@pytest.fixture
def group() -> Iterator[Callable[..., EngineGroup]]:
    """group(ranks, shards, architecture); closed and checked when the test ends."""
    with engine_groups() as make:

        def cut(ranks: str, shards: int, architecture: str = "llama-gqa", **options: Any) -> EngineGroup:
            return make(ranks, architecture, wrap={"shards": shards}, **options)

        yield cut


def begin(ranks: EngineGroup, homes: str, tokens: int = TOKENS) -> dict[str, Collector]:
    return ranks.submit(homes, PROMPTS, tokens)


def end(heard: dict[str, Collector], architecture: str, tokens: int = TOKENS) -> None:
    require_plain_tokens(heard, PROMPTS, tokens, architecture)


def finish(ranks: EngineGroup, heard: dict[str, Collector], architecture: str) -> None:
    """See that each request has the plain model's tokens, and that none was computed twice."""
    end(heard, architecture)
    for home in heard:
        assert ranks.tracked[home].computed == sum(len(prompt) + TOKENS - 1 for prompt in PROMPTS)


@pytest.mark.parametrize(
    ("architecture", "shards", "cohorts"),
    [
        *long_ones(("llama-gqa", 2, 1), ("qwen3-moe", 4, 1), ("phi3", 2, 1)),
        ("llama-gqa", 4, 2),
        ("gemma3", 2, 1),
    ],
)
def test_two_instances_share_every_layer_and_part_again(
    group: Callable[..., EngineGroup], architecture: str, shards: int, cohorts: int
) -> None:
    ranks = group("ab", shards, architecture, nbytes=8 << 20)
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
    finish(ranks, heard, architecture)


def test_four_ranks_share_some_layers_and_others_go_elsewhere(group: Callable[..., EngineGroup]) -> None:
    ranks = group("abcd", 4)  # 2 KV heads: two ranks each have the same ones
    for guest in "bcd":
        ranks.join("a", guest)
    heard = begin(ranks, "a")
    heard["a"].wait_for_tokens("r2", 3)
    for part, guest in enumerate("bcd", 1):
        ranks.move("a", shards_of(range(part, part + 1), 4, range(2)), guest)
    ranks.move("a", shards_of(range(4), 4, range(2, 3)), "c")
    assert ranks["a"].path.ranks == ("a", "b", "c", "d") * 2 + ("c",) * 4
    ranks.check()
    heard["a"].wait_for_tokens("r2", 12)
    ranks.move("a", shards_of(range(1, 2), 4, range(2)), "d")  # from a guest to another one
    ranks.check()
    finish(ranks, heard, "llama-gqa")
    ranks.part("a")


def test_shards_go_to_all_ranks_at_one_pause_and_come_back_at_one(group: Callable[..., EngineGroup]) -> None:
    ranks = group("abcd", 4)
    for guest in "bcd":
        ranks.join("a", guest)
    heard = begin(ranks, "a")
    heard["a"].wait_for_tokens("r2", 3)
    ranks.move_all("a", {layer * 4 + part: guest for layer in range(LAYERS) for part, guest in enumerate("bcd", 1)})
    assert (ranks["a"].path.ranks, ranks["a"].path.epoch) == (("a", "b", "c", "d") * LAYERS, 1)
    ranks.check()
    heard["a"].wait_for_tokens("r2", 12)
    ranks.move_all("a", {1: "c", 5: "d", 9: "d"})  # guests to guests
    ranks.check()
    ranks.part("a")
    assert (ranks["a"].path.helpers, ranks["a"].path.epoch) == ((), 3)
    finish(ranks, heard, "llama-gqa")


@pytest.mark.parametrize("fails", ["b", "c", "d"])
def test_nothing_changes_where_one_of_several_ranks_cannot_copy(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    ranks = group("abcd", 4)
    for guest in "bcd":
        ranks.join("a", guest)
    pages = {rank: ranks[rank].runtime.pools[0].free_pages for rank in "bcd"}
    stage, copied = ranks[fails].stages.by_home["a"], GuestStage._copied
    monkeypatch.setattr(GuestStage, "_copied", lambda s, item: Copied(0, "no") if s is stage else copied(s, item))
    heard = begin(ranks, "a")
    heard["a"].wait_for_tokens("r2", 3)
    goes = {layer * 4 + part: guest for layer in range(LAYERS) for part, guest in enumerate("bcd", 1)}
    with pytest.raises(StateError, match=f"rank '{fails}' could not copy"):
        ranks.move_all("a", goes)
    assert (ranks["a"].path.helpers, ranks["a"].path.epoch) == ((), 0)
    assert {rank: ranks[rank].runtime.pools[0].free_pages for rank in "bcd"} == pages
    ranks.check()
    monkeypatch.undo()
    ranks.move_all("a", goes)  # no answer of before is taken for one of now
    finish(ranks, heard, "llama-gqa")
    ranks.part("a")


def test_a_rank_does_not_give_and_get_at_one_pause(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab", 2)
    ranks.join("a", "b")
    ranks.move("a", (1,), "b")
    engine = ranks["a"]
    engine.exchange.begin((1, 3))
    with pytest.raises(ConfigError, match="'a' would give shards and get some"):
        engine.exchange.flip(engine.path.redirected({1: "a", 3: "b"}))
    engine.exchange.end()
    ranks.part("a")


def live_bytes(ranks: EngineGroup, home: str) -> dict[tuple[str, int], list[bytes]]:
    """What is in the blocks of each sequence, by part of the KV cache; the same at all ranks that have it."""
    engine = ranks[home]
    found: dict[tuple[str, int], list[bytes]] = {}
    for shard, owner in enumerate(engine.path.ranks):
        (part,) = kv_parts([shard], engine.path.shards, engine.kv_format.kv_shards)
        kv = engine.kv.locate([shard]) if owner == home else ranks[owner].stages.of(home).layers_kv([shard])
        group, size = engine._memory.group_of(part), kv.format.block_bytes
        per_sector = engine._memory.blocks_per_sector(group)
        assert kv.file is not None
        with closing(OpenFile(kv.file)) as file:
            sectors = {
                sector: b"".join(read_file(file, page * kv.page_bytes, kv.page_bytes) for page in pages)
                for sector, pages in kv.pages[part].items()
            }
        for name, sequence in engine._loop.scheduler.sequences.items():
            places = [divmod(block, per_sector) for block in sequence.table.blocks[group]]
            blocks = [sectors[sector][i * size : (i + 1) * size] for sector, i in places]
            assert found.setdefault((name, part), blocks) == blocks
    return found


@pytest.mark.parametrize("architecture", ["llama-gqa", "gemma3", "gpt-oss"])
def test_a_flip_of_shards_changes_no_bit_of_keys_and_values(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    ranks = group("abc", 4, architecture)
    compared = ranks.record_flips("a", lambda: live_bytes(ranks, "a"), monkeypatch)
    for guest in "bc":
        ranks.join("a", guest)
    heard = begin(ranks, "a")
    heard["a"].wait_for_tokens("r2", 2)
    one = range(1)
    moves = [(range(2, 4), range(3), "b"), (range(1, 2), one, "c"), (range(3, 4), one, "c"), (range(1, 4), one, "a")]
    for parts, layers, rank in moves:
        for layer in layers:
            for part in parts:
                ranks.move("a", (layer * 4 + part,), rank)
    for before, after in compared:
        assert before == after
    assert any(any(map(any, before.values())) for before, _ in compared)
    heard["a"].wait([f"r{number}" for number in range(len(PROMPTS))])
    ranks.part("a")


@pytest.mark.parametrize("degree", [2, 4])
def test_the_heads_of_others_are_sent_and_what_stays_is_neither_copied_nor_mapped_anew(
    group: Callable[..., EngineGroup], monkeypatch: pytest.MonkeyPatch, degree: int
) -> None:
    """(degree - 1) / degree of the keys and values go, once; the pages of the rest stay, free blocks too."""
    copy, copied = KVExchange.copy, Counter[str]()

    def counted(exchange: KVExchange, *given: Any, **options: Any) -> int:
        nbytes = copy(exchange, *given, **options)
        copied[next(rank for rank in names if ranks[rank].kv.exchange is exchange)] += nbytes
        return nbytes

    names = "abcd"[:degree]
    heads = architectures.GQA | {"num_attention_heads": 4, "num_key_value_heads": 4}
    monkeypatch.setitem(architectures.CONFIGS, "four", lambda: LlamaConfig(**heads))
    ranks = group(names, degree, "four", nbytes=8 << 20)
    engine = ranks["a"]
    for guest in names[1:]:
        ranks.join("a", guest)
    heard = begin(ranks, "a")
    heard["a"].wait_for_tokens("r2", 5)
    engine.exchange.pause()
    monkeypatch.setattr(KVExchange, "copy", counted)
    every = range(len(engine.path.ranks))
    kept = every[::degree]  # of each layer the first
    (pool,) = engine.runtime.pools
    wait_for_the_janitor()  # it makes pages ready
    before, created = engine.kv.locate(every).pages, pool.backend.created
    blocks = {block for each in engine._loop.scheduler.begun for block in each.table.blocks[0]}
    total = (len(blocks) + len(engine._blocks.pools[0].kept_blocks)) * len(before) * engine.kv_format.block_bytes
    ranks.move_all("a", {shard: names[shard % degree] for shard in every if shard not in kept}, rounds=1)
    assert copied == dict.fromkeys(names[1:], total // degree)
    assert engine.kv.locate(kept).pages == {part: before[part] for part in kept}
    assert pool.backend.created == created
    engine.exchange.resume()
    heard["a"].wait([f"r{number}" for number in range(len(PROMPTS))])
    ranks.part("a")


@pytest.mark.parametrize("readable", [True, False])
def test_a_rank_that_is_lost_with_its_shards(group: Callable[..., EngineGroup], readable: bool) -> None:
    ranks = group("abc", 4)
    for guest in "bc":
        ranks.join("a", guest)
    ranks.move("a", shards_of(range(1, 2), 4), "b")
    ranks.move("a", shards_of(range(2, 4), 4), "c")
    heard = begin(ranks, "a", 60)
    heard["a"].wait_for_tokens("r2", 4)
    memories = ranks.kill("c")
    until_s = time.monotonic() + 60
    while ranks["a"].recovery.lost_rank is None:
        assert time.monotonic() < until_s
        time.sleep(0.002)
    restored: list[tuple[int, ...]] = []
    again = ranks["a"].recovery.recover("c", restored.append, memories if readable else {})
    assert restored == [shards_of(range(1, 4), 4)]
    assert (again == 0) is readable
    assert ranks["a"].path.helpers == ()
    end(heard, "llama-gqa", 60)
    ranks["a"].check()


def test_keys_and_values_that_another_rank_has_too_survive_without_memory_files(
    group: Callable[..., EngineGroup],
) -> None:
    ranks = group("abc", 4)  # two parts of the KV cache for four shards
    for guest in "bc":
        ranks.join("a", guest)
    ranks.move("a", shards_of(range(2, 3), 4), "b")
    ranks.move("a", shards_of(range(3, 4), 4), "c")
    heard = begin(ranks, "a", 60)
    heard["a"].wait_for_tokens("r2", 4)
    ranks.kill("c")
    until_s = time.monotonic() + 60
    while ranks["a"].recovery.lost_rank is None:
        assert time.monotonic() < until_s
        time.sleep(0.002)
    assert ranks["a"].recovery.recover("c", lambda shards: None, {}) == 0  # b has the same heads
    end(heard, "llama-gqa", 60)


def test_an_instance_whose_layers_are_cut_otherwise_is_refused(group: Callable[..., EngineGroup]) -> None:
    ranks, other = group("ab", 2), group("cd", 1)
    with pytest.raises(ConfigError, match="3 layers of 1 shards, 'b' 3 of 2"):
        ranks["b"].stages.open("c", None, None, other["c"].path, 1)  # type: ignore[arg-type]
