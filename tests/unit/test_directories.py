"""How files are replaced: in one step, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic.directories import CACHE, cache_directory, replacing
from elastic.errors import ConfigError, require_path, require_path_or_none
from elastic.memory.checkpoint_file import Checkpoint
from support.architectures import build


def test_a_file_is_replaced_whole_with_the_rights_of_any_other(tmp_path: Path) -> None:
    path, plain = tmp_path / "table", tmp_path / "plain"
    path.write_text("old")
    plain.write_text("")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode == plain.stat().st_mode
    assert sorted(tmp_path.iterdir()) == [plain, path]


def test_where_that_fails_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table"
    path.write_text("old")
    with pytest.raises(OSError, match="no space"), replacing(path) as partial:
        _no_space(partial.write_text("ne"))
    monkeypatch.setattr(os, "replace", _no_space)
    with pytest.raises(OSError, match="no space"), replacing(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _no_space(*_: object) -> None:
    raise OSError("no space")


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CACHE, "~/cache")
    assert cache_directory() == tmp_path / "cache"
    assert require_path("~/x", "path") == require_path(Path("~/x"), "path") == tmp_path / "x"
    assert require_path("./~", "path") == Path("~")
    assert require_path_or_none(None, "path") is None
    with pytest.raises(ConfigError, match=r"path='~nobody-of-this-name/x' cannot be; .* there is no such user"):
        require_path("~nobody-of-this-name/x", "path")


def test_what_a_runtime_and_a_profile_keep_is_in_the_home_that_a_tilde_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    elastic.unwrap(elastic.wrap(build("llama-gqa"), places=["cpu=64MiB"], variants=("int8",), variant_cache="~/packed"))
    profile = elastic.profile(build("llama-gqa"), torch.arange(32).view(2, 16), path="~/profile.json")
    assert elastic.Profile.load("~/profile.json") == profile
    assert (
        {"packed", "profile.json"} <= {path.name for path in tmp_path.iterdir()} <= {"packed", "profile.json", ".cache"}
    )
    assert (tmp_path / "packed" / "elastic-int8.safetensors").is_file()
    build("llama-gqa").save_pretrained(tmp_path / "model")
    assert Checkpoint("~/model").names


@pytest.mark.parametrize("path", [5, None, "", "a\0b"])
def test_a_profile_is_of_a_path(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"path=.* cannot be; it must be a path"):
        elastic.Profile.load(path)
