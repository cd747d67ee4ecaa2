"""`elastic profile`: from a model and a text to an order, a file and a picture."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from elastic import Profile
from elastic.assets import MODEL_DIR
from elastic.cli.main import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(MODEL_DIR, path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text(Path(__file__).read_text())
    return path


def test_the_order_is_shown_and_saved_beside_the_checkpoint(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["profile", str(model), "--calibration", str(text), str(text), "--tokens", "24", "--lazy"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    saved = Profile.load(model / "elastic-profile-int4.json")
    assert saved.complete
    assert saved.setting.tokens == 24
    assert f"order, the first to swap first: {' '.join(map(str, saved.order))}" in shown
    assert str(model / "elastic-profile-int4.json") in shown
    assert main(arguments) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["int3", pytest.param("2:4", marks=pytest.mark.long)])
def test_a_picture_is_drawn(variant: str, model: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, out = tmp_path / "out.png", tmp_path / "profile.json"
    options = ["--variant", variant, "--tokens", "16", "--out", str(out), "--plot", str(picture)]
    assert main(["profile", str(model), "--calibration", str(text), "--held-out", str(text), *options]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert Profile.load(out).setting.variant == variant


def test_a_pruned_variant_has_a_file_without_a_colon(model: Path, text: Path) -> None:
    arguments = ["--variant", "2:4", "--tokens", "8", "--lazy"]
    assert main(["profile", str(model), "--calibration", str(text), *arguments]) == 0
    assert Profile.load(model / "elastic-profile-2of4.json").setting.config["type"] == "SemiStructured"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--calibration", "/nowhere"], "--calibration /nowhere cannot be read: No such file"),
        (["--held-out", "/nowhere"], "--held-out /nowhere cannot be read"),
        (["--held-out", __file__], "--held-out is text for the losses of the plot; give --plot FILE"),
        (["--variant", "int5"], "variant='int5' is not known"),
        (["--beta", "-1"], "beta=-1.0 cannot be; it must be a number, at least 0"),
        (["--tokens", "0"], "tokens=0 cannot be; it must be a whole number, at least 1"),
        (["--beta", "1e308", "--alpha1", "1e308"], "alpha1 + alpha2 + beta=inf cannot be"),
        (["--device", "tpu"], "'tpu' is not a place"),
        (["--device", "cpu=1GiB"], "--device cpu=1GiB says a size, which a profile does not keep to"),
        (["--out", "/nowhere/x.json", "--tokens", "8"], "--out /nowhere/x.json: there is no such directory"),
    ],
)
def test_what_the_caller_must_change(
    arguments: list[str], line: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(MODEL_DIR), "--calibration", str(text), *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.startswith("elastic profile: ")
    assert error.count("\n") == 1


def test_a_model_that_is_not_there_and_a_missing_extra(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["profile", "/nowhere", "--calibration", str(text)]) == 2
    assert "MODEL /nowhere: no model there" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["profile", str(MODEL_DIR), "--calibration", str(text), "--plot", "x.png"]) == 2
    assert "pip install 'elastic-llm[plot]'" in capsys.readouterr().err
