"""`elastic place`: what it prints, as text and as JSON, and when it fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from elastic.assets import MODEL_DIR
from elastic.cli.main import main
from elastic.estimation.placement import numbered

COMMAND = ["place", str(MODEL_DIR), str(MODEL_DIR), "--prompt", "100", "--new-tokens", "28", "--weights", "full,int4"]


def document(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, object]:
    assert main([*COMMAND, "--json", *options]) == code
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_models_go_where_those_before_them_left_room(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--devices", "cpu#a=30MiB,cpu#b=11MiB", "--rate", "2", "--policy", "packing")
    first, second = found["models"]  # type: ignore[misc]
    assert [each["name"] for each in (first, second)] == ["stdlib-2.6m", "stdlib-2.6m#2"]
    devices = {each["name"]: each for each in found["devices"]}  # type: ignore[attr-defined]
    for name, nbytes in (("cpu#a", 30 << 20), ("cpu#b", 11 << 20)):
        stages = [s for each in (first, second) for s in each["stages"] if name in s["devices"]]
        assert devices[name]["free_bytes"] == nbytes - sum(stage["bytes"] for stage in stages) >= 0
        assert devices[name]["load"] == pytest.approx(sum(stage["busy"] for stage in stages))
    layers = [layer for stage in first["stages"] for layer in range(*stage["layers"])]
    assert layers == list(range(12))


def test_policies_choose_devices_by_their_load(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--devices", "cpu#a=99MiB,cpu#b=99MiB", "--loads", "cpu#a=0.6,cpu#b=0.2", "--intent", "memory"]
    chosen = []
    for policy in (["packing"], ["least-loaded"], ["hybrid"], ["hybrid", "--theta", "0.7"]):
        first = document(capsys, *options, "--policy", *policy)["models"][0]  # type: ignore[index]
        chosen.append(first["stages"][0]["devices"])
    assert chosen == [["cpu#a"], ["cpu#b"], ["cpu#b"], ["cpu#a"]]


def test_what_has_no_place_says_why_and_the_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    refused = document(capsys, "--devices", "cpu=3MiB", code=2)["models"][0]  # type: ignore[index]
    assert refused["placed"] is False
    assert "cpu lacks" in refused["why_not"][0]["why"]
    assert main([*COMMAND, "--devices", "cpu=15MiB"]) == 2
    text = capsys.readouterr().out
    assert "stdlib-2.6m#2, no place: TP1 PP1" in text
    assert "free" in text
    assert main([*COMMAND, "--devices", "cpu=3MiB", "--loads", "cpu#x=1"]) == 2
    assert "which are none of the devices cpu" in capsys.readouterr().err
    assert main([*COMMAND, "--devices", "cpu=3MiB", "--loads", "cpu"]) == 2
    assert "is no NAME=X" in capsys.readouterr().err


def test_bounds_of_the_intent_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--devices", "cpu#a=99MiB"]
    refused = document(capsys, *devices, "--latency", "1e-6", code=2)["models"][0]  # type: ignore[index]
    assert "above the 1e-06 s of the intent" in refused["why_not"][0]["why"]
    lossless = document(capsys, *devices, "--intent", "memory", "--quality-loss", "0.01", "--losses", "int4=0.02")
    assert lossless["models"][0]["configuration"]["weights"] == "full"  # type: ignore[index]
    cheap = document(capsys, *devices, "--cost", "1GiBs", "--losses", "int4=0.02")
    assert cheap["models"][0]["placed"]  # type: ignore[index]


def test_models_of_one_name_have_names_of_their_own_whatever_directories_are_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("a#2", "a", "b/a")]
    for path in paths:
        path.mkdir(parents=True)
        shutil.copy(MODEL_DIR / "config.json", path)
    assert main(["place", *map(str, paths), "--json", "--devices", "cpu=99MiB"]) == 0
    placed = json.loads(capsys.readouterr().out)["models"]
    assert [each["name"] for each in placed] == ["a#2", "a", "a#3"]
    assert numbered(["a", "a", "a#2", "a", "a#2"]) == ("a", "a#3", "a#2", "a#4", "a#2#2")


def test_a_name_that_has_two_numbers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--devices", "cpu=99MiB"]
    for name, values in (("--loads", "cpu=0.1, cpu=0.9"), ("--losses", "int4=0.1,int4=0.2")):
        assert main([*COMMAND, *options, name, values]) == 2
        assert f"{name} '{values}' has {values.partition('=')[0]} twice" in capsys.readouterr().err


def test_a_number_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("--loads", "--losses"):
        assert main([*COMMAND, "--devices", "cpu=99MiB", name, "=0.5"]) == 2
        assert f"{name} '=0.5' is no NAME=X, such as " in capsys.readouterr().err


def test_what_is_characterized_is_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(MODEL_DIR), "--devices", "cpu=99MiB", "--characterize", "--json"]) == 2
    assert "--characterize is a table" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["place", "--devices", "cpu#a=1GiB"], ["plan", "--places", "cpu#a=1GiB"]])
def test_a_name_in_brackets_is_no_markup(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(MODEL_DIR, tmp_path / "m[v2]:x:")
    name, *options = command
    assert main([name, str(tmp_path / "m[v2]:x:"), str(MODEL_DIR), *options]) == 0
    assert capsys.readouterr().out.count("m[v2]:x:") > 1
