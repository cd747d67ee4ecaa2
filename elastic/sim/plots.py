"""A picture of a simulated run: room, queues, tokens, latencies and actions over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic.bench.report.plots import COLOURS, png_figure, require_matplotlib
from elastic.sim.report import Report

MOST_LINES = 60
"""Actions that are drawn."""
PANELS: Sequence[tuple[str, str, float]] = (
    ("kv_use", "KV blocks in use or promised (%)", 100.0),
    ("queued", "requests without a block", 1.0),
    ("tokens_per_s", "generated tokens/s", 1.0),
    ("ttft_s", "mean TTFT (s)", 1.0),
)
"""Fields of samples, what they are called, and a factor."""


def draw(report: Report, path: Path, title: str) -> None:
    """Draw it into a PNG file. Raises `BackendUnavailable` without matplotlib, `ConfigError` where it cannot be."""
    require_matplotlib()
    times = [sample.at_s for sample in report.samples]
    kinds = sorted(report.action_counts)
    with png_figure(path, len(PANELS), 1, figsize=(11, 11)) as (figure, axes):
        for panel, (name, label, factor) in zip(axes.flat, PANELS, strict=True):
            values = [factor * getattr(sample, name) for sample in report.samples]
            panel.plot(times, values, color=COLOURS[0], linewidth=1.2)
            for action in report.actions[:MOST_LINES]:
                colour = COLOURS[1 + kinds.index(action.kind) % 6]
                panel.axvline(action.at_s, color=colour, linewidth=0.8, alpha=0.6)
            panel.set(ylabel=label, ylim=(0, None))
            panel.grid(alpha=0.3)
        axes.flat[-1].set_xlabel("seconds of the run")
        lines = [axes.flat[0].plot([], [], color=COLOURS[1 + i % 6], label=kind)[0] for i, kind in enumerate(kinds)]
        if lines:
            figure.legend(lines, kinds, loc="outside lower center", ncols=min(6, len(lines)))
        figure.suptitle(title)
