"""What is left of a benchmark that does not come to its end: the others of a suite cost a machine's time, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import run_all

SCRIPT = """
import sys
from pathlib import Path
Path(sys.argv[sys.argv.index("--keep") + 1]).write_text('{"first": 1}')
print("first taken", flush=True)
"""


def cut_off(command: list[str], timeout: float, **_: object) -> None:
    """Be `subprocess.run` for a limit that comes when the first figure was taken."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.kill()
    raise subprocess.TimeoutExpired(command, timeout, output=said)


@pytest.mark.parametrize("end", ["fails", "is cut off"])
def test_figures_that_were_taken_are_kept(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reshard.py").write_text(SCRIPT + ("sys.exit(3)" if end == "fails" else "input()"))
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    if end == "is cut off":
        monkeypatch.setattr(run_all.subprocess, "run", cut_off)
    why = {"fails": "exit code 3", "is cut off": "cut off after 20 s"}[end]
    assert run_all.run("reshard", [], 20) == {"failed": why, "said": ["first taken"], "figures": {"first": 1}}


def test_a_benchmark_that_ends_leaves_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pages.py").write_text("""print('a table'); print('{"benchmark": "pages", "most": 2}')""")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    assert run_all.run("pages", [], None) == {"benchmark": "pages", "most": 2}


@pytest.mark.parametrize("name", sorted({*run_all.BENCHMARKS, *run_all.GPU}))
def test_those_with_the_option_are_run_with_it(name: str) -> None:
    script = Path(run_all.__file__).with_name(f"{name}.py").read_text()
    assert ("KEEP" in script) == (name in run_all.KEEPING)


@pytest.mark.long
@pytest.mark.parametrize("name", run_all.BENCHMARKS)
def test_a_benchmark_runs_to_its_end(name: str) -> None:
    """What benchmarks call of Elastic is still there, as they call it."""
    result = run_all.run(name, ["--quick", "--rounds", "1"], 1800)
    assert "failed" not in result, result
