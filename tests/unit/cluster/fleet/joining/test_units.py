"""Ranks begin with their shares of a model that none of them could hold, and serve it together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import transformers as t

from elastic import CapacityError, ConfigError
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support import architectures
from support.lossless_variant import exact
from support.serving.generations import Collector, continuation, prompts, serve

NEW = 12
OPTIONS: dict[str, Any] = {
    "launch": "in-process",
    "engine": {"block_tokens": 8, "max_batch_tokens": 64},
    "beat_timeout_s": 60,
}
PROMPTS = prompts([5, 40], architectures.VOCAB)
WIDE: dict[str, Any] = {**architectures.GQA, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 1024}
"""Of 3.3 MiB, most of it in what is cut."""
EXPERTS = {**architectures.MOE, "num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 128}
CONFIGS = {
    "dense": lambda: t.LlamaConfig(**WIDE),
    "experts": lambda: t.Qwen3MoeConfig(**WIDE, **EXPERTS, head_dim=16),
}
NBYTES = 3 << 20
"""Less than the weights."""


def saved(name: str, path: Path) -> Any:
    """Save a model, experts one by one as transformers does; return it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(architectures.CONFIGS, name, CONFIGS[name])
        model = exact(architectures.build(name))
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> dict[str, tuple[str, list[list[int]]]]:
    """The directory of each model, and what it answers."""
    found = {}
    for name in CONFIGS:
        path = tmp_path_factory.mktemp(name)
        model = saved(name, path)
        found[name] = str(path), [continuation(model, prompt, NEW) for prompt in PROMPTS]
    return found


def places(count: int, nbytes: int = NBYTES) -> list[list[str]]:
    return [[f"cpu#unit{number}={nbytes}"] for number in range(count)]


def answers(fleet: Fleet, times: int = 1) -> list[list[int]]:
    sent = [Request(prompt, NEW) for prompt in PROMPTS * times]
    heard = serve(fleet, sent)
    return [heard.tokens[request.id] for request in sent]


@pytest.mark.parametrize(
    ("name", "tp", "pp"), [("dense", 2, 1), ("dense", 1, 2), ("dense", 2, (1, 3)), ("experts", 2, 1)]
)
def test_ranks_serve_a_model_that_no_one_of_them_could_hold(made: Any, name: str, tp: int, pp: Any) -> None:
    path, expected = made[name]
    stages = pp if isinstance(pp, int) else len(pp)
    with Fleet(path, ranks=places(tp * stages), tp=tp, pp=pp, replace=False, **OPTIONS) as fleet:
        (group,) = fleet.groups()
        assert (group.tp, set(group.alone.values())) == (tp, {0}), "none has room for all weights"
        assert [rank.state for rank in fleet.status().ranks] == ["serving"] * tp * stages
        assert answers(fleet, tp * stages) == expected * tp * stages
        before = {rank: fleet.look(rank).status.places[0].owners for rank in group.members}
        with pytest.raises(CapacityError, match="has no room for layer"):
            fleet.restore()
        assert {rank: fleet.look(rank).status.places[0].owners for rank in group.members} == before
        assert answers(fleet) == expected
        fleet.check()
    assert [event.kind for event in fleet.events()] == ["joined"] * tp * stages + ["formed"]


def test_where_there_is_room_they_part_and_share_again(made: Any) -> None:
    path, expected = made["dense"]
    with Fleet(path, ranks=places(2, 3 * NBYTES), tp=2, replace=False, **OPTIONS) as fleet:
        back = fleet.reshard("r0", tp=1)
        assert back.status == "applied"
        assert back.fetched_bytes > 0
        assert fleet.groups() == ()
        assert answers(fleet, 2) == expected * 2
        assert fleet.reshard(["r0", "r1"], tp=2).status == "applied"
        assert answers(fleet) == expected
        fleet.check()


@pytest.mark.slow
def test_a_lost_rank_is_replaced_and_its_unit_serves_on(made: Any, launcher: Any) -> None:
    path, expected = made["dense"]
    with Fleet(path, ranks=[["cpu=3MiB"]] * 2, tp=2, **{**OPTIONS, "launch": launcher}) as fleet:
        with pytest.raises(ConfigError, match="2 have the model together; 1 are no multiple"):
            fleet.scale_out(1)
        assert [group.members for group in fleet.groups()] == [("r0", "r1")]
        assert answers(fleet) == expected
        heard, sent = Collector(), [Request(prompt, 60) for prompt in PROMPTS]
        for request in sent:
            fleet.submit(request, heard)
        for request in sent:
            heard.wait_for_tokens(request.id, 2)
        fleet.kill("r1")
        heard.wait([request.id for request in sent])
        assert [heard.tokens[request.id][:NEW] for request in sent] == expected
        until_s = time.monotonic() + 60
        while not [group for group in fleet.groups() if len(group.members) == 2]:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert {event.kind for event in fleet.events()} >= {"lost", "replaced", "formed"}
        fleet.check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 3}, "tp=3 cannot be; it must be a power of two"),
        ({"pp": 0}, "pp=0 cannot be"),
        ({"pp": (2, 0)}, r"pp=\(2, 0\) cannot be"),
        ({"tp": 2, "ranks": 3}, "2 have the model together; 3 are no multiple"),
        ({"tp": 4, "shards": 2}, "tp=4: layers are cut in 2 shards; give shards=4"),
        ({"tp": 2, "policy": "drop"}, "with tp= or pp= none has"),
        ({"pp": 2, "policy": "lengths"}, "with tp= or pp= none has"),
    ],
)
def test_what_cannot_begin_together_is_said(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Fleet("no model", **{"launch": "in-process", **options})


def test_stages_that_are_not_the_models_are_refused_by_their_ranks(made: Any) -> None:
    fleet = Fleet(made["dense"][0], pp=(1, 2), **OPTIONS)
    with pytest.raises(ConfigError, match=r"pp=\(1, 2\): the layers of the stages are not 4"):
        fleet.start()
