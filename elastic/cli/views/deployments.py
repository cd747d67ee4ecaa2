"""Panels for models that are deployed by intents, and for the devices that they share."""

from __future__ import annotations

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastic.cli.views.panels import mib
from elastic.cli.views.status_document import StatusDocument


def deployments(document: StatusDocument) -> list[Panel]:
    """Draw a line for each deployed model, and one for each device; nothing where there are none."""
    if not document.deployments:
        return []
    models = Table("model", "configuration", "changes", "", box=None, padding=(0, 1, 0, 0))
    for each in document.deployments:
        models.add_row(Text(each.name), Text(each.configuration), f"{each.changes:,}", Text(each.reason))
    devices = Table("device", "free", "of", "load", "models", "", box=None, padding=(0, 1, 0, 0))
    for device in document.devices:
        measured = f"{device.guest} is measured" if device.guest else ""
        sizes = mib(device.free_bytes), mib(device.memory_bytes), f"{device.load:.0%}"
        devices.add_row(Text(device.name), *sizes, Text(", ".join(device.models)), Text(measured))
    return [Panel(models, title="deployments"), Panel(devices, title="devices")]
