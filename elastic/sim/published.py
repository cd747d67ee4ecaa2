"""Figures that a paper published, which are told beside those of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.sim.tables import Table

Document = Mapping[str, Any]
"""What a run came to, as a `Report` describes it."""


def _placed(document: Document) -> float | None:
    placements = document["placements"].values()
    return sum(each["placed"] for each in placements) if placements else None


def _tail(document: Document) -> float | None:
    ttft_s = document["ttft_s"]
    return ttft_s["p99"] / ttft_s["p50"] if ttft_s["p50"] else None


OURS: Mapping[str, Callable[[Document], float | None]] = {
    "P99 TTFT over P50": _tail,
    "tokens/s": lambda document: document["tokens_per_s"],
    "models placed": _placed,
}
"""Figures of a run that can stand beside a published one, by name; None: the run has none."""


@dataclass(frozen=True)
class PublishedFigure:
    """One figure of a paper."""

    name: str
    """What it is a figure of."""
    value: str
    """As it is printed there."""
    source: str
    """The paper, with the section, figure or table."""
    ours: str = ""
    """Which of `OURS` stands beside it; "": none that one run has."""

    def described(self, document: Document) -> dict[str, Any]:
        """Return it, with the figure of a run beside it, as JSON has them."""
        figure = OURS[self.ours](document) if self.ours else None
        return {"name": self.name, "value": self.value, "source": self.source, "ours": self.ours, "here": figure}


def read_published(table: Table) -> PublishedFigure:
    """Return a figure of `[[published]]`. Raises `ConfigError` naming a wrong key."""
    ours = table.text("ours", among=tuple(OURS)) if "ours" in table else ""
    figure = PublishedFigure(table.text("name"), table.text("value"), table.text("source"), ours)
    table.done()
    return figure
