"""Scenarios: what a file says is what is run, what is wrong is said by its key."""

from __future__ import annotations

import json
import math
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

FIGURE = {"name": "P99 of theirs", "value": "148", "source": "Somebody, section 2", "ours": "P99 TTFT over P50"}


def document(text: str = TWO_RANKS, **changes: Any) -> dict[str, Any]:
    run = Run(parse_scenario({**tomllib.loads(text), **changes}))
    run.play()
    return run.report.document()


def test_the_same_seed_gives_the_same_document_another_one_does_not() -> None:
    first, second, other = document(), document(), document(seed=1)
    assert json.dumps(first) == json.dumps(second)
    assert first["ttft_s"] != other["ttft_s"]
    assert first["requests"]["completed"] == first["requests"]["arrived"] > 30


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_a_seed_that_a_scenario_could_not_have_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match=f"seed={seed} cannot be; it must be a whole number, at least 0"):
        parse_scenario(tomllib.loads(TWO_RANKS), seed=seed)


def test_where_no_token_came_the_span_is_nothing() -> None:
    text = TWO_RANKS.replace('lengths = "lognormal"', 'lengths = "fixed"\nprompt_tokens = 5000\nanswer_tokens = 4')
    drawn = ("prompt_median", "prompt_sigma", "answer_median", "answer_sigma")
    lines = [line for line in text.splitlines() if not line.startswith(drawn)]
    nothing = document("\n".join(lines))
    assert nothing["requests"]["arrived"] > 0
    assert (nothing["tokens"], nothing["span_s"], nothing["tokens_per_s"]) == (0, 0.0, 0.0)


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


def test_steps_behind_prompts_take_longer_where_a_scenario_says_so() -> None:
    cold = {"behind_prompt_s": 0.02, "behind_prompt_kept": 0.5}
    plain, longer = (document(steps={**_without_noise(), **more}) for more in ({}, cold))
    assert longer["tpot_s"]["mean"] > 1.1 * plain["tpot_s"]["mean"]


def test_a_table_that_is_read_later_is_not_taken_for_a_misspelt_one() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_scenario({"duration_s": 10, "model": sheet()})
    assert str(refused.value) == "fleet.instances is missing: give a whole number, at least 1"


def test_requests_that_never_fit_and_more_than_may_wait_are_refused() -> None:
    small = document(memory={"kv_tokens": 160}, fleet={"instances": 1, "max_queue": 1})
    assert small["requests"]["rejected"] > 10
    assert small["requests"]["unfinished"] == 0


@pytest.mark.parametrize(
    "arrivals",
    [
        {"arrivals": "bursts", "rate": 0, "bursts": [{"from_s": 1, "until_s": 3, "rate": 5}]},
        {"arrivals": "on-off", "on_rate": 5, "off_rate": 0, "on_s": 3, "off_s": 1e15},
    ],
    ids=["bursts", "on-off"],
)
def test_a_run_ends_where_behind_some_time_no_request_comes_any_more(arrivals: dict[str, Any]) -> None:
    lengths = {"lengths": "fixed", "prompt_tokens": 30, "answer_tokens": 4}
    counts = document(requests=[{**arrivals, **lengths}])["requests"]
    assert counts["completed"] == counts["arrived"] > 3


@pytest.mark.parametrize("duration_s", [1e-3, 1.0])
def test_moments_are_few_though_requests_take_much_longer_than_they_come(duration_s: float) -> None:
    lengths = {"lengths": "fixed", "prompt_tokens": 30, "answer_tokens": 500}
    requests = [{"arrivals": "poisson", "rate": 4 / duration_s, **lengths}]
    told = document(duration_s=duration_s, samples=10, requests=requests, steps=_without_noise())
    assert told["requests"]["completed"] == told["requests"]["arrived"] > 0
    assert told["span_s"] > 4
    assert len(told["timeline"]) < 20 * (2 + math.log2(told["span_s"] / duration_s))
    uses = [sample["kv_use"] for sample in told["timeline"] if sample["at_s"] > duration_s]
    assert told["kv_use"]["mean"] == pytest.approx(sum(uses[-10:]) / 10, rel=0.3), "of time, not of moments"


def sheet(**config: Any) -> dict[str, Any]:
    """The table of a model by a data sheet, and its config."""
    return {"device": "h100", "config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, **config}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["fleet"].update(instance=2), "fleet.instance is not known; did you mean 'instances'"),
        (lambda d: d.update(flete=d.pop("fleet")), "; flete is there: did you mean 'fleet'"),
        (lambda d: d["fleet"].update(instanse=d["fleet"].pop("instances")), "fleet.instanse is there: did you mean"),
        (lambda d: d.update(request=d.pop("requests")), "request is there: did you mean 'requests'"),
        (lambda d: d.update(step=d.pop("steps")), "step is there: did you mean 'steps'"),
        (lambda d: d.update(duration=d.pop("duration_s")), "duration is there: did you mean 'duration_s'"),
        (
            lambda d: d["requests"][0].update(promt_median=d["requests"][0].pop("prompt_median")),
            "requests[0].promt_median is there: did you mean 'prompt_median'",
        ),
        (
            lambda d: d["requests"][0].update(
                arrivals="bursts", rate=0, bursts=[{"from_s": 1, "until_s": 2, "rate": 0}]
            ),
            "bursts without a rate above 0",
        ),
        (lambda d: d["fleet"].update(instances=0), "fleet.instances = 0 must be a whole number, at least 1"),
        (lambda d: d["fleet"].update(routing="best"), "fleet.routing = 'best' must be one of"),
        (
            lambda d: d["steps"].update(behind_prompt_kept=2),
            "steps.behind_prompt_kept = 2 must be a number, at least 0",
        ),
        (lambda d: d.pop("duration_s"), "duration_s is missing"),
        (lambda d: d.update(requests=[]), "requests are missing"),
        (lambda d: d["requests"][0].update(arrivals="often"), "requests[0].arrivals = 'often' must be one of poisson"),
        (lambda d: d["requests"][0].update(rate=-1), "requests[0].rate = -1 must be a number"),
        (lambda d: d["requests"][0].update(ask=0.5), "requests[0].ask = 0.5 must be a number, at least 1"),
        (lambda d: d["requests"].append(d["requests"][0]), "same name"),
        (lambda d: d.update(published={"speed": 2}), "must be [[published]] tables"),
        (lambda d: d.update(published=[{"name": "a", "value": "2"}]), "published[0].source is missing"),
        (lambda d: d.update(published=[{**FIGURE, "ours": "speed"}]), "published[0].ours = 'speed' must be one of"),
        (lambda d: d.update(published=[{**FIGURE, "figure": 3}]), "published[0].figure is not known"),
        (lambda d: d["steps"].update(shared=1.0), "a chunk costs at least what is shared"),
        (lambda d: d["memory"].clear(), "memory.kv_tokens is missing"),
        (lambda d: d["engine"].update(share_prefixes=1), "engine.share_prefixes = 1 must be true or false"),
        (lambda d: d["requests"][0].update(model="b"), "model = 'b' must be one of [[models]], of which there are"),
        (
            lambda d: d["requests"][0].update(arrivals="trace"),
            "requests[0].lengths = 'lognormal' must be trace, as are the arrivals",
        ),
        (lambda d: d["memory"].update(layers=2**62), "memory.layers = 4611686018427387904 must be a whole number"),
        (lambda d: d.update(mechanisms={"shards": 2**62}), "mechanisms.shards = 4611686018427387904 must be a whole"),
        (lambda d: d.update(mechanisms={"page_bytes": 1}), "page_bytes = 1 has no room for a block of 32 tokens"),
        (lambda d: d.update(model={"device": "h100", "tp": 2**62}), "model.tp = 4611686018427387904 must be a whole"),
        (
            lambda d: d["requests"][0].update(arrivals="bursts"),
            "bursts without windows are none; give [[requests.bursts]]",
        ),
        (lambda d: d["engine"].update(swap_token_s=1), "engine.swap_token_s is said, but eviction is 'none'"),
        (
            lambda d: d.update(devices=[0, 1, 2]),
            "devices = [0.0, 1.0, 2.0] must be device numbers",
        ),
        (lambda d: d.update(devices=[0, 0, 1, 1]), "other devices for each part of an instance"),
        (lambda d: d.update(models=[{"name": "a"}]), "models[0].fleet.instances is missing"),
        (lambda d: d.update(models=[{}]), "models[0].name is missing"),
        (lambda d: d.update(model={"device": "h300"}), "no known kind of device"),
        (lambda d: d.update(model={"device": "h100"}), "model.path is missing"),
        (lambda d: d["fleet"].update(instances=10**12), "fleet.instances = 1000000000000 must be a whole number"),
        (
            lambda d: d.update(samples=10**9),
            "samples = 1000000000 must be a whole number, at least 1, at most 1,000,000",
        ),
        (lambda d: d["steps"].update(token=10**400), "steps.token = 1000000"),
        (lambda d: d["steps"].update(noise=100), "steps.noise = 100 must be a number, at least 0, at most 10"),
        (lambda d: d.update(devices=[10**400, 1]), "devices = [1000000"),
        (lambda d: d.update(mechanisms={"links": {"bytes_s": "fast"}}), "links.bytes_s='fast' cannot be"),
        (lambda d: d.update(mechanisms={"links": {"hop_s": math.nan}}), "links.hop_s=nan cannot be"),
        (lambda d: d.update(mechanisms={"packed": {"share": "half"}}), "packed.share='half' cannot be"),
        (lambda d: d.update(mechanisms={"packed": {"name": 4}}), "packed.name=4 cannot be"),
        (lambda d: d.update(mechanisms={"faults": [{}]}), "mechanisms.faults[0].at_s is missing"),
        (lambda d: d.update(model=sheet(num_attention_heads=7)), "model.config cannot be loaded"),
        (lambda d: d.update(model=sheet(num_key_value_heads="two")), "model.config cannot be loaded"),
        (lambda d: d.update(model=sheet(dtype="half16")), "model.config cannot be loaded"),
    ],
)
def test_what_is_wrong_is_said_by_its_key(change: Callable[[dict[str, Any]], object], words: str) -> None:
    values = {"engine": {}, **tomllib.loads(TWO_RANKS)}
    change(values)
    with pytest.raises(ConfigError, match=None) as raised:
        parse_scenario(values)
    assert words in str(raised.value)


def test_a_request_longer_than_any_model_takes_ends_a_run_in_words() -> None:
    lengths = {"lengths": "fixed", "prompt_tokens": 10**12, "answer_tokens": 1}
    scenario = parse_scenario({**tomllib.loads(TWO_RANKS), "requests": [{"arrivals": "poisson", "rate": 1, **lengths}]})
    run = Run(scenario)
    with pytest.raises(ConfigError, match="requests 'requests': one has 1,000,000,000,000 tokens"):
        run.play()
    run.close()


@pytest.mark.parametrize(
    "content", [b"title = '\xff'", b"title = 1" + 5000 * b"0", b"title = " + 10**5 * b"[", b'extends = "a\\u0000"']
)
def test_a_file_that_cannot_be_read_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    """Bytes that are no text, a number of too many digits, lists too deep, a name with a zero."""
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigError, match="no TOML"):
        read_scenario(tmp_path / "bad.toml")


def test_a_scenario_extends_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(TWO_RANKS)
    (tmp_path / "other.toml").write_text('extends = "base.toml"\ntitle = "Other"')
    assert read_scenario(tmp_path / "other.toml").instances == 2


def test_a_file_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two-ranks"):
        read_scenario(tmp_path / "none.toml")
    for name, words in (
        ("", "scenario '' is no name; give a file, or one of amoeba-mix"),
        (" ", "scenario ' ' is no name"),
        ("two-rank", "did you mean two-ranks"),
        ("two-ranks.toml", "did you mean two-ranks"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_scenario(name)
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


@pytest.mark.parametrize("name", [name for name in shipped() if name.startswith(("kunserve", "amoeba", "models"))])
def test_scenarios_of_papers_have_their_figures_and_say_where_these_are(name: str) -> None:
    scenario = read_scenario(name)
    assert scenario.predicts
    assert scenario.published
    for figure in scenario.published:
        paper, _, where = figure.source.partition(", ")
        assert paper in ("AMOEBA", "KunServe", "iServe")
        assert where.startswith("section ")


def test_published_figures_are_told_beside_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {**FIGURE, "name": "another", "value": "1.75 to 6.57"}
    del other["ours"]
    tables = ["\n[[published]]\n" + "\n".join(f'{k} = "{v}"' for k, v in each.items()) for each in (FIGURE, other)]
    (tmp_path / "s.toml").write_text('predicts = "two ranks"' + TWO_RANKS + "".join(tables))
    assert main(["simulate", str(tmp_path / "s.toml")]) == 0
    *shown, line = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    first, second = told["published"]
    assert {key: first[key] for key in FIGURE} == FIGURE
    assert first["here"] == told["ttft_s"]["p99"] / told["ttft_s"]["p50"]
    assert (second["ours"], second["here"]) == ("", None)
    assert any("beside what is predicted here" in each for each in shown)
    (row,) = (each for each in shown if "P99 of theirs" in each)
    assert "148" in row
    assert f"{first['here']:.4g}" in row


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


def test_a_picture_of_a_run_and_its_actions_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture, faults = tmp_path / "s.png", '[[mechanisms.faults]]\nat_s = 5\nkind = "kill"\ninstance = 0\n'
    (tmp_path / "s.toml").write_text(TWO_RANKS + "[mechanisms]\nreplaces = true\nstart_s = 3\n" + faults)
    assert main(["simulate", str(tmp_path / "s.toml"), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["action_counts"]) > 1


def test_where_figures_cannot_go_is_said_before_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--json", "--plot"):
        assert main(["simulate", "two-ranks", option, str(tmp_path / "none" / "out")]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err) == (
            "",
            f"elastic simulate: {option} {tmp_path}/none/out: there is no such directory\n",
        )
    assert main(["simulate", "two-ranks", "--json", "/dev/full"]) == 2
    assert capsys.readouterr().err == "elastic simulate: --json /dev/full cannot be written: No space left on device\n"


def test_that_nothing_draws_is_said_before_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["simulate", "two-ranks", "--plot", str(tmp_path / "out.png")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "elastic simulate: --plot needs matplotlib: pip install 'elastic-llm[plot]'\n")


def test_without_a_scenario_it_lists_those_inside(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(shipped())
