"""How long, cut and connected the code of `elastic/` is: the table by which its structure is judged.

    python benchmarks/code_measures.py            # from the source alone
    python benchmarks/code_measures.py --trips    # besides: what `wrap`, a swap and a decode step pass, as they run
    python benchmarks/code_measures.py --list 5   # besides: the private functions of <= 5 lines with one caller

Lines are those of a definition without its decorators, docstring and all. A private function with one caller is named
once besides its definition, in a call: a module's in its file; a class's in all files of its family of classes, unless
another class of the family has one of its name. A trip counts functions of `elastic/` that are entered, of `wrap` those
that are given the model. An entry is a call of one by anything else: by torch or transformers.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import re
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).parents[1]
ROOT = HERE / "elastic"
SHORT, FEW = 3, 5
FILLERS = {"found", "here", "known", "one"}
"""Names of variables that say nothing of what these hold."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Source:
    """One file."""

    path: str
    tree: ast.Module
    names: Counter[str] = field(default_factory=Counter)
    """How often each name is used: a variable's, or an attribute's."""
    calls: Counter[str] = field(default_factory=Counter)
    """How often it is called."""
    nodes: list[ast.AST] = field(default_factory=list)
    """Of the tree: walked once."""

    def __post_init__(self) -> None:
        self.nodes += ast.walk(self.tree)
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                self.names[name_of(node)] += 1
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                self.calls[name_of(node.func)] += 1


@dataclass
class Class:
    """A class, with what it is derived from."""

    node: ast.ClassDef
    source: Source
    bases: set[str]

    @property
    def methods(self) -> set[str]:
        return {each.name for each in self.node.body if isinstance(each, Function)}

    @property
    def is_protocol(self) -> bool:
        return "Protocol" in self.bases


def name_of(node: ast.expr) -> str:
    """Return the last part of a name."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def lines_of(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def functions_of(source: Source) -> Iterator[Function]:
    return (node for node in source.nodes if isinstance(node, Function))


def families(classes: list[Class]) -> dict[str, list[Class]]:
    """Return for each class those that are derived from one another, directly or not, with itself."""
    family = {each.node.name: {each.node.name} for each in classes}
    for each in classes:
        for base in each.bases & family.keys():
            together = family[each.node.name] | family[base]
            for name in together:
                family[name] = together
    by_name = {each.node.name: each for each in classes}
    return {name: [by_name[other] for other in others] for name, others in family.items()}


def called_once(sources: list[Source], classes: list[Class]) -> list[tuple[str, int, str, int]]:
    """Return (path, line, name, lines) of the private functions with one caller."""
    found = []
    methods: set[Function] = set()
    related = families(classes)
    for each in classes:
        family = related[each.node.name]
        users = {other.source.path: other.source for other in family}.values()
        for method in filter(lambda node: isinstance(node, Function), each.node.body):
            assert isinstance(method, Function)
            methods.add(method)
            alone = sum(method.name in other.methods for other in family) == 1
            if alone and not each.is_protocol and _is_called_once(method, list(users)):
                found.append((each.source.path, method.lineno, method.name, lines_of(method)))
    for source in sources:
        for function in functions_of(source):
            if function not in methods and _is_called_once(function, [source]):
                found.append((source.path, function.lineno, function.name, lines_of(function)))
    return sorted(found)


def _is_called_once(function: Function, sources: list[Source]) -> bool:
    name = function.name
    if not name.startswith("_") or name.startswith("__") or function.decorator_list:
        return False
    return sum(s.names[name] for s in sources) == 1 == sum(s.calls[name] for s in sources)


def kind_of(function: Function, owner: Class | None, shared: Counter[str]) -> str:
    """Say what a short function is there for."""
    if owner is not None and owner.is_protocol:
        return "of a protocol"
    if function.name.startswith("__"):
        return "special method"
    if any("property" in ast.unparse(decorator) for decorator in function.decorator_list):
        return "property"
    if owner is not None and shared[function.name] > 1:
        return "method that other classes have too"
    return "other, private" if function.name.startswith("_") else "other, public"


def is_filler(node: ast.AST) -> bool:
    """Return whether a variable or a parameter gets a name here that says nothing."""
    if isinstance(node, ast.arg):
        return node.arg in FILLERS
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in FILLERS


def states_shapes(function: Function) -> bool:
    """Return whether a docstring has shapes, or says whose has; without one it is that of the contract it fulfils."""
    words = ast.get_docstring(function)
    return words is None or any(sign in words.lower() for sign in ("[", "shape", "elements", "scalar", "see `"))


def has_tensors(function: Function) -> bool:
    arguments = function.args.args + function.args.kwonlyargs
    notes = [each.annotation for each in arguments if each.annotation] + [function.returns or ast.Constant(None)]
    return any(re.search(r"\bTensor\b", ast.unparse(note)) for note in notes)


def measure(listed: int) -> dict[str, Any]:
    """Measure the source."""
    paths = sorted(ROOT.rglob("*.py"))
    sources = [Source(str(path.relative_to(HERE)), ast.parse(path.read_text())) for path in paths]
    nodes = [(node, source) for source in sources for node in source.nodes if isinstance(node, ast.ClassDef)]
    classes = [Class(node, source, {name_of(base) for base in node.bases}) for node, source in nodes]
    shared = Counter(name for each in classes for name in each.methods)
    owners = {method: each for each in classes for method in each.node.body if isinstance(method, Function)}
    functions = [function for source in sources for function in functions_of(source)]
    lines = sorted(map(lines_of, functions))
    kinds = Counter(kind_of(f, owners.get(f), shared) for f in functions if lines_of(f) <= SHORT)
    names = Counter(each.node.name for each in classes)
    once = called_once(sources, classes)
    tensors = [f for f in functions if not f.name.startswith("_") and has_tensors(f)]
    for path, line, name, count in once:
        if count <= listed:
            print(f"{path}:{line} {name} ({count} lines)")
    return {
        "lines of elastic/": sum(path.read_text().count("\n") for path in paths),
        "files, and most in a folder": [len(paths), max(Counter(path.parent for path in paths).values()) - 1],
        "functions": len(lines),
        "their lines: median, p90, most": [statistics.median(lines), lines[len(lines) * 9 // 10], lines[-1]],
        f"of <= {SHORT} lines": f"{sum(kinds.values()) / len(lines):.1%}",
        f"of <= {SHORT} lines, by kind": dict(kinds.most_common()),
        f"private, one caller, <= {FEW} lines": sum(count <= FEW for *_, count in once),
        f"variables named {', '.join(sorted(FILLERS))}": sum(is_filler(n) for s in sources for n in s.nodes),
        "class names that stand twice": sum(count > 1 for count in names.values()),
        "public functions with tensors; that state shapes": [len(tensors), sum(map(states_shapes, tensors))],
    }


@dataclass
class Trip:
    """What was passed, on all threads."""

    functions: set[tuple[str, str, int]] = field(default_factory=set)
    """(path, name, line)."""
    climbs: set[tuple[str, str]] = field(default_factory=set)
    """Calls into a room above: (path, path)."""
    entries: int = 0

    @property
    def files(self) -> set[str]:
        return {path for path, _, _ in self.functions}


def floors() -> dict[str, int]:
    """Return the floor of each room, as the test of the floors has it."""
    tree = ast.parse((HERE / "tests/unit/test_architecture.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and name_of(node.targets[0]) == "FLOORS":
            return {room: floor for floor, rooms in enumerate(ast.literal_eval(node.value)) for room in rooms}
    raise ValueError("tests/unit/test_architecture.py has no FLOORS")


class Recorder:
    """Notes on trips what is called, on all threads that begin after it was made."""

    def __init__(self) -> None:
        self._trip, self._floors, self._open = Trip(), floors(), False
        self._given: object = None
        self._until = ""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def travel(self, call: Callable[[], object], given: object = None, until: str = "") -> Trip:
        """Make a call, and return what it passed: the functions that are given an object, or all; `until` the last.

        Not what the garbage collector would have called in the middle of it.
        """
        gc.collect()
        gc.disable()
        self._trip, self._given, self._until, self._open = Trip(), given, until, True
        try:
            call()
        finally:
            self._open = False
            gc.enable()
        return self._trip

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        path = _place(frame) if self._open and event == "call" and frame.f_code.co_name[0] != "<" else None
        if path is None or not self._is_given(frame):
            return
        self._trip.functions.add((path, frame.f_code.co_qualname, frame.f_code.co_firstlineno))
        self._open = frame.f_code.co_qualname != self._until
        caller = _place(frame.f_back)
        self._trip.entries += caller is None
        if caller is not None and self._floor(path) > self._floor(caller):
            self._trip.climbs.add((caller, path))

    def _is_given(self, frame: FrameType) -> bool:
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return self._given is None or any(frame.f_locals.get(name) is self._given for name in arguments)

    def _floor(self, path: str) -> int:
        return self._floors.get(path.split("/")[0].removesuffix(".py"), len(self._floors))


def _place(frame: FrameType | None) -> str | None:
    """Return the path of a frame below `elastic/`, if it is there."""
    name = "" if frame is None else frame.f_code.co_filename
    return name.removeprefix(f"{ROOT}/") if name.startswith(f"{ROOT}/") else None


def trips() -> dict[str, Any]:
    """Measure what `wrap`, a swap and a decode step pass, of a tiny model on a CPU."""
    import torch
    from common import CACHE, returned_cache
    from transformers import LlamaConfig, LlamaForCausalLM

    import elastic

    torch.set_grad_enabled(False)
    recorder = Recorder()
    result: dict[str, Any] = {}
    entries = {}
    for layers in (2, 4):
        config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4)
        model = LlamaForCausalLM(config).eval()
        elastic.unwrap(elastic.wrap(model))  # imports, and what is made once, are no part of it
        wrapped = recorder.travel(lambda model=model: elastic.wrap(model, variants=["int8"]), given=model)  # type: ignore[misc]
        runtime, ids = model.elastic, torch.tensor([[5, 6, 7]])
        out = model(input_ids=ids, use_cache=True)
        step = {"input_ids": ids[:, :1], CACHE: returned_cache(out), "use_cache": True}
        model(**step)
        steps = [recorder.travel(lambda model=model, step=step: model(**step)) for _ in range(5)]  # type: ignore[misc]
        decoded = min(steps, key=lambda step: len(step.functions))  # one that nothing else of the controller fell into
        entries[layers] = decoded.entries
        swapped = recorder.travel(lambda runtime=runtime: runtime.swap([0], "int8"), until="SwapHandler.commit")  # type: ignore[misc]
        elastic.unwrap(model)
        result = {
            "wrap(model): functions given it, files, calls into a room above": [
                len(wrapped.functions), len(wrapped.files), len(wrapped.climbs),
            ],
            "swap, to the commit: files": len(swapped.files),
            "decode step: files": len(decoded.files),
            "decode step: entries per layer": (entries[layers] - entries[2]) / 2,
        }  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trips", action="store_true", help="run a tiny model, too")
    parser.add_argument("--list", type=int, default=0, metavar="LINES", help="list private functions with one caller")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    figures = {**measure(options.list), **(trips() if options.trips else {})}
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
