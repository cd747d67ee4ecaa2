"""How files are replaced: in one step, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.directories import replacing


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
