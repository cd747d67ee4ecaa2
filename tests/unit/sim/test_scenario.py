"""Scenarios: what a file says is what is run, what is wrong is said by its key."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.cli.main import main
from elastic.errors import ConfigError
from elastic.sim.run import Run
from elastic.sim.scenario import parse_scenario, read_scenario, shipped

TWO_RANKS = """
title = "two ranks"
duration_s = 20
[fleet]
instances = 2
[memory]
kv_tokens = 3200
[steps]
token = 4e-4
chunk = 1e-2
shared = 9e-3
prefix = 1e-7
noise = 0.1
[[requests]]
arrivals = "poisson"
rate = 3
lengths = "lognormal"
prompt_median = 60
prompt_sigma = 0.5
answer_median = 40
answer_sigma = 0.5
ask = 1.5
"""


def document(text: str = TWO_RANKS, **changes: Any) -> dict[str, Any]:
    run = Run(parse_scenario({**tomllib.loads(text), **changes}))
    run.play()
    return run.report.document()


def test_the_same_seed_gives_the_same_document_another_one_does_not() -> None:
    first, second, other = document(), document(), document(seed=1)
    assert json.dumps(first) == json.dumps(second)
    assert first["ttft_s"] != other["ttft_s"]
    assert first["requests"]["completed"] == first["requests"]["arrived"] > 30


def test_stretches_of_steps_change_hardly_a_figure() -> None:
    plain, stretched = (document(simulation={"stretch_s": s}, steps=_without_noise()) for s in (0, 5))
    assert stretched["requests"] == plain["requests"]
    assert stretched["tokens"] == plain["tokens"]
    for figure in ("ttft_s", "tpot_s"):
        assert stretched[figure]["mean"] == pytest.approx(plain[figure]["mean"], rel=0.02)


def _without_noise() -> dict[str, float]:
    return {**tomllib.loads(TWO_RANKS)["steps"], "noise": 0.0}


def test_more_work_takes_longer() -> None:
    calm, busy = (document(fleet={"instances": count}, steps=_without_noise()) for count in (2, 1))
    assert busy["kv_use"]["mean"] > calm["kv_use"]["mean"]
    assert busy["tpot_s"]["mean"] > calm["tpot_s"]["mean"]


def test_requests_that_never_fit_and_more_than_may_wait_are_refused() -> None:
    small = document(memory={"kv_tokens": 160}, fleet={"instances": 1, "max_queue": 1})
    assert small["requests"]["rejected"] > 10
    assert small["requests"]["unfinished"] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["fleet"].update(instance=2), "fleet.instance is not known; did you mean 'instances'"),
        (lambda d: d["fleet"].update(instances=0), "fleet.instances = 0 must be a whole number, at least 1"),
        (lambda d: d["fleet"].update(routing="best"), "fleet.routing = 'best' must be one of"),
        (lambda d: d.pop("duration_s"), "duration_s is missing"),
        (lambda d: d.update(requests=[]), "requests are missing"),
        (lambda d: d["requests"][0].update(arrivals="often"), "requests[0].arrivals = 'often' must be one of poisson"),
        (lambda d: d["requests"][0].update(rate=-1), "requests[0].rate = -1 must be a number"),
        (lambda d: d["requests"][0].update(ask=0.5), "requests[0].ask = 0.5 must be a number, at least 1"),
        (lambda d: d["requests"].append(d["requests"][0]), "same name"),
        (lambda d: d["steps"].update(shared=1.0), "a chunk costs at least what is shared"),
        (lambda d: d["memory"].clear(), "memory.kv_tokens is missing"),
        (lambda d: d["engine"].update(share_prefixes=1), "engine.share_prefixes = 1 must be true or false"),
        (lambda d: d["requests"][0].update(model="b"), "model = 'b' must be one of"),
        (
            lambda d: d.update(devices=[0, 1, 2]),
            "devices = [0.0, 1.0, 2.0] must be device numbers",
        ),
        (lambda d: d.update(devices=[0, 0, 1, 1]), "other devices for each part of an instance"),
        (lambda d: d.update(models=[{"name": "a"}]), "models[0].fleet.instances is missing"),
        (lambda d: d.update(models=[{}]), "models[0].name is missing"),
        (lambda d: d.update(model={"device": "h300"}), "no known kind of device"),
        (lambda d: d.update(model={"device": "h100"}), "model.path is missing"),
    ],
)
def test_what_is_wrong_is_said_by_its_key(change: Callable[[dict[str, Any]], object], words: str) -> None:
    values = {"engine": {}, **tomllib.loads(TWO_RANKS)}
    change(values)
    with pytest.raises(ConfigError, match=None) as raised:
        parse_scenario(values)
    assert words in str(raised.value)


def test_a_file_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two-ranks"):
        read_scenario(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("title = ")
    with pytest.raises(ConfigError, match="no TOML"):
        read_scenario(tmp_path / "bad.toml")


@pytest.mark.parametrize("name", shipped())
def test_shipped_scenarios_begin(name: str) -> None:
    scenario = read_scenario(name)
    run = Run(scenario)
    run.threads.run(0.5)
    run.close()
    run.close()
    assert scenario.title
    assert scenario.predicts or scenario.basis == "fitted"


def test_a_trace_is_read_as_bench_reads_it(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:15:{second:02d}.0000000,{100 + second},8\n" for second in range(10, 40))
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    values = tomllib.loads(TWO_RANKS)
    requests = {"arrivals": "trace", "file": "azure.csv", "window_s": [5, 15], "token_scale": 0.5}
    scenario = parse_scenario({**values, "requests": [requests]}, tmp_path)
    jobs = list(scenario.sources[0].jobs(0, scenario.duration_s))
    assert [(job.at_s, job.prompt, job.answer) for job in jobs[:2]] == [(0.0, 58, 4), (1.0, 58, 4)]
    assert len(jobs) == 10


def test_the_command_writes_one_line_of_json_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text(TWO_RANKS)
    assert main(["simulate", str(tmp_path / "s.toml"), "--seed", "3", "--json", str(tmp_path / "out.json")]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    whole = json.loads((tmp_path / "out.json").read_text())
    assert line["seed"] == 3
    assert line["speed"]["events"] > 100
    assert whole["timeline"]
    assert {key: whole[key] for key in line if key != "speed"} == {k: v for k, v in line.items() if k != "speed"}


def test_without_a_scenario_it_lists_those_inside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(shipped())
