"""Figures of a benchmark that is interrupted: what was taken is not taken again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import common
from common import Kept


def no_more() -> None:
    raise AssertionError("taken again")


def test_another_run_has_the_figures_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert Kept(path).take("gaps", lambda: {"p50": (1.0, 2.0)}) == {"p50": [1.0, 2.0]}
    assert Kept(path).take("gaps", no_more) == {"p50": [1.0, 2.0]}
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_is_taken_again_and_the_rest_is_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "figures.json")
    kept.take("first", lambda: 1)
    with pytest.raises(ZeroDivisionError):
        kept.take("second", lambda: 1 // 0)
    again = Kept(tmp_path / "figures.json")
    assert (again.take("first", no_more), again.take("second", lambda: 2)) == (1, 2)


def test_without_a_file_figures_last_as_long_as_the_run() -> None:
    kept = Kept(None)
    assert (kept.take("gaps", lambda: 1), kept.take("gaps", no_more), Kept(None).take("gaps", lambda: 2)) == (1, 1, 2)


@pytest.mark.parametrize("part", ["machine", "code"])
def test_figures_of_other_code_or_another_machine_are_not_gone_on_with(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures.json"
    Kept(path).take("gaps", lambda: 1.0)
    other = {**common.taken_by(), part: "another"}
    monkeypatch.setattr(common, "taken_by", lambda: other)
    with pytest.raises(SystemExit, match=r"figures.json is of .*another.*; remove it to begin anew"):
        Kept(path)
