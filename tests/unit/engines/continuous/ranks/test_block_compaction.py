"""Blocks of running requests move together at all ranks, so that a cap is reached though what is free is scattered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic import StateError
from elastic.engines.base import Request
from elastic.engines.executor.paged_cache import PagedCache
from support import architectures
from support.cluster.engine_group import EngineGroup, engine_groups, shards_of
from support.processes import wait_until
from support.serving.generations import Collector, prompts, same_unless_close

TOKENS = 60
PROMPTS = prompts([30, 14, 22, 9, 40, 17] * 4, architectures.VOCAB)


@pytest.fixture
def scattered() -> Iterator[Callable[..., tuple[EngineGroup, Collector]]]:
    """scattered(architecture, sharing): a paused engine "a", of some of whose layers "b" computes all, or parts.

    Every fourth of its requests goes on, and so a few blocks of each sector are in use.
    """
    with engine_groups() as make:

        def start(architecture: str, sharing: bool) -> tuple[EngineGroup, Collector]:
            ranks = make("ab", architecture, wrap={"shards": 2}, max_requests=64)
            ranks.join("a", "b", ranks.sectors_alone("a") // 2)
            ranks.move("a", shards_of(range(sharing, 2), 2, range(1 - sharing, 3 - sharing)), "b")
            heard = Collector()
            for number, prompt in enumerate(PROMPTS):
                ranks["a"].submit(Request(prompt, TOKENS, id=f"r{number}", ignore_eos=True), heard)
            for number in range(len(PROMPTS)):
                heard.wait_for_tokens(f"r{number}", 2)
            for number in range(len(PROMPTS)):
                if number % 4:
                    ranks["a"].cancel(f"r{number}")
            ranks["a"].exchange.pause()
            return ranks, heard

        yield start


def finish(ranks: EngineGroup, heard: Collector) -> None:
    left = range(0, len(PROMPTS), 4)
    ranks["a"].exchange.resume()
    heard.wait([f"r{number}" for number in left])
    for number in left:
        assert len(heard.tokens[f"r{number}"]) == TOKENS, heard.ends[f"r{number}"]
        assert same_unless_close(architectures.build(ranks.architecture), PROMPTS[number], heard.tokens[f"r{number}"])
    ranks.part("a")
    ranks.check()


def least_cap(ranks: EngineGroup) -> tuple[int, int]:
    """Return the sectors that requests could end in, and those that they need as their blocks lie."""
    engine = ranks["a"]
    ledger, pools = engine._blocks._ledger, engine._blocks.pools
    least = ledger.compacted_sectors([pool.in_use for pool in pools])
    return least, engine._memory.sectors_in_use + engine._blocks.owed_sectors()


@pytest.mark.parametrize(
    ("architecture", "sharing"), [("llama-gqa", True), ("llama-gqa", False), ("gemma3", True), ("qwen3-moe", True)]
)
def test_a_cap_is_reached_as_soon_as_it_holds_what_requests_may_need(
    scattered: Callable[..., tuple[EngineGroup, Collector]], architecture: str, sharing: bool
) -> None:
    ranks, heard = scattered(architecture, sharing)
    engine, tracked = ranks["a"], ranks.tracked["a"]
    least, now = least_cap(ranks)
    assert least < now
    engine.ranks.set_cap(least - 1)
    assert not engine.ranks.cap_reached(), "one sector too few: nothing moves for nothing"
    assert least_cap(ranks) == (least, now)
    engine.ranks.set_cap(least)
    assert engine.ranks.cap_reached()
    assert engine._memory.mapped_count <= least
    for sequence in engine._loop.scheduler.begun:
        told = tracked.directory.of(sequence.id, len(sequence.tokens))
        assert told is not None
        assert told.blocks == sequence.kv().blocks, "whoever goes on elsewhere reads these"
    stage = ranks["b"].stages.by_home["a"]
    wait_until(lambda: dict(stage._runner.sequences()) == dict(engine._runner.sequences()), "it knows other blocks")
    finish(ranks, heard)


@pytest.mark.parametrize("fails", ["a", "b"])
def test_nothing_moves_where_a_rank_cannot_copy(
    scattered: Callable[..., tuple[EngineGroup, Collector]], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, heard = scattered("llama-gqa", True)
    engine, copy = ranks["a"], PagedCache.copy
    cache = engine.kv.cache if fails == "a" else ranks["b"].stages.by_home["a"]._runner.cache

    def fail(self: PagedCache, *given: Any) -> None:
        if self is cache:
            raise StateError("no room")
        copy(self, *given)

    least, now = least_cap(ranks)
    tables = [sequence.kv().blocks for sequence in engine._loop.scheduler.begun]
    with monkeypatch.context() as patch:
        patch.setattr(PagedCache, "copy", fail)
        engine.ranks.set_cap(least)
        assert not engine.ranks.cap_reached()
    assert [sequence.kv().blocks for sequence in engine._loop.scheduler.begun] == tables
    assert least_cap(ranks) == (least, now)
    engine.check()
    assert engine.ranks.cap_reached(), "the next time"
    finish(ranks, heard)
