"""A grid of ranks by layers: who computes what of the instances whose layers other ranks compute; and what it costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastic.cli.views.panels import tabulated
from elastic.cli.views.sizes import mib, ranges
from elastic.cli.views.status_document import StatusDocument
from elastic.cluster.control.status import UP

IDLE, DROPPED = ("-", "dim"), ("·", "dim")
OWN, OTHERS = "blue", "green"
MOST = 9
SHARED = "+"
"""Between the names of ranks that share a layer."""
REPLICA = "|"
"""Between those that have copies of it."""
WHOLE = "whole"


def stages(document: StatusDocument) -> Panel | None:
    """Draw a line for each rank, a cell for each layer; None: every instance computes its layers by itself."""
    paths = {instance.name: instance.path for instance in document.instances if instance.path}
    ranks = [rank for rank in document.ranks if rank.state in UP]
    alone = all(len(set(path)) == 1 and SHARED not in path[0] and REPLICA not in path[0] for path in paths.values())
    if alone and not any(rank.dropped for rank in ranks):
        return None
    leaders = {each.leader or next(iter(each.ranks), ""): each.name for each in document.instances}
    residencies = {rank.name: rank.status.residencies.values() if rank.status else () for rank in ranks}
    parts = {
        name: [own[0].shard if own and own[0].shard != WHOLE else "" for own in layers]
        for name, layers in residencies.items()
    }
    return grid(paths, {rank.name: rank.dropped for rank in ranks}, leaders, parts)


def work(document: StatusDocument) -> Table | None:
    """Tabulate what ranks did with their time, and what went between them; None: they compute nothing together."""
    timed = [rank for rank in document.ranks if rank.times is not None and (rank.wires or rank.times.waiting_s)]
    if not timed:
        return None
    seconds, wires_of = (
        ("busy s", "bubbles s", "of both", "steps waited s"),
        ("hidden states to, from", "bytes read of"),
    )
    table = tabulated(["rank"], seconds, wires_of, title="computing together", expand=True)
    for rank in timed:
        times, wires = rank.times, rank.wires or ()
        read = {wire.rank: wire.read_bytes + wire.copied_bytes for wire in wires}
        assert times is not None
        both_s = times.busy_s + times.bubble_s
        table.add_row(
            Text(rank.name),
            f"{times.busy_s:,.1f}",
            f"{times.bubble_s:,.1f}",
            f"{times.bubble_s / both_s:.1%}" if both_s > 0 else "-",
            f"{times.waiting_s:,.1f}",
            Text(", ".join(f"{wire.rank} {mib(wire.sent_bytes)}, {mib(wire.received_bytes)}" for wire in wires)),
            Text(", ".join(f"{rank} {mib(nbytes)}" for rank, nbytes in read.items() if nbytes)),
        )
    return table


def grid(
    paths: Mapping[str, Sequence[str]],
    dropped: Mapping[str, Collection[int]],
    leaders: Mapping[str, str],
    parts: Mapping[str, Sequence[str]] | None = None,
) -> Panel:
    """Draw ranks by layers.

    `paths` has for each instance the rank of each layer, or those that share it; `dropped` for each rank the layers
    whose weights it has not, `leaders` for each rank the instance that it is the home of; `parts` for each rank what it
    has of each layer, as `0,1/4`, and empty for a whole one.
    """
    count = max(map(len, paths.values()), default=0)
    at = {name: [set(ranks.replace(REPLICA, SHARED).split(SHARED)) for ranks in path] for name, path in paths.items()}
    table = Table.grid(padding=(0, 1))
    for rank, away in dropped.items():
        by_layer = [
            [name for name, layers in at.items() if layer < len(layers) and rank in layers[layer]]
            for layer in range(count)
        ]
        has = dict(enumerate((parts or {}).get(rank, ())))
        shared = [
            _words_of_layer([paths[name][i] for name in these], has.get(i, "")) for i, these in enumerate(by_layer)
        ]
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


def _words_of_layer(ranks: Sequence[str], parts: str) -> str:
    """Return the words before a layer that a rank has, which is at these ranks of each path: a copy of it, parts."""
    copied = "copies of " if any(REPLICA in names for names in ranks) else ""
    if not any(SHARED in names for names in ranks):
        return copied
    return f"{copied}parts {parts} of " if parts else f"{copied}parts of "


def _words(by_layer: Sequence[Sequence[str]], shared: Sequence[str], dropped: Collection[int]) -> str:
    """Return what a rank computes as text: `0-5 of i0, i1`, `parts 0,1/4 of 0-5 of i0` or `copies of 4-7 of i0`.

    `shared` has the words of each layer that come before it.
    """
    layers: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for layer, instances in enumerate(by_layer):
        layers.setdefault((tuple(instances), shared[layer]), []).append(layer)
    told = [
        f"{parts}{ranges(these)} of {', '.join(instances)}" for (instances, parts), these in layers.items() if instances
    ]
    if dropped:
        told.append(f"dropped {ranges(sorted(dropped))}")
    return "; ".join(told)
