"""What `elastic.profile` makes of the text that it is given, and what it refuses before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic import ConfigError, Profile
from support.architectures import build, prompt

IDS = prompt(2, 12, seed=5)["input_ids"]


def letters(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
    """A tokenizer of one token a letter."""
    return {"input_ids": [ord(letter) % 90 for letter in text]}


@pytest.mark.parametrize(
    ("calibration", "options", "words"),
    [
        (b"abc", {}, "calibration=b'abc' cannot be; it must be one, such as 'a text', or a list of them"),
        (None, {}, "calibration=None cannot be"),
        ({"a": "text"}, {}, "calibration={'a': 'text'} cannot be"),
        (["text", None], {}, "calibration=None cannot be; it must be text, or token ids as a tensor"),
        ([[1, 2], [3, 4]], {}, r"calibration=\[1, 2\] cannot be"),
        (IDS > 3, {}, "calibration is a tensor of torch.bool"),
        (IDS.to(torch.complex64), {}, "calibration is a tensor of torch.complex64"),
        ("text", {"tokenizer": 5}, "give a tokenizer too"),
        ("text", {"tokens": 1.5}, "tokens=1.5 cannot be; it must be a whole number, at least 1"),
        (IDS, {"batch": "2"}, "batch='2' cannot be; it must be a whole number, at least 1"),
        (IDS, {"alpha1": "1"}, "alpha1='1' cannot be; it must be a number, at least 0"),
        (IDS, {"lazy": None}, "lazy=None cannot be; it must be True or False"),
        (IDS, {"variant": None}, "variant=None is not known"),
        (IDS, {"path": 5}, "path=5 cannot be; it must be a path"),
        (IDS, {"path": ""}, "path='' cannot be; it must be a path"),
        (IDS, {"progress": 5}, "progress=5 cannot be; it must be a function"),
    ],
)
def test_what_cannot_be_is_refused_in_words(calibration: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        elastic.profile(build("llama-gqa"), calibration, **{"tokenizer": letters, **options})


def test_a_directory_that_is_not_there_is_refused_before_the_search(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        raise AssertionError("a candidate was tried")

    with pytest.raises(ConfigError, match=r"x\.json: there is no such directory"):
        elastic.profile(build("llama-gqa"), IDS, path=tmp_path / "no" / "x.json", progress=progress)


@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_sequences_are_no_longer_than_the_model_was_made_for(architecture: str) -> None:
    """These have an embedding of each position."""
    model = build(architecture)
    most = model.config.max_position_embeddings
    with pytest.raises(ConfigError, match=f"sequences of {most + 1} tokens; the model was made for {most} at the most"):
        elastic.profile(model, torch.ones(1, most + 1, dtype=torch.long))
    calibrated = elastic.Variant("int4", calibration=torch.ones(1, most + 1, dtype=torch.long))
    with pytest.raises(ConfigError, match=f"the model was made for {most}"):
        elastic.wrap(model, variants=calibrated)
    model.config.max_position_embeddings = 16
    profile = elastic.profile(model, "a text of more letters than that", tokenizer=letters, tokens=32)
    assert (profile.setting.sequences, profile.setting.tokens) == (2, 16)


def test_a_score_that_no_float_can_be_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    elastic.profile(build("llama-gqa"), IDS, path=path)
    score = path.read_text().split('"lts": [')[1].split(",")[0].strip()
    path.write_text(path.read_text().replace(score, "1" + "0" * 400, 1))
    with pytest.raises(ConfigError, match="no profile, or a damaged one"):
        Profile.load(path)
