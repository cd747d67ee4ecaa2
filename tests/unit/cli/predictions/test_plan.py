"""`elastic plan`, and grids of layers by places in the views."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic.assets import MODEL_DIR
from elastic.cli.main import main
from elastic.cli.predictions.plan import sizes_of
from elastic.cli.views.layer_grid import layers_at, of_status
from elastic.cli.views.panels import screen
from elastic.config import Place
from elastic.planning.assumed_speeds import ASSUMED, assume
from elastic.server.generation.collector import variants
from elastic.types import Event, Evict, HostStatus, KVStatus, Migrate, MigrateKV, PlaceStatus, Residency, Status
from elastic.weights.decoder import find_decoder
from support.architectures import build


def printed(what: Any) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(what)
    return console.export_text()


def status() -> Status:
    places = tuple(PlaceStatus(name, 4096, 1 << 20, {}, 1 << 20, 0, 0, 0) for name in ("cpu#a", "cpu#b"))
    kv = tuple(KVStatus(place.name, 0, 0, 0, 0, 0, 0, 0) for place in places)
    full = [Residency(place.name, "float32") for place in places]
    residencies = {
        "model.layers.0": (full[0],),
        "model.layers.1": (full[0], full[1], Residency("cpu#b", "float32", part="mlp")),
        "model.layers.2": (Residency("host", "float32"),),
        "model.layers.10": (full[1], Residency("cpu#a", "float32", part="mlp.up_proj")),
    }
    return Status(4, places, kv, residencies, HostStatus(0, 0, 0, 0), 0)


def test_a_grid_has_a_line_for_each_place() -> None:
    places, layers, parts = of_status(status())
    assert places == ["cpu#a", "cpu#b", "host"]
    assert layers == [("cpu#a",), ("cpu#a", "cpu#b"), ("host",), ("cpu#b",)]
    assert {layer: at for layer, at in parts.items() if at} == {1: {"cpu#b"}, 3: {"cpu#a"}}
    lines = printed(layers_at(places, layers, parts)).splitlines()
    assert "cpu#a ██·▖ 0-1" in lines[1]
    assert "cpu#b ·▒·█ 1, 3" in lines[2]
    assert "host  ··█· 2" in lines[3]
    assert printed(layers_at(["cpu#c"], layers)).splitlines()[1].strip("│ ") == "cpu#c ····"


def test_modules_that_are_elsewhere_are_no_layers_of_their_own() -> None:
    assert variants(status()) == ["float32", "float32", "absent", "float32"]


def test_dropped_layers_are_told_from_released_ones() -> None:
    before = status()
    residencies = before.residencies | {"model.layers.10": (Residency("dropped", "float32"),)}
    after = replace(before, residencies=residencies)
    places, layers, _ = of_status(after)
    assert places == ["cpu#a", "cpu#b", "host", "dropped"]
    assert "dropped ···█ 3" in printed(layers_at(places, layers))
    assert variants(after) == ["float32", "float32", "absent", "dropped"]


def test_the_view_shows_places_and_where_layers_went() -> None:
    def event(action: Any) -> Event:
        return Event(0, action, 0.0, "", 0, 0, 0.0, 0.0, 0.0, True, "applied")

    events = [event(Migrate((1, 2), "b", ("mlp",))), event(MigrateKV((3,), "b")), event(Evict((4,), "b"))]
    text = printed(screen("", status(), events))
    for words in (
        "4 layers at 3 places",
        "migrate layers 1-2 (mlp)",
        "migrate KV of layer 3 to b",
        "evict layer 4 from b",
    ):
        assert words in " ".join(text.split())


def run(capsys: Any, *arguments: str) -> tuple[int, str]:
    code = main(["plan", str(MODEL_DIR), *arguments])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_plan_prints_placement_speed_and_memory(capsys: Any) -> None:
    code, text = run(capsys, "--places", "cpu#a=64MiB,cpu#b=48MiB")
    assert code == 0
    assert "cpu#b ▒▒▒▒▒▒▒▒▒▒▒▒ 0-11" in text
    assert "speeds are assumed" in text
    row = next(line for line in text.splitlines() if "all" in line and "│" in line)
    assert float(row.split("│")[4]) > 1.1


def test_plan_fills_places_in_their_order_and_leaves_margins(capsys: Any) -> None:
    code, text = run(capsys, "--places", "cpu#a=9MiB,cpu#b=9MiB", "--tokens", "16", "--new-tokens", "16")
    assert code == 0
    a, b = (next(line for line in text.splitlines() if f"cpu#{x}" in line) for x in "ab")
    assert "█" in a
    assert "█" in b
    free = [float(line.split("│")[5].split()[0]) for line in text.splitlines() if "MiB" in line]
    assert min(free) >= 0.9


def test_plan_works_from_a_config_alone(tmp_path: Path, capsys: Any) -> None:
    config = json.loads((Path(MODEL_DIR) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--places", "cuda:0=1GiB,cuda:1=1GiB"]) == 0  # no GPU is needed for that
    capsys.readouterr()
    assert main(["plan", str(tmp_path), "--places", "cuda:99"]) == 2  # what is free there is not known
    assert "place cuda:99: " in capsys.readouterr().err
    assert main(["plan", str(tmp_path), "--places", "cuda:0=1GiB,cuda:1=1GiB"]) == 0
    assert "cuda:1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--places", "cpu#a=1MiB"], "give larger places"),
        (["--places", "cpu#a=64MiB,cpu#a=64MiB"], "names a place twice"),
        (["--places", "cpu#a=64MiB", "--batch", "0"], "--batch 0 must be at least 1"),
        (["--places", "cpu#a=64MiB", "--margin", "1"], "--margin 1.0 must be"),
        (["--places", "disk"], "is not a place"),
        (["--places", "cpu#a=64GiB", "--tokens", "99999"], "are 100127 together; "),
    ],
)
def test_plan_says_what_is_wrong(arguments: list[str], words: str, capsys: Any) -> None:
    code, text = run(capsys, *arguments)
    assert code == 2
    assert words in text


def test_plan_counts_the_cache_of_each_layer() -> None:
    """A Falcon's few heads are repeated before they are kept; a layer of Gemma 4 has keys of its own size."""
    for name, elements in (("falcon", (64, 64, 64)), ("gemma4", (32, 32, 64)), ("deepseek-v3", (16, 16, 16))):
        model = build(name)
        assert sizes_of(find_decoder(model), model).kv_token == tuple(4 * count for count in elements)


def test_plan_counts_the_experts_that_tokens_meet() -> None:
    """Of four, a token is sent to two: a step computes with half of the experts, and reads those that any one chose."""
    model = build("qwen3-moe")
    sizes, places = sizes_of(find_decoder(model), model), [Place.parse("cpu=1GiB")]
    routed = sum(p.nbytes for p in model.model.layers[0].parameters() if p.ndim == 3)
    assert sizes.experts.chosen == 0.5
    assert sizes.experts.of_weights == pytest.approx(routed / sizes.layers[0])
    assert sizes_of(find_decoder(build("llama-gqa")), build("llama-gqa")).experts.met(1) == 1

    memory, flops = ASSUMED["cpu"].memory, ASSUMED["cpu"].flops
    arguments = places, sizes.layers[0], sizes.parameters, sizes.experts
    for fewest, most in ((1, 1), (1, 8), (128, 1024)):
        layer = assume(*arguments, (fewest, most)).layers["cpu"]
        for tokens in (fewest, most):
            nbytes = sizes.layers[0] - routed * 0.5**tokens
            operations = 2 * tokens * (sizes.parameters - routed / 4 * 0.5)
            assert layer(tokens) == pytest.approx(nbytes / memory + operations / flops)


def test_plan_measures_if_asked(capsys: Any) -> None:
    code, text = run(capsys, "--places", "cpu#a=64MiB,cpu#b=48MiB", "--measure", "--batch", "4")
    assert code == 0
    assert "speeds are measured here" in text


def test_plan_measures_a_model_without_a_tokenizer(capsys: Any, tmp_path: Path) -> None:
    build("llama-gqa").save_pretrained(tmp_path)
    options = ("--measure", "--batch", "2", "--tokens", "8", "--new-tokens", "4")
    code, text = run(capsys, str(tmp_path), "--places", "cpu#a=64MiB,cpu#b=48MiB", *options)
    assert code == 0, text


def test_two_models_lend_each_other_places(capsys: Any) -> None:
    """Each begins at a place of its own, and has replicas at the other's; no place is filled beyond its margin."""
    places = ("--places", "cpu#a=40MiB,cpu#b=40MiB", "--tokens", "64", "--new-tokens", "64")
    code, text = run(capsys, str(MODEL_DIR), *places)
    assert code == 0
    a = [line for line in text.splitlines() if "cpu#a" in line and "│" in line]
    b = [line for line in text.splitlines() if "cpu#b" in line and "│" in line]
    assert ["█" in line for line in a[:2]] == [True, False]
    assert ["█" in line for line in b[:2]] == [False, True]
    assert "▒" in a[1]
    assert "▒" in b[0]
    free = [float(line.split("│")[5].split()[0]) for line in text.splitlines() if "MiB" in line]
    assert len(free) == 2
    assert min(free) >= 0.1 * 40
    speeds = [float(line.split("│")[4]) for line in text.splitlines() if "all" in line and "│" in line]
    assert len(speeds) == 2
    assert min(speeds) > 1.05
