"""Layers by places, as a grid of one cell each, and what runs it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastic.memory.backends.base import runs
from elastic.types import HOST, Status

OWN, REPLICA, PART, NOTHING = ("█", "blue"), ("▒", "green"), ("▖", "yellow"), ("·", "dim")


def of_status(status: Status) -> tuple[list[str], list[tuple[str, ...]], dict[int, set[str]]]:
    """Places, the places of each layer with its own first, and the places that have modules of a layer only."""
    names = [place.name for place in status.places]
    names += [HOST] if any(r.place == HOST for found in status.residencies.values() for r in found) else []
    layers = [tuple(dict.fromkeys(r.place for r in found if not r.part)) for found in status.residencies.values()]
    parts = {i: {r.place for r in found if r.part} for i, found in enumerate(status.residencies.values())}
    return names, layers, parts


def layers_at(
    places: Sequence[str], layers: Sequence[tuple[str, ...]], parts: Mapping[int, set[str]] | None = None
) -> Panel:
    """One line for each place, and what the cells mean."""
    table = Table.grid(padding=(0, 1))
    for place in places:
        cells = Text()
        for index, here in enumerate(layers):
            cells.append(*_cell(place, here, (parts or {}).get(index, set())))
        table.add_row(Text(place), cells, Text(spans(place, layers)))
    legend = Text.assemble(OWN, " own   ", REPLICA, " replica   ", PART, " modules of it")
    return Panel(Group(table, legend), title=f"{len(layers)} layers at {len(places)} places")


def spans(place: str, layers: Sequence[tuple[str, ...]]) -> str:
    """The layers that a place has, such as `0-7, 12`."""
    have = [index for index, here in enumerate(layers) if place in here]
    return ", ".join(str(first) if n == 1 else f"{first}-{first + n - 1}" for first, n in runs(have))


def _cell(place: str, here: Sequence[str], parts: set[str]) -> tuple[str, str]:
    if here[:1] == (place,):
        return OWN
    if place in here:
        return REPLICA
    return PART if place in parts else NOTHING
