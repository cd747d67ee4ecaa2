"""Mechanisms of a scenario: they are read in words, and its fleets do what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.fleet import balancer
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.overload.readings import FleetReadings
from elastic.errors import ConfigError
from elastic.sim.run import Run
from elastic.sim.scenario import Scenario, parse_scenario, read_scenario, shipped

STEPS = {"token": 1e-4, "chunk": 5.5e-2, "shared": 5e-2}
BURST = {"arrivals": "bursts", "rate": 0.1, "bursts": [{"from_s": 1, "until_s": 3, "rate": 12}]}
SMALL_DAY = """
extends = "day-1000-all"
duration_s = 4
samples = 10
fleet = { instances = 4 }
[[requests]]
name = "usual"
arrivals = "poisson"
rate = 6
lengths = "fixed"
prompt_tokens = 3000
answer_tokens = 60
[[requests]]
name = "long"
arrivals = "poisson"
rate = 0.5
lengths = "fixed"
prompt_tokens = 16000
answer_tokens = 20
"""
LENGTHS = {"lengths": "lognormal", "prompt_median": 64, "prompt_sigma": 0.0, "answer_median": 64, "answer_sigma": 0.0}


def scenario(mechanisms: dict[str, Any], instances: int = 2) -> Scenario:
    values = {
        "duration_s": 20,
        "samples": 20,
        "fleet": {"instances": instances},
        "engine": {"block_tokens": 16, "max_batch_tokens": 128},
        "memory": {"kv_tokens": 640, "layers": 4, "layer_kv_tokens": 160},
        "steps": STEPS,
        "requests": [BURST | LENGTHS],
        "mechanisms": {"page_bytes": 4096, "token_bytes": 256, **mechanisms},
    }
    return parse_scenario(values)


def figures(mechanisms: dict[str, Any], instances: int = 2) -> Run:
    run = Run(scenario(mechanisms, instances))
    run.play()
    return run


def test_a_scenario_with_a_policy_of_drops_has_shorter_waits() -> None:
    waits, drops = figures({}), figures({"policies": ["drop"]})
    assert drops.report.action_counts["dropped"] >= 1
    assert not waits.report.action_counts
    assert drops.report.document()["ttft_s"]["p99"] < waits.report.document()["ttft_s"]["p99"]
    for run in (waits, drops):
        assert run.report.requests["completed"] == run.report.requests["arrived"] > 0


@pytest.mark.parametrize("static", [{"stages": 2}, {"tp": 2, "shards": 2, "kv_shards": 2}])
def test_instances_compute_together_from_the_beginning(static: dict[str, Any]) -> None:
    run = figures(static)
    assert set(run.report.action_counts) == {"dropped" if "stages" in static else "resharded"}
    assert run.report.requests["completed"] == run.report.requests["arrived"]


def small_day(folder: Path) -> Run:
    (folder / "day.toml").write_text(SMALL_DAY)
    run = Run(read_scenario(folder / "day.toml"))
    run.play()
    return run


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of it, which is over."""
    return small_day(tmp_path_factory.mktemp("day"))


@pytest.mark.slow
def test_layers_are_dropped_and_shared_in_one_run(day: Run) -> None:
    assert {"dropped", "resharded"} <= day.report.action_counts.keys()
    assert day.report.by_source["long"].count > 0, "none of these has room at one instance"
    assert day.report.requests["completed"] == day.report.requests["arrived"]


@pytest.mark.slow
def test_what_policies_leave_unread_decides_nothing(day: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document of a run is the same to the byte where every instance is read anew at each look."""

    def hear(instance: Instance, *said: Any) -> None:
        instance.changes += 1
        heard(instance, *said)

    heard = Instance.hear
    monkeypatch.setattr(Instance, "hear", hear)
    monkeypatch.setattr(FleetReadings, "_earlier", property(lambda _: {}, lambda *_: None), raising=False)
    monkeypatch.setattr(balancer, "_furthest_apart", lambda instances: instances)
    assert json.dumps(small_day(tmp_path).report.document()) == json.dumps(day.report.document())


@pytest.mark.slow
def test_a_run_is_the_same_in_a_process_that_hashes_text_otherwise(day: Run, tmp_path: Path) -> None:
    (tmp_path / "day.toml").write_text(SMALL_DAY)
    code = (
        "import json, sys\nfrom elastic.sim.run import Run\nfrom elastic.sim.scenario import read_scenario\n"
        "run = Run(read_scenario(sys.argv[1]))\nrun.play()\nprint(json.dumps(run.report.document()))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(tmp_path / "day.toml")]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=300)
    assert done.stdout.decode().splitlines()[-1] == json.dumps(day.report.document())


def test_a_run_that_is_interrupted_leaves_no_thread_behind() -> None:
    def interrupt(at_s: float) -> None:
        began.extend(set(threading.enumerate()) - before)
        if at_s > 1.0:
            raise KeyboardInterrupt

    began, before = list[threading.Thread](), set(threading.enumerate())
    run = Run(scenario({"policies": ["drop"], "moves": True}))
    with pytest.raises(KeyboardInterrupt):
        run.play(interrupt)
    assert began
    assert not any(thread.is_alive() for thread in began)


def test_faults_befall_instances_and_lose_nothing() -> None:
    faults = [{"at_s": 2.0, "kind": "kill", "instance": 1}, {"at_s": 6.0, "kind": "hang", "instance": 0}]
    run = figures({"policies": ["drop"], "faults": faults, "replaces": True, "start_s": 1.0}, 3)
    assert run.report.action_counts["lost"] == 2
    assert run.report.requests["completed"] == run.report.requests["arrived"]


@pytest.mark.parametrize("at_s", [0, 2.0])
def test_requests_that_come_when_no_rank_is_left_are_refused(at_s: float) -> None:
    faults = [{"at_s": at_s, "kind": "kill", "instance": number} for number in range(2)]
    requests = figures({"faults": faults}).report.requests
    assert requests["rejected"] > 0
    assert requests["rejected"] + requests["completed"] + requests["failed"] == requests["arrived"]
    assert at_s or requests["rejected"] == requests["arrived"]


@pytest.mark.parametrize(
    ("mechanisms", "words"),
    [
        ({"policies": ["dorp"]}, "a list of balance, drop, lengths"),
        ({"policies": ["drop"], "overload": {"kvhigh": 0.5}}, "overload.kvhigh is not known"),
        ({"lengths": {"most_ranks": 2}}, "policies have no 'lengths'"),
        ({"links": {"bytes_s": 0}}, "links.bytes_s"),
        ({"stages": 2, "tp": 2, "shards": 2}, "cannot be at the same time"),
        ({"shards": 3, "kv_shards": 2}, "shards"),
        ({"faults": [{"at_s": 1, "kind": "bend", "instance": 0}]}, "one of kill, hang"),
        ({"speed": 3}, "speed is not known"),
        ({"tp": 2}, "tp = 2 ranks cannot share layers in 1 parts; say shards = 2"),
        ({"tp": 4, "shards": 4}, "tp = 4 does not divide 2 instances"),
        ({"stages": 3}, "stages = 3 does not divide 2 instances"),
        ({"packed": {"share": 0.3}}, r"mechanisms.packed is said, but policies have no 'drop'"),
    ],
)
def test_what_is_wrong_in_mechanisms_is_said(mechanisms: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scenario(mechanisms)


@pytest.mark.parametrize(
    ("stages", "instances", "words"),
    [(2, 3, "stages = 2 does not divide 3 instances"), (5, 5, "stages = 5 are more than the 4 layers")],
)
def test_stages_take_all_instances_and_have_layers_each(stages: int, instances: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scenario({"stages": stages}, instances)


def test_shipped_scenarios_that_extend_others_have_their_requests() -> None:
    assert "kunserve-burst-drop" in shipped()
    base, drops = read_scenario("kunserve-burst"), read_scenario("kunserve-burst-drop")
    assert drops.sources == base.sources
    assert base.models[0].mechanisms is None
    (model,) = drops.models
    assert model.mechanisms is not None
    assert model.mechanisms.policies.overload is not None
