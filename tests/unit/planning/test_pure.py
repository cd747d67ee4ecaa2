"""Planners of arrangements, pipelines and cuts are for simulators too: they need nothing but the standard library."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import elastic

ROOT = Path(elastic.__file__).parent
ROOMS = ("arrangement", "deployment", "estimate", "pipeline", "sharding")
FILES = [path for room in ROOMS for path in sorted((ROOT / "planning" / room).glob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_nothing_but_the_standard_library_and_planning_is_imported(path: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    own = ("elastic.errors", "elastic.planning.")
    assert [n for n in sorted(names) if not n.startswith(own) and n.split(".")[0] not in sys.stdlib_module_names] == []


def test_all_files_are_looked_at() -> None:
    assert len(FILES) >= 10
