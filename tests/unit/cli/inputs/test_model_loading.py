"""Model directories that are damaged or incomplete: each is one clear line, none is served with weights made up."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import elastic
from elastic.assets import MODEL_DIR
from elastic.cli.main import main
from elastic.errors import ConfigError
from elastic.model_files import load_model
from support.architectures import build

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory of our own to damage."""
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))


def said_of(directory: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load_model(str(directory), torch.device("cpu"), option="MODEL")
    assert str(error.value).startswith(f"MODEL {directory}")
    assert "\n" not in str(error.value)
    return str(error.value)


def configure(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def keep(directory: Path, wanted: Callable[[str], bool], file: str = WEIGHTS) -> None:
    kept = {name: w for name, w in load_file(MODEL_DIR / WEIGHTS).items() if wanted(name)}
    save_file(kept, directory / file, metadata={"format": "pt"})


def index(directory: Path, content: Any) -> None:
    (directory / WEIGHTS).unlink()
    (directory / INDEX).write_text(json.dumps(content))


def test_a_whole_model_is_loaded_though_its_tied_head_is_in_no_file() -> None:
    assert "lm_head.weight" not in load_file(MODEL_DIR / WEIGHTS)
    model, tokenizer = load_model(str(MODEL_DIR), torch.device("cpu"), option="MODEL")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert tokenizer("x")["input_ids"]


def test_a_checkpoint_without_half_of_its_layers_is_refused_and_names_what_it_lacks(directory: Path) -> None:
    keep(directory, lambda name: not any(f"layers.{i}." in name for i in range(6)))
    said = said_of(directory)
    assert "lack 54 of the model's 111 weights (model.layers.0.input_layernorm.weight, " in said
    assert "copy the checkpoint again" in said


def test_a_checkpoint_under_other_names_is_refused(directory: Path) -> None:
    weights = {f"wrapped.{name}": w for name, w in load_file(MODEL_DIR / WEIGHTS).items()}
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    assert "lack 111 of the model's 111 weights" in said_of(directory)


def test_weights_that_are_not_used_are_said(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    configure(directory, num_hidden_layers=3)
    with caplog.at_level(logging.WARNING):
        load_model(str(directory), torch.device("cpu"), option="MODEL")
    assert "81 weights of its files are not used (model.layers.10.input_layernorm.weight, " in caplog.text


@pytest.mark.parametrize("size", [0, 7, 500_000])
def test_weights_that_were_cut_off_are_refused_by_the_name_of_their_file(directory: Path, size: int) -> None:
    os.truncate(directory / WEIGHTS, size)
    assert f"{WEIGHTS} is no whole safetensors file" in said_of(directory)


def test_a_pointer_in_the_place_of_the_weights_is_refused(directory: Path) -> None:
    (directory / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\nsize 1234\n")
    assert "is no whole safetensors file" in said_of(directory)


def test_shards_that_are_absent_are_named(directory: Path) -> None:
    names = list(load_file(MODEL_DIR / WEIGHTS))
    index(directory, {"metadata": {}, "weight_map": {n: f"part-{i % 3}.safetensors" for i, n in enumerate(names)}})
    keep(directory, lambda name: names.index(name) % 3 == 0, "part-0.safetensors")
    said = said_of(directory)
    assert "2 of its 3 weight files are not there (part-1.safetensors, part-2.safetensors)" in said


def test_a_shard_of_a_name_that_no_file_has(directory: Path) -> None:
    index(directory, {"metadata": {}, "weight_map": {"lm_head.weight": 999 * "x"}})
    assert "1 of its 1 weight files are not there (xxx" in said_of(directory)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": [1]}, {"weight_map": {"x": 3}}])
def test_an_index_that_is_none(directory: Path, content: Any) -> None:
    index(directory, content)
    assert INDEX in said_of(directory)


def test_a_directory_without_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    assert "no file named model.safetensors" in said_of(directory)


def test_a_pickle_that_is_none_is_refused_without_advice_to_run_it(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    said = said_of(directory)
    assert "Weights only load failed" in said
    assert "Re-running" not in said


def test_an_empty_directory(tmp_path: Path) -> None:
    assert "no model there" in said_of(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "both"])
@pytest.mark.parametrize("content", ["", "[]", None])
def test_a_tokenizer_that_is_damaged_or_not_there(directory: Path, name: str, content: str | None) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json") if name == "both" else (name,):
        (directory / file).unlink()
        if content is not None:
            (directory / file).write_text(content)
    if (name, content) == ("tokenizer_config.json", None):
        load_model(str(directory), torch.device("cpu"), option="MODEL")  # it can do without
    else:
        assert "tokenizer" in said_of(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"[]", b"null", b'"text"', b"3", b"", b'{"a": ', b"\xff\xfe\x00{", b"[" * 100_000])
def test_a_configuration_that_is_no_json_object(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    said = said_of(directory)
    assert f"{name} is no JSON" in said or f"{name} must be a JSON object" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float99"}, "float99"),
        ({"model_type": "martian"}, "`martian`"),
        ({"model_type": ""}, "cannot be loaded"),
        ({"model_type": "t5"}, "T5Config"),
        ({"hidden_act": "zoom"}, "KeyError: 'zoom'"),
        ({"hidden_size": 120}, "weights have another shape in its files (model.embed_tokens.weight: [2048, 128], not"),
        ({"vocab_size": 7}, "1 of the model's 111 weights have another shape in its files"),
        ({"num_hidden_layers": 30}, "lack 162 of the model's 273 weights"),
        ({"num_hidden_layers": "many"}, "cannot be loaded"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"num_attention_heads": 7}, "cannot be loaded"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"model_type": "martian", "auto_map": {"AutoConfig": "a.B"}}, "contains custom code"),
    ],
)
def test_a_configuration_that_cannot_be(directory: Path, changes: dict[str, Any], words: str) -> None:
    configure(directory, **changes)
    assert words in said_of(directory)


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_layers_cannot_be_made_elastic(
    directory: Path, layers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(directory, num_hidden_layers=layers)
    assert main(["generate", "--model", str(directory), "--prompt", "x", "--place", "cpu=64MiB"]) == 2
    assert f"looked for a ModuleList of {layers} layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "x", "--model", "{}"],
        ["demo", "--model", "{}"],
        ["serve", "{}"],
        ["profile", "{}", "--calibration", __file__],
        ["plan", "{}", "--places", "cpu#a=1GiB"],
        ["bench", "run", "--model", "{}", "--poisson", "5"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_says_in_one_line_what_is_wrong_with_a_model(
    command: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "config.json").write_text("[]")
    assert main([part.format(directory) for part in command]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"elastic {command[0]}: ")
    assert "config.json must be a JSON object" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_what_a_profile_is_written_to_is_checked_before_it_is_made(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["profile", "/nowhere", "--calibration", __file__, option]
    long = "x" * 300 + "/x"
    for path, words in (
        ("", "is no file to write to"),
        (str(tmp_path), "is no file"),
        ("/no/x", "no such directory"),
        (long, "no such directory"),
    ):
        assert main([*asked, path]) == 2
        assert words in capsys.readouterr().err
    with monkeypatch.context() as patch:  # what runs this may be allowed everything
        patch.setattr(os, "access", lambda path, mode: False)
        assert main([*asked, str(tmp_path / "x")]) == 2
    assert "cannot be written: Permission denied" in capsys.readouterr().err


def test_a_name_that_no_file_can_have_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["profile", "x" * 300, "--calibration", __file__], ["plan", "x" * 300, "--places", "cpu=1GiB"]):
        assert main(command) == 2
        assert "no model there" in capsys.readouterr().err
    for checkpoint, what in (("x" * 300, "no safetensors file"), ("x\0", "it must be a path")):
        with pytest.raises(ConfigError, match=what):
            elastic.wrap(build("llama-gqa"), checkpoint=checkpoint)


def test_a_prompt_and_a_seed_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "--prompt", "x"], ["demo"]):
        for more, words in (
            (["--prompt", os.fsdecode(b"good \xff")], "--prompt 'good \\udcff' is not UTF-8 text from character 6 on"),
            (["--seed", "99999999999999999999999"], "--seed 99999999999999999999999 is out of range; use -9223"),
            (["--seed", str(-(2**63) - 1)], "is out of range"),
        ):
            assert main([*command, *more]) == 2
            assert words in capsys.readouterr().err
