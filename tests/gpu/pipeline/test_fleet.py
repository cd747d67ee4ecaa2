"""Fleets of ranks on GPUs that drop layers, take them back, replicate and swap them while they serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic import Restore, Swap
from elastic.cluster.control.stage_questions import FlipLayers, PauseSteps, ResumeSteps
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.engines.base import Request
from support import architectures
from support.lossless_variant import HALF, exact
from support.processes import wait_until
from support.serving.generations import Collector, prompts, same_unless_close, serve
from support.serving.tracked_engine import TrackedEngine
from support.static_quant import pack_static
from support.wrapped_model import assert_same_bits, bits

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
ON_ONE_AND_TWO = pytest.mark.parametrize("devices", [(0,), pytest.param((0, 1), marks=TWO_DEVICES)], ids=["one", "two"])
PROMPTS = prompts([5, 40, 17, 12], architectures.VOCAB)
NAMES = [f"r{number}" for number in range(len(PROMPTS))]
TOKENS = 40


def build(device: str = "cpu") -> Any:
    return exact(architectures.build("llama-gqa", device=device))


@contextmanager
def fleet_of(
    ranks: int,
    devices: Sequence[int],
    wrap: dict[str, Any] | None = None,
    checkpoints: Mapping[int, Path] | None = None,
    **engine: Any,
) -> Iterator[tuple[Fleet, list[Any]]]:
    """Ranks on these devices in turn, some with checkpoints, started; stopped behind it, all weights as they were."""
    on = [torch.device("cuda", devices[number % len(devices)]) for number in range(ranks)]
    models = [build(str(device)) for device in on]
    before = [bits(model) for model in models]
    for number, (model, device) in enumerate(zip(models, on, strict=True)):
        files = (checkpoints or {}).get(number)
        place = elastic.Place(f"{device}#{number}", device, 256 << 20)
        elastic.wrap(model, places=[place], checkpoint=files, **(wrap or {}))
    fleet = Fleet.of(*models, engine={"block_tokens": 4096, "max_batch_tokens": 64, **engine}, beat_timeout_s=60)
    fleet.start()
    try:
        yield fleet, models
        fleet.check()
        totals = fleet.status().totals
        assert totals.recomputed_tokens == 0 or totals.ranks_lost
    finally:
        fleet.stop(drain=False)
        for model in models:
            elastic.unwrap(model)
    for model, each in zip(models, before, strict=True):
        assert_same_bits(model, each)


def begin(fleet: Fleet, tokens: int = TOKENS) -> Collector:
    heard = Collector()
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        fleet.submit(Request(prompt, tokens, id=name), heard)
    for name in NAMES:
        heard.wait_for_tokens(name, 2)
    return heard


def end(heard: Collector, model: Any = None, tokens: int = TOKENS, close: float = 1e-3) -> None:
    """See that each request has the tokens of a model on the CPU (None: the plain one), nearly equal ones apart."""
    heard.wait(NAMES)
    model = build() if model is None else model
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        assert len(heard.tokens[name]) == tokens, heard.ends[name]
        assert same_unless_close(model, prompt, heard.tokens[name], close)


@ON_ONE_AND_TWO
def test_weights_of_a_lost_rank_come_back_from_one_that_has_them(devices: tuple[int, ...], tmp_path: Path) -> None:
    """The only checkpoint is that of the lost one, whose model is to have its layers in the end, too."""
    build().save_pretrained(tmp_path)
    with fleet_of(3, devices, checkpoints={1: tmp_path}) as (fleet, models):
        heard = begin(fleet)
        assert fleet.drop(layers={"r0": (1, 2), "r1": (0,)}).status == "applied"
        fleet._dispatcher.instances["r1"].client.kill("by the test")
        end(heard)
        wait_until(lambda: not fleet.groups(), "the group was not repaired")
        assert models[0].elastic.dropped == ()
        models[1].elastic.restore()


@ON_ONE_AND_TWO
def test_layers_are_dropped_and_come_back_under_running_requests(devices: tuple[int, ...]) -> None:
    with fleet_of(2, devices) as (fleet, models):
        heard = begin(fleet)
        dropped = fleet.drop(layers={"r0": (1, 2), "r1": (0,)})
        assert (dropped.status, dropped.why) == ("applied", "")
        assert dropped.freed_bytes == sum(fleet.layer_bytes())
        assert [model.elastic.dropped for model in models] == [(1, 2), (0,)]
        fleet.check()
        restored = fleet.restore()
        assert (restored.status, restored.why) == ("applied", "")
        end(heard)


@ON_ONE_AND_TWO
def test_requests_move_with_their_keys_and_values(devices: tuple[int, ...]) -> None:
    """There and back: `fleet_of` sees that no token is computed twice."""
    with fleet_of(2, devices) as (fleet, _):
        heard = begin(fleet, 150)
        for name in (*NAMES, NAMES[1]):
            (target,) = {"r0", "r1"} - {fleet.instance_of(name)}
            assert fleet.move(name, target).target == target
        for rank in ("r0", "r1"):
            (wire,) = fleet.look(rank).wires
            assert wire.read_bytes + wire.copied_bytes > 0
        fleet.check()
        end(heard, tokens=150)


@ON_ONE_AND_TWO
def test_layers_go_to_several_ranks_at_one_pause(devices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """And come home from several, which the home is told of beforehand."""
    asked, ask = list[FlipLayers](), Ranks.ask

    def note(ranks: Ranks, rank: str, question: Any) -> Any:
        if isinstance(question, FlipLayers):
            asked.append(question)
        return ask(ranks, rank, question)

    monkeypatch.setattr(Ranks, "ask", note)
    with fleet_of(3, devices) as (fleet, models):
        heard = begin(fleet)
        dropped = fleet.drop(layers={"r0": (1, 2), "r1": (0, 2), "r2": (0, 1)})
        assert (dropped.status, dropped.why) == ("applied", "")
        assert [model.elastic.dropped for model in models] == [(1, 2), (0, 2), (0, 1)]
        assert [question.path.ranks for question in asked] == [("r0", "r1", "r2")] * 3
        asked.clear()
        assert fleet.restore().status == "applied"
        assert sorted(len(question.sources or ()) for question in asked) == [2, 2, 2]
        end(heard)


@ON_ONE_AND_TWO
def test_layers_are_replicated_and_evicted_under_running_requests(devices: tuple[int, ...]) -> None:
    with fleet_of(2, devices) as (fleet, _):
        heard = begin(fleet)
        for home, rank in ("r0", "r1"), ("r1", "r0"):
            there = fleet.replicate(home, [1, 2], rank)
            assert (there.status, there.why, there.layers) == ("applied", "", (1, 2))
        fleet.check()
        assert fleet.evict("r0", [1]).layers == (1,)
        assert fleet.evict("r1").status == "applied"
        assert fleet.restore().status == "applied"
        assert fleet.groups() == ()
        end(heard)


@ON_ONE_AND_TWO
def test_a_replica_of_layers_that_were_dropped_fetches_their_weights(devices: tuple[int, ...]) -> None:
    with fleet_of(3, devices) as (fleet, models):
        heard = begin(fleet)
        assert fleet.drop(layers={"r0": (2,), "r1": (0,)}).status == "applied"
        assert fleet.replicate("r2", [0, 1], "r1").layers == (0, 1)
        assert models[1].elastic.dropped == ()
        fleet.check()
        assert fleet.restore().status == "applied"
        end(heard)


@ON_ONE_AND_TWO
def test_layers_in_a_variant_are_restored_before_ranks_drop_or_share_them(devices: tuple[int, ...]) -> None:
    with fleet_of(2, devices, {"variants": [HALF], "policy": "manual", "shards": 2}) as (fleet, models):
        heard = begin(fleet)
        fleet.apply("r0", Swap((1, 2), "half"))
        fleet.apply("r1", Swap((0,), "half"))
        dropped = fleet.drop(layers={"r0": (2,), "r1": (0,)})
        assert (dropped.status, dropped.restored) == ("applied", {"r0": (1, 2), "r1": (0,)})
        assert fleet.restore().status == "applied"
        fleet.apply("r1", Swap((0, 2), "half"))
        shared = fleet.reshard(["r0", "r1"], tp=2)
        assert (shared.status, shared.restored) == ("applied", {"r1": (0, 2)})
        assert "half" not in models[1].elastic.form()
        assert fleet.reshard("r0", tp=1).status == "applied"
        end(heard)


@ON_ONE_AND_TWO
@pytest.mark.parametrize("variant", ["2:4", "ffn50"])
def test_stages_of_a_pipeline_are_in_a_pruned_variant_and_come_back(devices: tuple[int, ...], variant: str) -> None:
    pruned = build()
    for layer in pruned.model.layers:
        pack_static(layer, elastic.Variant.parse(variant))
    with fleet_of(2, devices, {"variants": [variant], "policy": "manual"}) as (fleet, _):
        stages = {"r0": (0, 1), "r1": (2,)}
        assert fleet.drop(layers={"r0": stages["r1"], "r1": stages["r0"]}).status == "applied"
        for model in (pruned, None):
            for rank, layers in stages.items():
                fleet.apply(rank, Restore(layers) if model is None else Swap(layers, variant))
            end(serve(fleet, [Request(p, 12, id=n) for n, p in zip(NAMES, PROMPTS, strict=True)]), model, 12)
        assert fleet.restore().status == "applied"


@ON_ONE_AND_TWO
def test_keys_and_values_in_8_bits_go_from_rank_to_rank(devices: tuple[int, ...]) -> None:
    """A vector is rounded once, as it is written: answers are those of one engine, whoever computes their layers."""
    form: dict[str, Any] = {"block_tokens": 8192, "kv_cache_dtype": "int8"}
    alone = TrackedEngine(build("cuda:0"), 256 << 20, share_prefixes=False, **form)
    expected = serve(alone.engine, [Request(p, TOKENS, id=n) for n, p in zip(NAMES, PROMPTS, strict=True)]).tokens
    alone.close()
    with fleet_of(2, devices, {"shards": 2}, **form) as (fleet, _):
        heard, ranks = begin(fleet), fleet._groups.ranks
        ranks.ask_all(dict.fromkeys(["r0", "r1"], PauseSteps()))  # so that there are requests to the end
        assert fleet.drop(layers={"r0": (1, 2), "r1": (0,)}).status == "applied"
        fleet.check()
        assert fleet.restore().status == "applied"
        assert fleet.reshard(["r0", "r1"], tp=2).moved_bytes > 0
        ranks.ask_all(dict.fromkeys(["r0", "r1"], ResumeSteps()))
        heard.wait_for_tokens("r0", 10)
        ranks.ask_all(dict.fromkeys(["r0", "r1"], PauseSteps()))
        assert fleet.reshard("r0", tp=1).moved_bytes > 0
        ranks.ask_all(dict.fromkeys(["r0", "r1"], ResumeSteps()))
        assert fleet.replicate("r0", [0], "r1").status == "applied"
        assert fleet.evict("r0").status == "applied"
        heard.wait(NAMES)
        assert heard.tokens == expected
