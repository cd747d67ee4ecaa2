"""Every benchmark can be imported and says how it is used; all that it imports exists."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
OPTIONAL = {"vllm", "cuda.bindings"}
"""Packages that not every machine has."""
WITHOUT_OPTIONS = {
    "bursts",
    "common",
    "deploy_served",
    "drop_alone",
    "estimate_fleets",
    "estimate_memory",
    "estimate_report",
    "estimate_shapes",
    "evaluation_quality",
    "evaluation_report",
    "evaluation_run",
    "evicting",
    "planned_steps",
    "reshard_fleets",
    "reshard_local",
    "reshard_memory",
    "reshard_pages",
    "reshard_real",
    "reshard_schedulers",
    "reshard_setting",
    "reshard_through_host",
    "serving",
    "sim_behaviour",
    "sim_fit",
    "sim_runs",
    "sim_served",
    "sim_shared",
    "sim_stages",
    "tuning",
}


@pytest.fixture(autouse=True)
def script_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What scripts add to the path is gone after each test; the root has `training`."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_imports_only_what_there_is(script: Path) -> None:
    importlib.import_module(script.stem)
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module not in {"__future__", *OPTIONAL}:
            module = importlib.import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.stem not in WITHOUT_OPTIONS], ids=lambda script: script.stem
)
def test_a_benchmark_parses_help(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(script.stem)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    assert "--help" in capsys.readouterr().out
