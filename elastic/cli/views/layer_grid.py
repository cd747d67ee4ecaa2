"""A grid of layers by places, with the spans of layers that each place has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastic.cli.views.sizes import ranges
from elastic.types import DROPPED, HOST, Status

OWN, REPLICA, PART, NOTHING = ("█", "blue"), ("▒", "green"), ("▖", "yellow"), ("·", "dim")


def of_status(status: Status) -> tuple[list[str], list[tuple[str, ...]], dict[int, set[str]]]:
    """Return the places, those of each layer with its home first, and those that have only modules of a layer."""
    by_layer = list(status.residencies.values())
    names = [place.name for place in status.places]
    away = {r.place for residencies in by_layer for r in residencies} & {HOST, DROPPED}
    names += sorted(away, reverse=True)
    layers = [tuple(dict.fromkeys(r.place for r in residencies if not r.part)) for residencies in by_layer]
    modules = {i: {r.place for r in residencies if r.part} for i, residencies in enumerate(by_layer)}
    return names, layers, modules


def layers_at(
    places: Sequence[str], layers: Sequence[tuple[str, ...]], modules: Mapping[int, set[str]] | None = None
) -> Panel:
    """Draw one line for each place, and a legend."""
    table = Table.grid(padding=(0, 1))
    for place in places:
        cells = Text()
        for index, homes in enumerate(layers):
            if place in homes:
                cells.append(*(OWN if place == homes[0] else REPLICA))
            else:
                cells.append(*(PART if place in (modules or {}).get(index, ()) else NOTHING))
        held = [index for index, homes in enumerate(layers) if place in homes]
        table.add_row(Text(place), cells, Text(ranges(held)))
    legend = Text.assemble(OWN, " own   ", REPLICA, " replica   ", PART, " modules of it")
    return Panel(Group(table, legend), title=f"{len(layers)} layers at {len(places)} places")
