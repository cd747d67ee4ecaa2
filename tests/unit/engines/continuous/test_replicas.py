"""Replicas of layers at other ranks: requests are shared out, and each is computed where its keys and values are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic import ConfigError, StateError
from elastic.engines.base import Request
from support import architectures
from support.cluster.engine_group import EngineGroup, engine_groups
from support.serving.generations import Collector, Continuation, prompts

PROMPTS = prompts([40, 25, 9, 33], architectures.VOCAB)
LAYERS = 3


@pytest.fixture
def group() -> Iterator[Callable[..., EngineGroup]]:
    """group(ranks, architecture, bytes, **options); closed when the test ends."""
    with engine_groups() as make:
        yield make


def plain(ranks: EngineGroup, tokens: int) -> dict[str, Any]:
    model = ranks.plain()
    return {f"r{i}": Continuation(model, prompt, tokens) for i, prompt in enumerate(PROMPTS)}


def submit(ranks: EngineGroup, tokens: int) -> Collector:
    heard = Collector()
    for number, prompt in enumerate(PROMPTS):
        ranks["a"].submit(Request(prompt, tokens, id=f"r{number}"), heard)
    return heard


def replicate(ranks: EngineGroup, layers: tuple[int, ...], rank: str) -> None:
    """Have a rank have the second copy of layers of "a"."""
    if ranks["a"].path.copies == 1:
        ranks["a"].cohorts.set_copies(2)
    ranks.move("a", tuple(LAYERS + layer for layer in layers), rank)


def evict(ranks: EngineGroup, layers: tuple[int, ...]) -> None:
    ranks.move("a", tuple(LAYERS + layer for layer in layers), "a")
    if ranks["a"].path.alike:
        ranks["a"].cohorts.set_copies(1)


@pytest.mark.parametrize("architecture", ["llama-gqa", "gemma3", "qwen3-moe"])
def test_requests_go_on_while_replicas_come_and_go(group: Callable[..., EngineGroup], architecture: str) -> None:
    ranks = group("abc", architecture, nbytes=8 << 20)
    expected = plain(ranks, 60)
    for guest in "bc":
        ranks.join("a", guest)
    heard = submit(ranks, 60)
    heard.wait_for_tokens("r0", 2)
    replicate(ranks, (1, 2), "b")
    heard.wait_for_tokens("r0", 6)
    replicate(ranks, (0,), "c")
    assert ranks["a"].path.copies_of(0) == (("a",), ("c",))
    assert ranks["a"].path.copies_of(1) == (("a",), ("b",))
    ranks.check()
    heard.wait_for_tokens("r1", 10)
    evict(ranks, (1,))
    ranks.check()
    heard.wait_for_tokens("r2", 15)
    evict(ranks, (2,))
    evict(ranks, (0,))
    heard.wait_for_tokens("r3", 20)
    replicate(ranks, (0, 1), "b")
    heard.wait(list(expected))
    assert heard.tokens == expected
    assert ranks.tracked["a"].computed == sum(len(prompt) + 59 for prompt in PROMPTS), "nothing is computed again"
    evict(ranks, (0, 1))
    assert (ranks["a"].path.copies, ranks["a"].path.ranks) == (1, ("a",) * LAYERS)
    ranks.check()
    ranks.part("a")


def test_each_rank_computes_about_half_of_the_requests(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    ranks.join("a", "b")
    replicate(ranks, (0, 1, 2), "b")
    seen: dict[str, list[int]] = {}
    for name, layer in (("a", 0), ("b", 0)):
        model, counts = ranks.tracked[name].model, seen.setdefault(name, [])
        model.model.layers[layer].self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, counts=counts: counts.append(kwargs["hidden_states"].shape[1]), with_kwargs=True
        )
    heard = submit(ranks, 20)
    heard.wait(["r0", "r1", "r2", "r3"])
    total = sum(len(prompt) + 19 for prompt in PROMPTS)
    assert sum(seen["a"]) + sum(seen["b"]) == total
    assert all(sum(counts) > total / 4 for counts in seen.values()), seen
    evict(ranks, (0, 1, 2))
    ranks.part("a")


def test_copies_share_no_prefix_with_each_other_and_one_does_with_itself(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    engine, prompt = ranks["a"], PROMPTS[0]
    expected = Continuation(ranks.plain(), prompt, 8)
    ranks.join("a", "b")
    replicate(ranks, (1, 2), "b")
    cached = []
    for number in range(4):  # one after another: all of the first cohort; then two at a time, one of each
        heard = Collector()
        names = [f"{number}"] if number < 2 else [f"{number}a", f"{number}b"]
        for name in names:
            engine.submit(Request(prompt, 8, id=name), heard)
        heard.wait(names)
        assert all(heard.tokens[name] == expected for name in names)
        cached.append(sum(heard.first[name].cached_tokens for name in names))
    assert cached[0] == 0
    assert cached[1] > 0
    assert cached[3] > cached[1], "both copies have the beginning now"
    evict(ranks, (1, 2))
    ranks.part("a")


def test_copies_at_different_ranks_stay_as_many(group: Callable[..., EngineGroup]) -> None:
    ranks = group("ab")
    ranks.join("a", "b")
    with pytest.raises(ConfigError, match="copies=0 cannot be; it must be a whole number, at least 1"):
        ranks["a"].cohorts.set_copies(0)
    replicate(ranks, (2,), "b")
    with pytest.raises(ConfigError, match="at other ranks"):
        ranks["a"].cohorts.set_copies(1)
    with pytest.raises(StateError, match="2 copies"):
        ranks["a"].cohorts.set_cohorts(3)
    with pytest.raises(ConfigError, match="of 2 copies; exchange those of one"):
        ranks["a"].exchange.begin((1, LAYERS + 1))
    evict(ranks, (2,))
    ranks.part("a")


@pytest.mark.parametrize("readable", [True, False])
def test_a_killed_replica_costs_no_token_and_what_can_be_read_is_not_computed_again(
    group: Callable[..., EngineGroup], readable: bool
) -> None:
    ranks = group("ab")
    expected = plain(ranks, 60)
    ranks.join("a", "b")
    replicate(ranks, (1, 2), "b")
    heard = submit(ranks, 60)
    for name in expected:
        heard.wait_for_tokens(name, 5)
    memories = ranks.kill("b") if readable else None
    if not readable:
        ranks.lose("b")
    while ranks["a"].recovery.lost_rank is None:
        time.sleep(0.002)
    again = ranks["a"].recovery.recover("b", lambda shards: None, memories)
    heard.wait(list(expected))
    assert heard.tokens == expected
    if readable:
        assert again == 0
    else:
        assert 0 < again < sum(len(prompt) + 60 for prompt in PROMPTS), "the home's own half goes on as it was"
    assert (ranks["a"].path.copies, ranks["a"].path.helpers) == (1, ())
    ranks["a"].check()


def test_what_is_kept_for_reuse_is_not_shared_while_its_copy_of_the_layers_moves(
    group: Callable[..., EngineGroup],
) -> None:
    """Of several copies only what live sequences have is copied to the rank that gets layers."""
    ranks = group("ab", "llama-gqa", nbytes=8 << 20)
    expected, heard, a = plain(ranks, 40)["r0"], Collector(), ranks["a"]
    ranks.join("a", "b")
    a.cohorts.set_copies(2)
    for number in range(2):  # one goes by each copy
        a.submit(Request(PROMPTS[0], 4, id=f"kept{number}"), heard)
    heard.wait(["kept0", "kept1"])

    def submit_again() -> None:
        for number in range(2):
            a.submit(Request(PROMPTS[0], 40, id=f"{number}"), heard)
            heard.wait_for_tokens(f"{number}", 1)

    ranks.move("a", (LAYERS + 1, LAYERS + 2), "b", rounds=1, meanwhile=submit_again)
    heard.wait(["0", "1"])
    assert heard.tokens["0"] == heard.tokens["1"] == expected
    evict(ranks, (1, 2))
    ranks.check()
    ranks.part("a")
