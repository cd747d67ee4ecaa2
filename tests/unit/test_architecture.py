"""The house: rooms on floors, arrows that only go down, no circle, no crowded folder, a class name for each class."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import elastic

ROOT = Path(elastic.__file__).parent
TESTS = Path(__file__).parents[1]
MOST_FILES = 12

FLOORS = (  # from the ground; rooms of one floor do not know each other; "" is `elastic` itself
    ("errors", "types", "assets", "clock", "openmp"),
    ("directories",),
    ("config", "compiler"),
    ("memory", "planning"),
    ("weights", "model_files"),
    ("hooks", "kvcache", "quant", "controller"),
    ("actions",),
    ("runtime",),
    ("wrap", "profiling", "engines"),
    ("estimation",),
    ("cluster",),
    ("",),
    ("server", "bench", "vllm"),
    ("sim",),
    ("cli",),
    ("__main__",),
)
INSIDE = {  # the sub-rooms of a room, from the ground; "" is what lies in the room itself
    "memory": (("backends",), ("pages",), ("pinned",), ("",)),
    "planning": (("",), ("pipeline", "sharding"), ("arrangement", "estimate"), ("deployment",)),
    "weights": (("proxy", "shards"), ("prepacked",), ("",)),
    "hooks": (("",), ("replicas",)),
    "kvcache": (("storage",), ("layers",), ("",)),
    "quant": (("formats",), ("kernels", "checkpoints"), ("pruning",), ("variants",), ("sensitivity",)),
    "controller": (("",), ("sensors",), ("policies",)),
    "actions": (("pages",), ("shards",), ("",), ("transactions",)),
    "engines": (("",), ("sampling", "structured"), ("core",), ("executor",), ("pipeline",), ("continuous", "vllm")),
    "estimation": (("",), ("profiles",)),
    "cluster": (("control",), ("peers",), ("rank",), ("launch",), ("fleet",), ("deployment",), ("",)),
    "server": (("protocol", "tools"), ("fleets",), ("generation",), ("formats",), ("routes",), ("",)),
    "bench": (("traces",), ("replay",), ("report",)),
    "sim": (("core",), ("mechanisms", "placement"), ("",)),
    "cli": (("inputs", "views"), ("acts", "predictions"), ("",)),
}


def modules() -> dict[str, Path]:
    """Every module by its name below `elastic`, a package by that of its folder; `elastic` itself is ""."""
    paths = sorted(ROOT.rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return {name.removesuffix("__init__").removesuffix("."): path for name, path in zip(names, paths, strict=True)}


MODULES = modules()


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements in another, at any depth; in expressions there are no imports and no classes."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, part, ()):
            yield inner
            yield from statements(inner)


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules that statements import: for types only and inside functions too."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "elastic":
            module = node.module.removeprefix("elastic").removeprefix(".")
            for name in node.names:
                inner = f"{module}.{name.name}".removeprefix(".")
                yield inner if inner in MODULES and (module or name.name not in elastic.__all__) else module
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "elastic":
                    yield name.name.removeprefix("elastic").removeprefix(".")


class Source(NamedTuple):
    """What the tests ask of a module's source."""

    words: str | None
    imports: frozenset[str]
    classes: tuple[str, ...]


@functools.cache
def sources() -> dict[str, Source]:
    """Every module's source: read when the first test asks, not by every process that collects tests."""
    return {module: source_of(module, ast.parse(path.read_text())) for module, path in MODULES.items()}


def source_of(module: str, tree: ast.Module) -> Source:
    nodes = list(statements(tree))
    classes = tuple(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return Source(ast.get_docstring(tree), frozenset(imported(nodes)) - {module}, classes)


def place(module: str) -> tuple[str, str]:
    """The room and the sub-room of a module, "" for none."""
    room, *inner = module.split(".")
    sub = inner[0] if inner and (ROOT / room / inner[0]).is_dir() else ""
    return room, sub


def floor(room: str, floors: tuple[tuple[str, ...], ...]) -> int:
    return next(number for number, rooms in enumerate(floors) if room in rooms)


def goes_down(module: str, other: str) -> bool:
    """Whether an arrow between two modules goes to a lower floor, or stays in its room."""
    (room, sub), (other_room, other_sub) = place(module), place(other)
    if room != other_room:
        return floor(other_room, FLOORS) < floor(room, FLOORS)
    if sub != other_sub:
        return floor(other_sub, INSIDE[room]) < floor(sub, INSIDE[room])
    return True


def circle(graph: Mapping[object, set[object]]) -> list[object]:
    """A circle of arrows, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_has_a_floor() -> None:
    rooms = {place(module) for module in MODULES}
    assert {room for room, _ in rooms} == {room for rooms in FLOORS for room in rooms}
    for room, floors in INSIDE.items():
        assert {sub for known, sub in rooms if known == room} - {""} == {sub for subs in floors for sub in subs} - {""}
    assert not {room for room, sub in rooms if sub} - INSIDE.keys()


def test_imports_go_down() -> None:
    up = {
        module: [other for other in sorted(source.imports) if not goes_down(module, other)]
        for module, source in sources().items()
    }
    assert {module: others for module, others in up.items() if others} == {}, "these import upwards or sideways"


def test_no_circle_between_files() -> None:
    assert circle({module: set(source.imports) for module, source in sources().items()}) == []


def test_no_circle_between_rooms() -> None:
    rooms: dict[object, set[object]] = {}
    for module, source in sources().items():
        rooms.setdefault(place(module), set()).update(map(place, source.imports))
    assert circle({room: others - {room} for room, others in rooms.items()}) == []


@pytest.mark.parametrize("root", [ROOT, TESTS], ids=["elastic", "tests"])
def test_no_folder_is_crowded(root: Path) -> None:
    folders = {path.parent for path in root.rglob("*.py")}
    counts = {str(f.relative_to(root)): len({p for p in f.glob("*.py") if p.stem != "__init__"}) for f in folders}
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_every_package_says_what_it_is() -> None:
    packages = {name for name, path in MODULES.items() if path.stem == "__init__"}
    assert {name for name in packages if not sources()[name].words} == set(), "these have no docstring"


def test_no_class_name_stands_twice() -> None:
    defined: dict[str, list[str]] = {}
    for module, source in sources().items():
        for name in source.classes:
            defined.setdefault(name, []).append(module)
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}
