"""Say which branches for CUDA a run of the tests entered: `make branches`.

    python tests/gpu/simulation/branches.py build/branches/seen.json

Reads what `coverage json` wrote of a run with branches. A branch for CUDA hangs on a comparison with "cuda": of an `if`
it is what follows where a device is one of CUDA, of another statement all of it.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]


class Branch(NamedTuple):
    """What hangs on whether a device is one of CUDA."""

    line: int
    text: str
    then: int | None
    """The first line of what an `if` does where its condition is true; None: another statement."""
    on_cuda: bool
    """Whether the condition is true of CUDA."""


def branches(source: str) -> Iterator[Branch]:
    """Find what compares with "cuda" in a file."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        compares = [each for each in _own_expressions(node) if _compares(each)] if isinstance(node, ast.stmt) else []
        if compares:
            then = node.body[0].lineno if isinstance(node, ast.If) else None
            on_cuda = not any(isinstance(op, ast.NotEq) for each in compares for op in each.ops)
            yield Branch(node.lineno, lines[node.lineno - 1].strip(), then, on_cuda)


def _own_expressions(statement: ast.stmt) -> Iterator[Any]:
    """Walk through a statement, and not through those in it."""
    found = list(ast.iter_child_nodes(statement))
    while found:
        node = found.pop()
        if not isinstance(node, ast.stmt):
            yield node
            found += ast.iter_child_nodes(node)


def _compares(node: ast.AST) -> bool:
    parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    return any(isinstance(each, ast.Constant) and each.value == "cuda" for part in parts for each in ast.walk(part))


def entered(branch: Branch, seen: dict[str, Any]) -> bool:
    """Return whether a run entered a branch, by the lines and the ways (from, to) of its file."""
    if branch.then is None:
        return branch.line in seen["executed_lines"]
    return any(line == branch.line and (to == branch.then) is branch.on_cuda for line, to in seen["executed_branches"])


def main() -> None:
    seen: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())["files"]
    total, missed = 0, list[str]()
    for path in sorted((ROOT / "elastic").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for branch in sorted(branches(path.read_text())):
            total += 1
            if name not in seen or not entered(branch, seen[name]):
                missed.append(f"{name}:{branch.line}: not entered: {branch.text}")
    print(*missed, f"{total - len(missed)} of {total} branches for CUDA entered", sep="\n")


if __name__ == "__main__":
    main()
