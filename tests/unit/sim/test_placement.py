"""Models that a planner places on devices of a scenario: memory adds up, devices are shared, requests find theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig

from elastic.cli.main import main
from elastic.cli.predictions import simulate as command
from elastic.cli.views.panels import plain_console
from elastic.errors import ConfigError
from elastic.estimation.device_list import parse_devices
from elastic.estimation.estimate import Estimator
from elastic.estimation.model_layout import layout_of
from elastic.estimation.placement import ModelSpace
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.devices import PAGE_BYTES, SHEETS, several
from elastic.planning.estimate.performance import Load
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.clock import VirtualClock
from elastic.sim.placement.deployments import SimulatedDeployments
from elastic.sim.placement.rank_pages import rank_pages
from elastic.sim.run import Run
from elastic.sim.scenario import parse_scenario, read_scenario

PROMPT, ANSWER = 64, 16
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "dtype": "float16",
}


def need_bytes() -> int:
    """Return what one model needs of a device that has all of it."""
    config = parse_scenario(values()).placement.configs["small"]  # type: ignore[union-attr]
    space = ModelSpace(Load(PROMPT, ANSWER), "cost", ("full",), block_tokens=16)
    (option,) = space.options(config, several(SHEETS["a6000"], 1))
    return option.need(range(option.layers), 1)


def values(models: int = 4, devices: str = "4*a6000", rate: float = 4.0, **placement: Any) -> dict[str, Any]:
    shares = {"compute_share": 1e-3, "memory_share": 1e-3}  # so that a step takes some milliseconds
    sizes = {"prompt": PROMPT, "new": ANSWER, "weights": ["full"]}
    requests = {"arrivals": "poisson", "rate": rate, "lengths": "fixed"}
    return {
        "duration_s": 30,
        "deploy": ["small"] * models,
        "configs": {"small": dict(CONFIG)},
        "placement": {"devices": devices, **shares, **sizes, **placement},
        "engine": {"block_tokens": 16},
        "requests": [{**requests, "prompt_tokens": PROMPT, "answer_tokens": ANSWER}],
    }


def with_room_for(share: float, count: int) -> str:
    """Return so many devices, each with so many times the memory that one model needs."""
    return f"{count}*a6000={int(share * need_bytes()) // 1024}KiB"


def played(scenario: dict[str, Any]) -> Run:
    run = Run(parse_scenario(scenario))
    run.play()
    return run


def devices_of(run: Run, name: str) -> set[str]:
    return {device for stage in run.report.placements[name]["stages"] for device in stage["devices"]}


def test_memory_adds_up_and_what_does_not_fit_is_refused_in_words() -> None:
    run = played(values(5, with_room_for(2.2, 2)))
    report, placed = run.report, run.report.placements
    assert [placed[name]["placed"] for name in ("small", "small#2", "small#3", "small#4", "small#5")] == [True] * 4 + [
        False
    ]
    assert "no room" in placed["small#5"]["why_not"] or "has" in placed["small#5"]["why_not"]
    for name, device in report.devices.items():
        held = [s["bytes"] for each in placed.values() for s in each.get("stages", ()) if name in s["devices"]]
        assert device["reserved_bytes"] == sum(held) <= device["memory_bytes"]
        assert len(device["models"]) == len(held) == 2
    refused = report.by_model.pop("small#5")
    assert refused.requests["rejected"] == refused.requests["arrived"] > 5
    assert all(each.requests["completed"] == each.requests["arrived"] > 5 for each in report.by_model.values())
    assert sum(e.requests["arrived"] for e in (refused, *report.by_model.values())) == report.requests["arrived"]


def test_an_instance_has_no_more_pages_than_were_reserved_for_it() -> None:
    run = played(values(2, with_room_for(2.2, 1)))
    assert run.deployments is not None
    for name, fleet in run.deployments.fleets.items():
        (placed,) = fleet.placed
        assert 0 < placed.pages.budget * PAGE_BYTES["cuda"] <= run.report.placements[name]["bytes"]
        assert placed.pages.weights < placed.pages.budget


def test_a_rank_has_as_many_pages_for_keys_and_values_as_its_estimate() -> None:
    """Batches of all requests that run are kept back, not that of one."""
    layout = layout_of(LlamaConfig(num_hidden_layers=4, vocab_size=150_000), torch.float16)
    estimator = Estimator(layout, parse_devices("a6000=5GiB"), Load(192, 64), 512, None, 0)
    candidate = estimator.candidate_on(Configuration(), [range(4)], estimator.devices, 32)
    pages, fewer = (rank_pages(estimator, Configuration(), range(4), estimator.devices[0], most) for most in (32, 1))
    assert candidate.requests == 32
    assert pages.budget - pages.weights == candidate.ranks[0].kv // estimator.pages.page_bytes
    assert pages.weights > fewer.weights
    config = {"model_type": "llama", "num_hidden_layers": 4, "vocab_size": 150_000, "dtype": "float16"}
    scenario = {**values(), "fleet": {"instances": 1}}
    for name in ("deploy", "configs", "placement"):
        del scenario[name]
    of_model = {"device": "a6000", "memory": "5GiB", "config": config}
    few, many = (
        parse_scenario({**scenario, "model": dict(of_model), "engine": {"max_requests": most}}).models[0].rank.pages
        for most in (1, 128)
    )
    assert many.budget - many.weights < few.budget - few.weights


def test_of_layers_that_are_unlike_each_has_the_mean_of_all() -> None:
    """The first layer of a DeepSeek is dense, and others have experts."""
    config = DeepseekV3Config(
        vocab_size=100,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    estimator = Estimator(layout_of(config, torch.float16), parse_devices("a6000=4GiB"), Load(64, 64), 512, None, 0)
    pages = rank_pages(estimator, Configuration(), range(4), estimator.devices[0], 1)
    assert pages.layer_weights == estimator.pages.layers(range(4), "full", 1) // 4
    assert pages.layer_weights > 2 * estimator.pages.layers(range(1), "full", 1)


def test_the_same_seed_gives_the_same_document_another_one_does_not() -> None:
    first, second, other = (
        played({**values(3), "steps": {"noise": 0.1}, "seed": seed}).report.document() for seed in (0, 0, 1)
    )
    assert json.dumps(first) == json.dumps(second)
    assert first["ttft_s"] != other["ttft_s"]


def test_packing_takes_fewer_devices_whose_models_wait_for_each_other() -> None:
    devices = with_room_for(2.2, 4)
    spread, packed = (played(values(4, devices, 12.0, policy=policy)) for policy in ("least-loaded", "packing"))
    assert len({device for name in spread.report.placements for device in devices_of(spread, name)}) == 4
    assert len({device for name in packed.report.placements for device in devices_of(packed, name)}) == 2
    for run in (spread, packed):
        assert run.report.requests["completed"] == run.report.requests["arrived"] > 200
    assert packed.report.document()["ttft_s"]["p95"] > 1.2 * spread.report.document()["ttft_s"]["p95"]
    assert packed.report.tpot_s.mean > 1.05 * spread.report.tpot_s.mean
    busiest = {run: max(each["busy"] for each in run.report.devices.values()) for run in (spread, packed)}
    assert busiest[packed] > 1.3 * busiest[spread]


@pytest.mark.parametrize(("rate", "together"), [(0.05, True), (6.0, False)])
def test_hybrid_packs_onto_what_was_seen_to_be_idle(rate: float, together: bool) -> None:
    """The second model comes when the first has served for 20 s."""
    run = played(values(2, with_room_for(2.2, 2), rate, policy="hybrid", together=1, every_s=20))
    assert (devices_of(run, "small") == devices_of(run, "small#2")) is together


def test_models_come_in_time_and_requests_go_only_to_those_that_are_there() -> None:
    run = played(values(3, "2*a6000", together=1, every_s=10))
    arrived = [run.report.by_model[name].requests["arrived"] for name in ("small", "small#2", "small#3")]
    assert arrived[0] > arrived[1] > arrived[2] > 0
    assert sum(arrived) == run.report.requests["completed"]


def test_a_model_that_no_device_has_room_for_computes_in_parts_as_long_as_its_estimate_says(tmp_path: Path) -> None:
    row = f"2023-11-16 18:15:46.0000000,{PROMPT},{ANSWER}\n"
    (tmp_path / "one.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + row)
    scenario = {**values(1, with_room_for(0.8, 2)), "requests": [{"arrivals": "trace", "file": "one.csv"}]}
    run = Run(parse_scenario(scenario, tmp_path))
    run.play()
    assert run.deployments is not None
    (placed,) = run.deployments.fleets["small"].placed
    cost = placed.cost.instance
    assert len(devices_of(run, "small")) == 2
    assert run.report.ttft_s.mean == pytest.approx(cost.pass_s([Chunk("", 0, PROMPT)]))
    decoding = [cost.pass_s([Chunk("", PROMPT + number, 1)]) for number in range(ANSWER - 1)]
    assert run.report.tpot_s.mean == pytest.approx(sum(decoding) / len(decoding))


def test_stretches_of_steps_end_when_another_model_wants_the_device() -> None:
    plain, stretched = (
        played({**values(2, with_room_for(2.2, 1), 3.0), "simulation": {"stretch_s": seconds}}) for seconds in (0, 5)
    )
    assert stretched.clock.events < 0.7 * plain.clock.events
    for name in ("small", "small#2"):
        one, other = plain.report.by_model[name], stretched.report.by_model[name]
        assert other.requests == one.requests
        assert other.ttft_s.mean == pytest.approx(one.ttft_s.mean, rel=0.01)
        assert other.tpot_s.mean == pytest.approx(one.tpot_s.mean, rel=0.01)
    assert stretched.report.devices["a6000#0"]["busy"] == pytest.approx(
        plain.report.devices["a6000#0"]["busy"], rel=0.01
    )


def test_a_device_that_computes_when_the_run_ends_was_busy_until_then() -> None:
    """Prompts of several steps, of which no first token has come by then."""
    scenario = values(1, with_room_for(2.2, 1), 50.0, prompt=2000)
    scenario["requests"][0] |= {"prompt_tokens": 2000}
    run = played({**scenario, "duration_s": 0.1, "drain_s": 0.0})
    counts = run.report.counts()
    assert 0 < counts["unfinished"] == counts["arrived"]
    assert not run.report.tokens
    assert 0.5 < run.report.devices["a6000#0"]["busy"] <= 1


def test_replicas_are_on_devices_of_their_own_and_share_the_requests() -> None:
    run = played(values(2, "4*a6000", replicas=2, policy="least-loaded"))
    assert all(len(devices_of(run, name)) == 2 for name in ("small", "small#2"))
    steps = [instance.scheduler.steps for fleet in run.fleets for instance in fleet.instances.values()]
    assert len(steps) == 4
    assert min(steps) > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(deploy=["large"]), "deploy = ['large'] must be a list of small"),
        (lambda v: v.pop("deploy"), "deploy is missing"),
        (lambda v: v["configs"].update(small={}), "configs.small.path is missing"),
        (lambda v: v["configs"].update(small=1), "configs.small = 1 must be a table"),
        (lambda v: v["placement"].update(device="a6000"), "placement.device is not known; did you mean 'devices'"),
        (lambda v: v["placement"].update(policy="best"), "placement.policy = 'best' must be one of hybrid"),
        (lambda v: v["placement"].update(intent="speed"), "placement.intent = 'speed' must be one of latency"),
        (lambda v: v["placement"].update(devices="a6000,h100"), "placement.devices are of several kinds"),
        (lambda v: v["engine"].update(eviction="swap"), "engine.eviction = 'swap' is not for models that are placed"),
        (lambda v: v["requests"][0].update(model="large"), "model = 'large' must be one of small, small#2"),
        (lambda v: v.update(fleet={"instances": 2}), "fleet is not known"),
        (lambda v: v.update(configs={}), "configs are missing: give a table [configs.NAME]"),
        (lambda v: v["configs"].update(small={"path": "m", "vocab_size": 8}), "configs.small.vocab_size is not known"),
        (lambda v: v["placement"].update(weights=["full", "full"]), "placement.weights=('full', 'full') cannot be"),
        (lambda v: v["placement"].update(every_s=60), "placement.every_s is said, but models come all at once"),
    ],
)
def test_what_is_wrong_is_said_by_its_key(change: Callable[[dict[str, Any]], object], words: str) -> None:
    scenario = values()
    change(scenario)
    with pytest.raises(ConfigError) as raised:
        parse_scenario(scenario)
    assert words in str(raised.value)


def test_models_of_one_config_have_names_that_no_other_config_has() -> None:
    described = values(2)
    described["configs"]["small#2"] = dict(CONFIG)
    described["deploy"] += ["small#2"]
    run = Run(parse_scenario(described))
    run.play()
    assert [*run.report.placements] == ["small", "small#3", "small#2"]


def test_the_shipped_scenario_has_a_place_for_all_21_models() -> None:
    scenario = read_scenario("models-21").placement
    assert scenario is not None
    assert len(set(scenario.names)) == 21
    clock = VirtualClock()
    deployments = SimulatedDeployments(clock, scenario, 0)
    clock.run(3600.0)
    assert all(isinstance(outcome, Deployment) for outcome in deployments.outcomes.values())
    assert len(deployments.outcomes) == 21
    shapes = {name for name, placed in deployments.placements().items() if placed["unserved"]}
    assert shapes == {name for name in scenario.names if name.startswith("falcon")}
    for device in deployments.use(3600.0).values():
        assert device["reserved_bytes"] <= device["memory_bytes"]


def test_the_command_says_of_placed_models_alone_that_they_are_there_for_their_shapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    placed = {"placed": True, "unserved": "odd", "configuration": "TP1", "stages": [], "bytes": 1}
    placements = {"a": placed, "b": {"placed": False, "unserved": "odd", "why_not": "no room"}}
    command._show_placements(plain_console(), {"placements": placements, "by_model": {}, "devices": {}})
    out = capsys.readouterr().out
    assert "for their shapes alone, as the engine refuses them: a: odd\n" in out
    assert "b has no place: no room\n" in out


def test_the_command_tells_models_and_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = values(2, with_room_for(1.1, 1))
    lines = [f"{key} = {json.dumps(scenario[key])}" for key in ("duration_s", "deploy")]
    for name in ("placement", "engine"):
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in scenario[name].items())]
    lines += ["[configs.small]", *(f"{key} = {json.dumps(value)}" for key, value in CONFIG.items())]
    lines += ["[[requests]]", *(f"{key} = {json.dumps(value)}" for key, value in scenario["requests"][0].items())]
    (tmp_path / "s.toml").write_text("\n".join(lines))
    assert main(["simulate", str(tmp_path / "s.toml")]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert document["placements"]["small"]["placed"]
    assert "small#2 has no place: " in out
    assert "a6000#0" in out
