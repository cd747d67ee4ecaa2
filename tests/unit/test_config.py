"""SLO and Policy: what is allowed, the modes, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic import SLO, ConfigError, Policy
from elastic.config import MODES, Lengths, Place


def test_the_modes_differ_in_how_much_and_how_early() -> None:
    accuracy, balanced, performance = (Policy.named(mode) for mode in ("accuracy", "balanced", "performance"))
    assert balanced == Policy()
    assert [(p.layers_per_action, p.max_layers) for p in (accuracy, balanced, performance)] == [(1, 4), (2, 8), (4, 16)]
    assert accuracy.kv_high > balanced.kv_high == 0.85 > performance.kv_high
    assert accuracy.queue_high_s > balanced.queue_high_s == 0.1 > performance.queue_high_s
    assert (balanced.pressure_ticks, balanced.recovery_ticks, balanced.ema_alpha) == (3, 5, 0.25)
    assert (balanced.kv_low, balanced.queue_low_s) == (0.65, 0.025)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tick_s", 0),
        ("tick_s", float("nan")),
        ("tick_s", 1e10),
        ("kv_high", 1.5),
        ("kv_high", "0.9"),
        ("kv_low", 0.8),  # above kv_high - margin: it would oscillate
        ("queue_low_s", 0.2),
        ("cooldown_s", -1),
        ("max_layers", 0),
        ("max_layers", 2.0),
        ("max_layers", True),
        ("ema_alpha", 0),
        ("levels", ["int4"]),
        ("levels", ("int4", "int4")),
        ("action_bytes", 0),
    ],
)
def test_a_value_that_cannot_be_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        Policy(**{field: value})


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), 10**400, "2", True])
def test_an_slo_is_seconds_above_0(value: Any) -> None:
    with pytest.raises(ConfigError, match="tpot_s"):
        SLO(tpot_s=value)
    assert SLO() == SLO(None, None, None)
    assert SLO(ttft_s=2).ttft_s == 2


@pytest.mark.parametrize("number", ["128", "300", "9" * 40])
def test_a_device_number_that_torch_would_wrap_around_is_no_place(number: str) -> None:
    """It took cuda:300 for cuda:44."""
    with pytest.raises(ConfigError, match="is not a place"):
        Place.parse(f"cuda:{number}=1GiB")
    assert Place.parse("cuda:127=1GiB").device.index == 127


def test_a_place_has_a_numbered_gpu_and_no_name_of_one() -> None:
    """`cuda` without a number was none of the devices of a model."""
    assert Place("cuda:0", torch.device("cuda"), 1 << 30) == Place.parse("cuda=1GiB")
    device: Any = "cuda:0"
    with pytest.raises(ConfigError, match="device of place mine='cuda:0' cannot be; it must be such as torch"):
        Place("mine", device)


def test_a_policy_comes_from_toml_and_json(tmp_path: Path) -> None:
    toml, jsn = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('mode = "performance"\nkv_low = 0.5\nlevels = ["int8", "int4"]\naction_bytes = "512MiB"\n')
    jsn.write_text(
        json.dumps({"mode": "performance", "kv_low": 0.5, "levels": ["int8", "int4"], "action_bytes": 1 << 29})
    )
    expected = Policy(**{**MODES["performance"], "kv_low": 0.5, "levels": ("int8", "int4"), "action_bytes": 1 << 29})
    assert Policy.from_file(toml) == Policy.from_file(str(jsn)) == expected
    (tmp_path / "empty.toml").write_text("")
    assert Policy.from_file(tmp_path / "empty.toml") == Policy()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "kv_hihg = 0.9", "'kv_hihg' is no field of a policy; the nearest is 'kv_high'"),
        ("a.json", '{"modes": "balanced"}', "'modes' is no field of a policy; the nearest is 'mode'"),
        ("a.toml", 'mode = "fast"', r"a\.toml: policy='fast'.*accuracy, balanced, performance"),
        ("a.json", '{"mode": ["balanced"]}', "policy="),
        ("a.toml", "kv_high = [", "is no TOML"),
        ("a.json", "{", "is no JSON"),
        ("a.json", "[1]", "has a list"),
        ("a.json", '{"max_layers": "many"}', "max_layers='many'"),
        ("a.toml", 'action_bytes = "much"', "action_bytes='much'"),
        ("a.yaml", "", r"\*.toml or \*.json"),
        ("a.toml", None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_in_words(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        Policy.from_file(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": 3}, "step=3 cannot be; it must be a power of two"),
        ({"step": 1}, "step=1"),
        ({"most_ranks": 6}, "most_ranks=6"),
        ({"step": 8}, "at most most_ranks = 4"),
        ({"free_to_shrink": 1.5}, "free_to_shrink=1.5"),
        ({"patience_s": -1}, "patience_s=-1"),
        ({"tick_s": 0}, "tick_s=0"),
        ({"layers_per_step": 0}, "layers_per_step=0 cannot be; it must be a whole number, at least 1"),
        ({"layers_per_step": 1.5}, "layers_per_step=1.5"),
        ({"layers_per_step": True}, "layers_per_step=True"),
    ],
)
def test_lengths_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Lengths(**options)
    assert Lengths(step=4, most_ranks=8, patience_s=0, layers_per_step=1).free_to_shrink == 0.5
