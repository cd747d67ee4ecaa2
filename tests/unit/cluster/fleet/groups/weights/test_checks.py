"""Ranks are asked whether weights can leave them before any layer changes its rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.cluster.control.messages import Apply
from elastic.cluster.control.stage_questions import BeginExchange, SetCap
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from elastic.errors import ConfigError, RankLost, StateError
from support import architectures
from support.cluster.fake_group import LAYERS, GroupRank
from support.cluster.fake_rank import FakeLauncher
from support.serving.generations import continuation, prompts, serve
from support.wrapped_model import small

ENGINE = {"block_tokens": 8, "max_batch_tokens": 64}
VERBS: dict[str, Callable[..., Any]] = {
    "drop": lambda fleet, **options: fleet.drop(layers={"r0": [1, 2], "r1": [0]}, **options),
    "reshard": lambda fleet, **options: fleet.reshard(["r0", "r1"], tp=2, **options),
}


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval().requires_grad_(False)


def written(fleet: Fleet, model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.copy_(weight.clone())


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("adapts", "prepare", "reason"),
    [
        (True, lambda fleet, model: None, r"adapters .*lora_A.*: it cannot be dropped; merge adapters before"),
        (False, lambda fleet, model: model.elastic.replicate([1], "cpu#b0"), "has a replica at cpu#b0; evict it first"),
        (False, lambda fleet, model: model.elastic.release([1]), r"is in host memory; restore it before"),
        (False, written, "was written since the model was wrapped"),
    ],
)
def test_weights_that_cannot_leave_are_told_of_before_any_layer_changes_its_rank(
    verb: str, adapts: bool, prepare: Callable[..., object], reason: str, wrapped: Any
) -> None:
    models = []
    for number in range(2):
        model = architectures.build("llama-gqa")
        model = adapted(model) if adapts else model.requires_grad_(False)
        places = [small(6 << 20, f"cpu#{label}{number}") for label in "ab"]
        models.append(wrapped(model, places, shards=2))
    prompt = prompts([20], architectures.VOCAB)[0]
    expected = continuation(models[0], prompt, 8)
    with Fleet.of(*models, engine=ENGINE, beat_timeout_s=60) as fleet:
        prepare(fleet, models[0])
        for dry_run in (True, False):
            done = VERBS[verb](fleet, dry_run=dry_run)
            assert (done.status, done.flips, done.freed_bytes) == ("deferred", 0, 0)
            assert re.search(rf"rank 'r0' cannot drop its weights: .*{reason}", done.why), done.why
        assert fleet.groups() == ()
        if adapts:
            assert {offer.kind for offer in fleet.plan("1KiB")}.isdisjoint(("drop", "reshard"))
            told = fleet.drop(need="1KiB", dry_run=True)
            assert (told.status, told.freed_bytes) == ("deferred", 0)
        heard = serve(fleet, [request := Request(prompt, 8)])
        assert heard.tokens[request.id] == expected
        fleet.check()


@pytest.fixture
def world() -> dict[str, GroupRank]:
    return {}


@pytest.fixture
def fleet(world: dict[str, GroupRank]) -> Fleet:
    launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world, 4, 4))
    fleet = Fleet("no model", ranks=2, launch=launcher, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False)
    fleet.start()
    fleet._policies.stop()
    return fleet


def refuse(rank: GroupRank, error: Exception) -> None:
    rank.fails = lambda question: error if isinstance(question, Apply) and question.dry_run else None


@pytest.mark.parametrize("error", [ConfigError("it has adapters"), StateError("it was written")])
def test_caps_stay_and_nothing_is_connected_where_a_rank_refuses(
    error: Exception, fleet: Fleet, world: dict[str, GroupRank]
) -> None:
    refuse(world["r1"], error)
    for dry_run in (True, False):
        done = fleet.reshard(["r0", "r1"], tp=2, dry_run=dry_run)
        assert (done.status, done.why) == ("deferred", f"rank 'r1' cannot drop its weights: {error}")
        assert done.price is None
    asked = [question for rank in world.values() for question in rank.asked]
    assert not [question for question in asked if isinstance(question, BeginExchange | SetCap)]
    assert not any(rank.stages for rank in world.values())
    assert all(len(rank.resident) == 4 * LAYERS for rank in world.values())


def test_layers_that_move_without_their_weights_are_asked_of_nobody(fleet: Fleet, world: dict[str, GroupRank]) -> None:
    for rank in world.values():
        refuse(rank, StateError("it was written"))
    assert fleet.migrate("r0", [1], "r1").status == "applied"
    assert fleet.restore().status == "applied"


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_rank_that_is_lost_meanwhile_is_no_refusal(dry_run: bool, fleet: Fleet, world: dict[str, GroupRank]) -> None:
    refuse(world["r1"], RankLost("it has gone", rank="r1"))
    with pytest.raises(RankLost, match="it has gone"):
        fleet.reshard(["r0", "r1"], tp=2, dry_run=dry_run)
