"""The frames of `elastic top`: pure functions from a server's status to what rich draws."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.cli.views.fleet import fleet_events, ranks
from elastic.cli.views.layer_grid import layers_at, of_status
from elastic.cli.views.panels import actions, pages_by_owner, tabulated
from elastic.cli.views.sizes import mib
from elastic.cli.views.stages import stages, work
from elastic.cli.views.status_document import StatusDocument
from elastic.controller.loop import ControllerHealth
from elastic.controller.snapshot import MemoryStats, RequestStats
from elastic.types import Status

SPAN_S = 60
HANGS_S = 5.0
SPARKS = 40
EVENTS = 4
LEVELS = "▁▂▃▄▅▆▇█"
CELLS = {
    "int8": ("8", "green"),
    "int4": ("4", "yellow"),
    "int3": ("3", "red"),
    "absent": ("·", "dim"),
    "dropped": (" ", "dim"),
}
PRUNED = (("2:4", "4:8", "sparse", "ffn", "heads"), ("p", "cyan"))
"""What the names of pruned variants begin with, and their cell."""
FULL = ("█", "blue")
MIXED = ("±", "magenta")


@dataclass(frozen=True)
class KVUsageSample:
    """The use of the KV cache at one moment."""

    at_s: float
    use: float
    """The used share of the capacity, from 0 to 1."""


def sample(document: StatusDocument) -> KVUsageSample:
    """Return the use of the KV cache in a status document."""
    told = [document.status] if document.status else [rank.status for rank in document.ranks if rank.status]
    caches = [memory(status) for status in told]
    capacity = sum(kv.capacity_bytes for kv in caches)
    use = sum(kv.used_bytes for kv in caches) / capacity if len(caches) > 1 and capacity else 0.0
    return KVUsageSample(document.at_s, caches[0].use if len(caches) == 1 else use)


def frame(document: StatusDocument, history: Sequence[KVUsageSample], url: str, problem: str = "") -> RenderableType:
    """Draw everything, most important first; a problem stands above the last status that there was."""
    side_by_side = Table.grid(expand=True, padding=(0, 1))
    side_by_side.add_row(requests(document.traffic), latencies(document.traffic))
    panels: list[RenderableType] = [header(document, url, problem), side_by_side]
    status = document.status
    if status is not None:
        panels += [kv_cache(memory(status), history), layers(document.layers)]
        panels += [layers_at(*of_status(status))] if len(status.places) > 1 else []
    if document.ranks:
        together = (stages(document), work(document))
        panels += [ranks(document), *(each for each in together if each is not None)]
    if len(document.ranks) > 1:
        panels += [layers(rank.layers, rank.name) for rank in document.ranks if rank.layers]
    if document.fleet_events:
        panels.append(fleet_events(document.fleet_events, last=EVENTS))
    if len(document.ranks) < 2:
        panels.append(controller(document.controller))
    if status is not None:
        panels.append(actions(document.events, last=EVENTS))
        panels += [pages_by_owner(p, kv) for p, kv in zip(status.places, status.kv, strict=False)]
    return Group(*panels)


def header(document: StatusDocument, url: str, problem: str) -> Text:
    """Draw name, address and time since the start; and a problem."""
    hours, seconds = divmod(max(0, int(document.uptime_s)), 3600)
    up = f"up {hours}:{seconds // 60:02}:{seconds % 60:02}"
    text = Text.assemble((document.model, "bold"), f" at {url}: {document.state}, {up}")
    if not problem:
        return text
    try:
        clock = time.strftime("at %H:%M:%S", time.localtime(document.at_s))
    except (OverflowError, OSError, ValueError):
        clock = "at an unknown time"
    return text.append(f"\n{problem}; this was {clock}", "bold red")


def requests(traffic: RequestStats) -> Panel:
    """Draw the counts of requests by their state."""
    rows = (
        ("running", f"{traffic.running:,}"),
        ("waiting", f"{traffic.waiting:,}, for {milliseconds(traffic.queue_delay_s)} ms"),
        ("tokens/s", f"{traffic.tokens_per_s:,.1f}"),
        ("arrivals/s", f"{traffic.arrivals_per_s:,.2f}"),
        ("completed", f"{traffic.completed:,} of {traffic.arrived:,}"),
        ("cancelled", f"{traffic.cancelled:,}"),
        ("refused", f"{traffic.rejected:,} rejected, {traffic.failed:,} failed"),
        ("held up", f"{traffic.preemptions:,} preempted, {traffic.stalls:,} stalled"),
    )
    table = Table.grid(padding=(0, 1))
    for row in rows:
        table.add_row(*row)
    return Panel(table, title="requests")


def latencies(traffic: RequestStats) -> Panel:
    """Draw quantiles of the last window, in milliseconds."""
    table = tabulated(["ms"], ["P50", "P95", "P99", "count"], box=None, padding=(0, 1, 0, 0))
    rows = {"queued": traffic.queued_s, "TTFT": traffic.ttft_s, "TPOT": traffic.tpot_s, "ITL": traffic.itl_s}
    for name, q in rows.items():
        table.add_row(name, *map(milliseconds, (q.p50, q.p95, q.p99)), f"{q.count:,}")
    return Panel(table, title="latency")


def memory(status: Status) -> MemoryStats:
    """Sum the KV cache over all places that have a share of it."""
    caches = [kv for kv in status.kv if kv.share]
    used, capacity, maximum = (
        sum(getattr(kv, f"{name}_bytes") for kv in caches) for name in ("used", "capacity", "maximum")
    )
    return MemoryStats(used, capacity, maximum)


def kv_cache(kv: MemoryStats, history: Sequence[KVUsageSample]) -> Panel:
    """Draw bars of the used bytes and of the capacity, within the maximum, and the use over the last minute."""
    table = Table.grid(padding=(0, 1))
    for name, size in (("used", kv.used_bytes), ("capacity", kv.capacity_bytes)):
        bar = ProgressBar(total=max(1, kv.maximum_bytes), completed=max(0, size), width=SPARKS)
        table.add_row(name, bar, mib(size))
    now = history[-1].at_s if history else 0.0
    table.add_row(f"last {SPAN_S} s", sparkline(history, now), f"{kv.use:.0%} of the capacity used")
    return Panel(table, title=f"KV cache: at most {mib(kv.maximum_bytes)}")


def sparkline(history: Sequence[KVUsageSample], now_s: float, *, span_s: float = SPAN_S, width: int = SPARKS) -> str:
    """Draw shares over time, the newest at the right: a cell has the most of its time, or else the cell before it."""
    most: dict[int, float] = {}
    for s in history:
        cell = width - 1 - int((now_s - s.at_s) / span_s * width)
        most[cell] = max(most.get(cell, 0.0), s.use)
    cells, level = "", " "
    for cell in range(width):
        if cell in most:
            level = LEVELS[max(0, min(len(LEVELS) - 1, int(most[cell] * len(LEVELS))))]
        cells += level
    return cells


def layers(variants: Sequence[str], rank: str = "") -> Panel:
    """Draw one cell for each layer, and a legend; `rank` says whose they are, where there are several."""
    strip = Text()
    for variant in variants:
        strip.append(*_cell(variant))
    legend = Text()
    for variant, count in Counter(variants).most_common():
        legend.append(*_cell(variant)).append(f" {variant}: {count}   ")
    return Panel(
        Group(strip, legend), title=Text(f"{rank}: {len(variants)} layers" if rank else f"{len(variants)} layers")
    )


def controller(health: ControllerHealth | None) -> Text:
    """Draw whether the controller runs, its last decision with the reason, and its last fault."""
    if health is None:
        return Text("controller: none; actions are called by hand")
    if not health.running and not health.ticks:
        return Text(f"controller: not started; {health.last_reason}")
    text = Text("controller: " + ("running" if health.running else "not running"))
    text.append(f", {health.ticks:,} ticks, {health.actions:,} actions, {health.cost:.2%} of the time")
    if (health.in_tick_s or 0.0) >= HANGS_S:
        text.append(f"\n  in its tick for {health.in_tick_s:.0f} s: a sensor or its policy hangs", "bold red")
    if health.last_reason:
        figures = f" ({health.last_figures})" if health.last_figures else ""
        text.append(f"\n  last: {health.last_reason}{figures}")
    if health.faults:
        last = health.faults[-1]
        text.append(f"\n  fault, {last.times} times: {last.text}", "bold red")
    return text


def milliseconds(seconds: float | None) -> str:
    """Return seconds as text in milliseconds; a dash for none."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:,.1f}" if abs(seconds) < 0.1 else f"{1000 * seconds:,.0f}"


def _cell(variant: str) -> tuple[str, str]:
    """Return the character and the style of a layer in a variant."""
    beginnings, pruned = PRUNED
    return CELLS.get(variant) or (MIXED if "+" in variant else pruned if variant.startswith(beginnings) else FULL)
