"""Fleets whose keys and values are in 8 bits: requests, layers and shards move with their scales, in processes too.

Vectors are rounded once, when they are written. So whatever moves, the answers are those of one engine alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import elastic
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support import architectures
from support.architectures import long_ones
from support.cluster.shared_launcher import SharedLauncher
from support.cluster.small_checkpoint import VOCABULARY, checkpoint, small_model
from support.serving.generations import Collector, prompts, serve
from support.serving.tracked_engine import TrackedEngine
from support.wrapped_model import small

pytestmark = pytest.mark.slow
ENGINE: dict[str, Any] = {"block_tokens": 12, "max_batch_tokens": 64, "kv_cache_dtype": "int8"}
TOKENS = 60
PROMPTS = prompts([5, 40, 70, 12], architectures.VOCAB)
SHARED = [PROMPTS[2] + tail for tail in prompts([6, 9], architectures.VOCAB, seed=3)]
"""Prompts that begin as another one."""


def requests(asked: list[tuple[int, ...]], tokens: int = TOKENS) -> dict[str, Request]:
    return {f"{len(prompt)}": Request(prompt, tokens, id=f"{len(prompt)}", ignore_eos=True) for prompt in asked}


@pytest.fixture
def fleets() -> Iterator[Callable[[str], Fleet]]:
    """fleet(architecture): of two ranks of this process, whose layers are cut in two."""
    made: list[tuple[Fleet, list[Any]]] = []

    def fleet(name: str) -> Fleet:
        models = [architectures.build(name) for _ in range(2)]
        for number, model in enumerate(models):
            elastic.wrap(model, places=small(4 << 20, f"cpu#{number}"), shards=2)
        made.append((Fleet.of(*models, engine=ENGINE, beat_timeout_s=60), models))
        made[-1][0].start()
        return made[-1][0]

    yield fleet
    for each, models in made:
        each.stop(drain=False)
        for model in models:
            if not model.elastic.dropped:
                elastic.unwrap(model)


def other(fleet: Fleet, request: str) -> str:
    """The instance that a request is not at."""
    return "r1" if fleet.instance_of(request) == "r0" else "r0"


@pytest.mark.parametrize("name", [*long_ones("llama-gqa"), "gemma3"])
def test_requests_layers_and_shards_move_and_no_answer_changes(fleets: Callable[[str], Fleet], name: str) -> None:
    alone = TrackedEngine(architectures.build(name), **{**ENGINE, "share_prefixes": False})
    expected = serve(alone.engine, [*requests([*PROMPTS, *SHARED]).values()]).tokens
    alone.close()
    fleet, heard = fleets(name), Collector()
    layers = len(fleet.layer_bytes())
    halves = {"r0": range(layers // 2, layers), "r1": range(layers // 2)}
    asked = requests(PROMPTS)
    for request in asked.values():
        fleet.submit(request, heard)

    def go_on(tokens: int) -> None:
        for each in asked:
            heard.wait_for_tokens(each, tokens)

    go_on(3)
    assert fleet.move("70", other(fleet, "70")).recomputed_tokens == 0
    go_on(8)
    assert fleet.drop(layers=halves).status == "applied"
    go_on(16)
    assert fleet.restore().status == "applied"
    done = fleet.reshard(["r0", "r1"], tp=2)
    assert (done.status, done.tp) == ("applied", 2)
    go_on(28)
    for request in requests(SHARED).values():  # their beginning is in blocks of shards
        fleet.submit(request, heard)
    assert fleet.reshard("r0", tp=1).status == "applied"
    heard.wait([*expected])
    assert {each: heard.tokens[each] for each in expected} == expected
    assert fleet.status().totals.recomputed_tokens == 0
    fleet.check()


def test_processes_move_a_request_and_share_layers(launcher: SharedLauncher) -> None:
    asked = requests(prompts([30, 90], VOCABULARY), 400)
    engine = {"max_batch_tokens": 128, "kv_cache_dtype": "int8", "block_tokens": None}  # as many as fit with scales
    alone = TrackedEngine(copy.deepcopy(small_model()), 48 << 20, **engine)
    expected = serve(alone.engine, [*asked.values()]).tokens
    alone.close()
    heard = Collector()
    options: dict[str, Any] = {
        "launch": launcher,
        "replace": False,
        "shards": 2,
        "engine": engine,
        "beat_timeout_s": 60,
    }
    with Fleet(checkpoint(), ranks=2, places=["cpu=48MiB"], **options) as fleet:
        for request in asked.values():
            fleet.submit(request, heard)
        heard.wait_for_tokens("90", 3)
        assert fleet.move("90", other(fleet, "90")).recomputed_tokens == 0
        assert fleet.reshard(["r0", "r1"], tp=2).status == "applied"
        heard.wait_for_tokens("90", min(400, len(heard.tokens["90"]) + 4))
        assert fleet.reshard("r0", tp=1).status == "applied"
        heard.wait([*asked])
        assert fleet.status().totals.recomputed_tokens == 0
        fleet.check()
    assert {each: heard.tokens[each] for each in asked} == expected
