"""Panels for the ranks and instances of a fleet, for what happened to it, and for models deployed by intents."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastic.cli.views.panels import tabulated
from elastic.cli.views.sizes import mib
from elastic.cli.views.status_document import FleetEventDocument, StatusDocument
from elastic.cluster.control.status import SERVING

STYLES = {
    "starting": "cyan",
    "serving": "green",
    "flipping": "magenta",
    "draining": "yellow",
    "lost": "bold red",
    "ended": "dim",
}


def ranks(document: StatusDocument) -> Panel:
    """Draw a line for each rank: its instance, what that has to do, its memory, and when it was last heard of.

    Of an instance in a group whose layers have changed their rank there is the epoch, too.
    """
    counted = ("requests", "running", "waiting", "free blocks", "KV used", "beat s")
    table = tabulated(["rank", "state", "instance"], counted, [""], box=None, padding=(0, 1, 0, 0))
    instances = {each.leader or next(iter(each.ranks), ""): each for each in document.instances}
    for rank in document.ranks:
        instance = instances.get(rank.name)
        name, counts = "-", ["-"] * 4
        caches = [kv for kv in rank.status.kv if kv.share] if rank.status else []
        capacity = sum(kv.capacity_bytes for kv in caches)
        if instance is not None:
            about = [f"tp={instance.tp}"] * (instance.tp > 1) + [f"epoch {instance.epoch:,}"] * (instance.epoch > 0)
            name = ", ".join([instance.name, *about])
            load = instance.load
            blocks = f"{load.free_blocks:,} of {load.total_blocks:,}"
            counts = [f"{instance.requests:,}", f"{load.running:,}", f"{load.waiting:,}", blocks]
        table.add_row(
            Text(rank.name),
            Text(rank.state, STYLES.get(rank.state, "")),
            Text(name),
            *counts,
            f"{sum(kv.used_bytes for kv in caches) / capacity:.0%}" if capacity else "-",
            "-" if rank.beat_s is None else f"{rank.beat_s:.1f}",
            Text(rank.why or " ".join(rank.places)),
        )
    serving = sum(rank.state in SERVING for rank in document.ranks)
    title = f"{serving} of {len(document.ranks)} ranks serve"
    policy = [Text(f"policy: {document.fleet.policy}")] if document.fleet and document.fleet.policy else []
    return Panel(Group(table, *policy), title=title, subtitle=_sums(document))


def fleet_events(events: Sequence[FleetEventDocument], *, last: int) -> Table:
    """Tabulate the last things that happened to a fleet."""
    columns = ("what", "rank", "instance", "requests", "moved", "computed again", "stalled ms", "why")
    table = Table(*columns, title="fleet", expand=True)
    for event in events[-last:]:
        table.add_row(
            Text(event.kind),
            Text(event.rank),
            Text(event.instance),
            Text(event.request or (f"{event.requests:,}" if event.requests else "")),
            mib(event.moved_bytes) if event.moved_bytes else "",
            f"{event.recomputed_tokens:,} tokens" if event.recomputed_tokens else "",
            f"{event.stalled_ms:,.1f}" if event.stalled_ms else "",
            Text(event.why),
        )
    return table


def deployments(document: StatusDocument) -> list[Panel]:
    """Draw a line for each deployed model, and one for each device; nothing where there are none."""
    if not document.deployments:
        return []
    models = Table("model", "configuration", "links", "changes", "", box=None, padding=(0, 1, 0, 0))
    for each in document.deployments:
        links = ", ".join(dict.fromkeys(link.basis for link in each.links))
        models.add_row(Text(each.name), Text(each.configuration), links, f"{each.changes:,}", Text(each.reason))
    devices = Table("device", "free", "of", "load", "models", "", box=None, padding=(0, 1, 0, 0))
    for device in document.devices:
        measured = f"{device.guest} is measured" if device.guest else ""
        sizes = mib(device.free_bytes), mib(device.memory_bytes), f"{device.load:.0%}"
        devices.add_row(Text(device.name), *sizes, Text(", ".join(device.models)), Text(measured))
    return [Panel(models, title="deployments"), Panel(devices, title="devices")]


def _sums(document: StatusDocument) -> str:
    if document.fleet is None:
        return ""
    told = {"moved": "moved", "requests_resumed": "resumed", "recomputed_tokens": "tokens computed again"}
    counts = [f"{document.fleet.totals.get(key, 0):,} {words}" for key, words in told.items()]
    return ", ".join([f"{document.fleet.queued:,} queued", *counts])
