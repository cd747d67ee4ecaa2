"""A table of result files, with ratios to the first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError, is_number


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    label: str
    path: tuple[str, ...]
    """The keys that lead to it in a result file."""
    factor: float = 1.0


FIGURES = (
    Figure("offered", ("elastic", "offered")),
    Figure("completed", ("completed",)),
    Figure("SLO attainment %", ("elastic", "slo_attainment"), 100),
    Figure("goodput req/s", ("request_goodput",)),
    Figure("requests/s", ("request_throughput",)),
    Figure("output tokens/s", ("output_throughput",)),
    *(
        Figure(f"{name.upper()} {which} ms", (f"{key}_{name}_ms",))
        for name in ("ttft", "tpot", "itl", "e2el")
        for which, key in (("P50", "median"), ("P95", "p95"), ("P99", "p99"))
    ),
    Figure("queueing P50 ms", ("elastic", "median_queueing_ms")),
    Figure("queueing P95 ms", ("elastic", "p95_queueing_ms")),
    Figure("KV use mean %", ("elastic", "kv_use", "mean"), 100),
    Figure("KV > 95 % of time %", ("elastic", "kv_use", "almost_full_share"), 100),
    Figure("preemptions", ("elastic", "preemptions")),
    Figure("stalls", ("elastic", "stalls")),
)


@dataclass(frozen=True)
class Result:
    """A result file, and its name in a table."""

    name: str
    summary: dict[str, Any]

    @property
    def elastic(self) -> dict[str, Any]:
        """The figures that are Elastic's own."""
        figures: dict[str, Any] = self.summary["elastic"]
        return figures

    def value(self, figure: Figure) -> float | None:
        """Return a figure; None if the file lacks it."""
        value: Any = self.summary
        for key in figure.path:
            value = value.get(key) if isinstance(value, dict) else None
        return value * figure.factor if is_number(value) else None


def read_results(paths: Sequence[str | Path]) -> list[Result]:
    """Read result files of `elastic bench run`; they are named by their stems, or by their paths where those agree.

    Raises `ConfigError` naming the file that is none.
    """
    stems = [Path(path).stem for path in paths]
    names = [stem if stems.count(stem) == 1 else str(Path(path)) for stem, path in zip(stems, paths, strict=True)]
    return [Result(name, _read(Path(path))) for name, path in zip(names, paths, strict=True)]


def rows(results: Sequence[Result]) -> list[list[str]]:
    """Return a header, then a row for each figure that any file has: values, each with its ratio to the first."""
    table = [["", *(result.name for result in results)]]
    for figure in FIGURES:
        values = [result.value(figure) for result in results]
        if any(value is not None for value in values):
            table.append([figure.label, *(_cell(value, values[0], i) for i, value in enumerate(values))])
    by_file = [result.elastic.get("token_share_by_variant") or {} for result in results]
    for variant in sorted({v for shares in by_file for v in shares}):
        row = [shares.get(variant) for shares in by_file]
        table.append([f"tokens in {variant} %", *("-" if s is None else f"{100 * s:.1f}" for s in row)])
    return table


def warnings(results: Sequence[Result]) -> list[str]:
    """Return what a reader of the table must know."""
    notes = []
    workloads = {result.elastic.get("trace", {}).get("workload_sha256") for result in results}
    if len(workloads) > 1:
        notes.append("the files were not offered the same requests: ratios compare workloads too")
    for result in results:
        if result.elastic.get("over_saturated"):
            notes.append(f"{result.name} is over-saturated: its latencies measure the length of the run")
        if result.elastic.get("interrupted"):
            notes.append(f"{result.name} was interrupted")
        if result.summary.get("failed"):
            errors = result.elastic.get("errors") or {}
            why = f"; {max(errors.values())} of them: {max(errors, key=errors.__getitem__)}" if errors else ""
            notes.append(
                f"{result.name}: {result.summary['failed']} requests were not completed; latencies leave them out{why}"
            )
        if result.elastic.get("shorter"):
            notes.append(f"{result.name}: {result.elastic['shorter']} answers were shorter than was asked for")
    return notes


def _read(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not (isinstance(summary, dict) and "duration" in summary and _is_ours(summary.get("elastic"))):
        raise ConfigError(f"{path} is no result file of `elastic bench run`")
    return summary


def _is_ours(figures: Any) -> bool:
    """Tell whether figures have the form of those that are Elastic's own, as far as a table needs it."""
    if not isinstance(figures, dict):
        return False
    trace, shares = figures.get("trace", {}), figures.get("token_share_by_variant") or {}
    counted = [shares, figures.get("errors") or {}]
    described = isinstance(trace, dict) and isinstance(trace.get("workload_sha256"), str | None)
    return described and all(isinstance(each, dict) and all(map(is_number, each.values())) for each in counted)


def _cell(value: float | None, first: float | None, column: int) -> str:
    """Format a value, with its ratio to the first column's."""
    if value is None:
        return "-"
    text = f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1000 else f"{value:.4g}"
    return text if column == 0 or not first else f"{text} ({value / first:.2f}x)"
