"""The tables of `estimate.py`, and the sums of its errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import table

Row = dict[str, Any]


def report(latency: Sequence[Row], memory: Sequence[Row], costs: Sequence[Row], fits: Mapping[str, float]) -> Row:
    """Print the tables, and return the sums of all."""
    rows = [
        [r["shape"], r["form"], f"{r['tp']}x{r['pp']}", *shown(_whole(r, "ours")), *shown(_whole(r, "paper"))]
        for r in latency
    ]
    every = {who: [error for row in latency for error in _whole(row, who)] for who in ("ours", "before", "paper")}
    rows.append(["all", "", "", *shown(every["ours"]), *shown(every["paper"])])
    rows.append(["all, before", "", "", *shown(every["before"]), *shown(every["paper"])])
    table(["shape", "weights", "TPxPP", "ours: mean", "P90", "most", "paper: mean", "P90", "most"], rows)
    off = memory_errors(memory)
    table(["memory", "mean", "P90", "most"], [[name, *shown(errors)] for name, errors in off.items()])
    table(
        ["shape", "core s", "all / ours", "whole / ours"],
        [[r["shape"], *(f"{r[key]:.1f}" for key in ("ours_core_s", "over_all", "over_whole"))] for r in costs],
    )
    table(["kind, weights", "R2"], [[name, f"{value:.4f}"] for name, value in fits.items()])
    found = [(key, error, row) for row in latency for key, error in row["ours"].items()]
    parts = {part: summary([error for key, error, _ in found if key.startswith(part)]) for part in ("TTFT", "TPOT")}
    worst = max(found, key=lambda each: abs(each[1]))
    return {
        "latency": {who: summary(errors) for who, errors in every.items()} | parts,
        "memory": {name: summary(errors) for name, errors in off.items()},
        "worst": {"at": worst[0], "error": worst[1], **{key: worst[2][key] for key in ("shape", "form", "tp", "pp")}},
    }


def memory_errors(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the relative errors of bytes: of ranks that are alone, of several, of what batches take at these, which is
    little beside weights, and the paper's of several."""
    several = [row for row in rows if row["tp"] * row["pp"] > 1]
    return {
        "ours, one rank": [row["ours"] / row["measured"] - 1 for row in rows if row["tp"] * row["pp"] == 1],
        "ours, several ranks": [row["ours"] / row["measured"] - 1 for row in several],
        "ours, their batches": [row["batch"] / max(1, row["measured_batch"]) - 1 for row in several],
        "paper, several ranks": [row["paper"] / row["measured"] - 1 for row in several if row["paper"] is not None],
    }


def _whole(row: Row, who: str) -> list[float]:
    """Return the errors of latencies, and of TPOT of batches; those of the parts of a latency are in these."""
    return [error for key, error in row[who].items() if key.startswith("(")]


def summary(errors: Sequence[float]) -> dict[str, float]:
    off = sorted(map(abs, errors))
    return {"mean": statistics.mean(off), "p90": off[math.ceil(0.9 * len(off)) - 1], "most": off[-1]}


def shown(errors: Sequence[float]) -> list[str]:
    return [f"{value:.1%}" for value in summary(errors).values()]
