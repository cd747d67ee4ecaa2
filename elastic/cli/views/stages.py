"""A grid of ranks by layers: who computes what of the instances whose layers other ranks compute."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastic.cli.views.layer_grid import ranges
from elastic.cli.views.status_document import StatusDocument

IDLE, DROPPED = ("-", "dim"), ("·", "dim")
OWN, OTHERS = "blue", "green"
MOST = 9
SHARED = "+"
"""Between the names of ranks that share a layer."""


def stages(document: StatusDocument) -> Panel | None:
    """Draw a line for each rank, a cell for each layer; None: every instance computes its layers by itself."""
    paths = {instance.name: instance.path for instance in document.instances if instance.path}
    ranks = [rank for rank in document.ranks if rank.state in ("serving", "draining")]
    alone = all(len(set(path)) == 1 and SHARED not in path[0] for path in paths.values())
    if alone and not any(rank.dropped for rank in ranks):
        return None
    leaders = {each.leader or next(iter(each.ranks), ""): each.name for each in document.instances}
    return grid(paths, {rank.name: rank.dropped for rank in ranks}, leaders)


def grid(
    paths: Mapping[str, Sequence[str]], dropped: Mapping[str, Collection[int]], leaders: Mapping[str, str]
) -> Panel:
    """Draw ranks by layers.

    `paths` has for each instance the rank of each layer, or those that share it; `dropped` for each rank the layers
    whose weights it has not, `leaders` for each rank the instance that it is the home of.
    """
    count = max(map(len, paths.values()), default=0)
    table = Table.grid(padding=(0, 1))
    for rank, away in dropped.items():
        by_layer = [[name for name, path in paths.items() if rank in _ranks(path, i)] for i in range(count)]
        shared = [any(len(_ranks(paths[name], i)) > 1 for name in these) for i, these in enumerate(by_layer)]
        cells = Text()
        for layer, instances in enumerate(by_layer):
            cells.append(*_cell(instances, leaders.get(rank), layer in away))
        table.add_row(Text(rank), cells, Text(_words(by_layer, shared, away)))
    legend = Text.assemble(
        ("1 2", OWN), " instances computed, its own too   ", ("1 2", OTHERS), " others only   ",
        IDLE, " none   ", DROPPED, " dropped",
    )  # fmt: skip
    return Panel(Group(table, legend), title=f"{count} layers of {len(paths)} instances at {len(dropped)} ranks")


def _cell(instances: Sequence[str], own: str | None, dropped: bool) -> tuple[str, str]:
    """Return the character and the style of a layer at a rank."""
    if not instances:
        return DROPPED if dropped else IDLE
    text = str(len(instances)) if len(instances) <= MOST else "+"
    return text, OWN if own in instances else OTHERS


def _ranks(path: Sequence[str], layer: int) -> list[str]:
    """Return the ranks that compute a layer."""
    return path[layer].split(SHARED) if layer < len(path) else []


def _words(by_layer: Sequence[Sequence[str]], shared: Sequence[bool], dropped: Collection[int]) -> str:
    """Return what a rank computes as text, such as `0-5 of i0, i1` or `parts of 0-5 of i0`."""
    layers: dict[tuple[tuple[str, ...], bool], list[int]] = {}
    for layer, instances in enumerate(by_layer):
        layers.setdefault((tuple(instances), shared[layer]), []).append(layer)
    told = [
        f"{'parts of ' if parts else ''}{ranges(these)} of {', '.join(instances)}"
        for (instances, parts), these in layers.items()
        if instances
    ]
    if dropped:
        told.append(f"dropped {ranges(sorted(dropped))}")
    return "; ".join(told)
