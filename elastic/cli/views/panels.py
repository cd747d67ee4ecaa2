"""Panels for text, pages by owner, and actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.cli.views.layer_grid import layers_at, of_status
from elastic.cli.views.sizes import mib, ranges
from elastic.types import Event, Evict, KVStatus, PlaceStatus, ResizeKV, Status, Swap

_KINDS = {"migratekv": "migrate KV of"}
_OTHERS = "KV of others"
TEXT_LINES = 12
"""The last lines of the text that are shown."""
_WIDEST = 1 << 12


def _in_words(action: Any) -> str:
    """Describe any action, also of a kind that only its server knows."""
    if isinstance(action, ResizeKV):
        return "KV limit " + ("max" if action.limit_bytes is None else mib(action.limit_bytes))
    layers = ranges(sorted(action.layers))
    kind = getattr(action, "kind", type(action).__name__.lower())
    target = action.variant if isinstance(action, Swap) else getattr(action, "place", "")
    to = f" {'from' if isinstance(action, Evict) else 'to'} {target}" if target else ""
    parts = f" ({', '.join(action.parts)})" if getattr(action, "parts", ()) else ""
    return f"{_KINDS.get(kind, kind)} layer{'s' * (len(action.layers) != 1)} {layers}{parts}{to}"


def plain_console() -> Console:
    """Return a console that shows text as it is: no name is markup, or an emoji.

    A terminal that cannot move its cursor (`TERM=dumb`) is none here: rich would draw nothing there until the end.
    """
    console = Console(markup=False, emoji=False)
    return Console(markup=False, emoji=False, force_terminal=False) if console.is_dumb_terminal else console


def print_whole(table: Table) -> None:
    """Print a table with all of its values, wider than the terminal where these need it."""
    console = plain_console()
    for column in table.columns:
        column.no_wrap = True
    console.width = max(console.width, console.measure(table, options=console.options.update(width=_WIDEST)).maximum)
    console.print(table)


def tabulated(left: Sequence[str], right: Sequence[str] = (), last: Sequence[str] = (), **options: Any) -> Table:
    """Make a table with columns of text, then such of numbers, and the last ones of text again."""
    table = Table(*left, **options)
    for name in (*right, *last):
        table.add_column(name, justify="right" if name in right else "left")
    return table


def screen(text: str, status: Status, events: Sequence[Event]) -> RenderableType:
    """Draw one frame: the text so far, the ledger of each place, the last actions."""
    tail = "\n".join(text.splitlines()[-TEXT_LINES:])
    pages = [pages_by_owner(place, kv) for place, kv in zip(status.places, status.kv, strict=True)]
    grid = [layers_at(*of_status(status))] if len(status.places) > 1 else []
    return Group(Panel(Text(tail), title="text", height=TEXT_LINES + 2), *pages, *grid, actions(events))


def bytes_by_owner(place: PlaceStatus, kv: KVStatus) -> dict[str, int]:
    """Return the bytes of weights, of the kinds of KV, and of free memory; they sum to the budget.

    `kv` is read a moment after `place`, and of one model: the rest of the place's caches belongs to others.
    """
    owners = dict(place.owners)
    caches, staging, retained = (owners.pop(owner, 0) for owner in ("kv", "staging", "retained"))
    used = min(kv.used_bytes, caches)
    idle = min(kv.idle_bytes, caches - used)
    return {
        "weights": sum(owners.values()),
        "staging": staging,
        "KV used": used,
        "KV idle": idle,
        _OTHERS: caches - used - idle,
        "retained": retained,
        "free, from layers": place.idle_bytes,
        "free, created": place.parked_bytes,
        "free, not created": place.free_bytes - place.idle_bytes - place.parked_bytes,
    }


def pages_by_owner(place: PlaceStatus, kv: KVStatus) -> Panel:
    """Draw a bar for each owner, and for free memory."""
    rows = {name: size for name, size in bytes_by_owner(place, kv).items() if size or name != _OTHERS}
    table = Table.grid(padding=(0, 1))
    for name, size in rows.items():
        bar = ProgressBar(total=max(1, place.budget_bytes), completed=size, width=40)
        table.add_row(name, bar, f"{size // place.page_bytes:,} pages", mib(size))
    limit = f"KV limit {mib(kv.limit_bytes)} of {mib(kv.maximum_bytes)}, revision {kv.revision}"
    title = Text(f"{place.name}: {mib(place.budget_bytes)} in pages of {place.page_bytes:,}")
    return Panel(table, title=title, subtitle=limit)


def actions(events: Sequence[Event], *, last: int = 6) -> Table:
    """Tabulate the last events and their costs."""
    table = Table("action", "why", "outcome", "freed", "wait ms", "pause ms", title="actions", expand=True)
    for event in events[-last:]:
        table.add_row(
            Text(_in_words(event.action)),
            Text(event.why),
            Text(event.outcome),
            mib(event.released_bytes),
            f"{event.wait_ms:.3f}",
            f"{event.pause_ms:.3f}",
        )
    return table
