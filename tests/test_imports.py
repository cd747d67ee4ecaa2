"""Imports point down (docs/design.md), and importing Elastic costs little and touches nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import elastic

ROOT = Path(elastic.__file__).parent
LEAVES = {"types", "errors", "config"}
MIDDLE = {"hooks", "kvcache", "quant", "controller"}
TOP = {
    "acting",
    "assembly",
    "calibration",
    "options",
    "wrap",
    "control",
    "migration",
    "replication",
    "runtime",
    "worker",
}
BELOW = {
    **dict.fromkeys(LEAVES, LEAVES),
    "memory": LEAVES | {"memory"},
    "weights": LEAVES | {"memory"},
    "assets": set(),
    "batch": set(),
    **{room: LEAVES | {"memory", "weights", "batch", room} for room in MIDDLE},
    "results": LEAVES,
    "profiling": LEAVES | {"hooks", "quant", "runtime"},
    **dict.fromkeys(TOP, LEAVES | MIDDLE | TOP | {"memory", "weights", "results"}),
    "engines": LEAVES | MIDDLE | TOP | {"memory", "engines"},
    "bench": LEAVES | {"controller", "engines", "runtime", "bench"},
    "server": LEAVES | {"controller", "engines", "runtime", "server"},
}


def imported_rooms(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("elastic."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("elastic."))
    return names


def test_imports_point_down() -> None:
    checked = 0
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if room in BELOW:
            assert imported_rooms(file) <= BELOW[room], f"{file.relative_to(ROOT)} imports upwards or sideways"
            checked += 1
    assert checked > 15


def test_the_public_names_are_these() -> None:
    assert sorted(elastic.__all__) == elastic.__all__
    assert all(getattr(elastic, name) is not None for name in elastic.__all__)
    assert callable(elastic.wrap)
    assert callable(elastic.runtime)


def test_importing_elastic_imports_no_transformers_and_starts_nothing() -> None:
    code = """
        import sys, threading
        import torch
        before = set(sys.modules)
        import elastic
        added = set(sys.modules) - before
        heavy = {"transformers", "pynvml", "cuda", "accelerate", "rich", "torch._dynamo"} & added
        print(sorted(heavy), threading.active_count(), torch.cuda.is_initialized())
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    child = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["[]", "1", "False"]


def test_functions_and_files_stay_short() -> None:
    for file in ROOT.rglob("*.py"):
        source = file.read_text()
        assert source.count("\n") <= 400, file
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, f"{file}: {node.name}"
