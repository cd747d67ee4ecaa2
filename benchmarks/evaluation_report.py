"""The report of the evaluation: docs/evaluation.md with pictures, results/evaluation-MACHINE.json, one JSON line."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from common import finish, table

from elastic.bench.report.compare import Result
from elastic.bench.report.plots import draw

Summaries = dict[str, list[dict[str, Any]]]
FIGURES: tuple[tuple[str, Callable[[dict[str, Any]], float | None]], ...] = (
    ("SLO attainment %", lambda s: _percent(s["elastic"]["slo_attainment"])),
    ("TTFT P50 ms", lambda s: s["median_ttft_ms"]),
    ("TTFT P95 ms", lambda s: s["p95_ttft_ms"]),
    ("TTFT P99 ms", lambda s: s["p99_ttft_ms"]),
    ("TPOT P50 ms", lambda s: s["median_tpot_ms"]),
    ("TPOT P95 ms", lambda s: s["p95_tpot_ms"]),
    ("queueing P95 ms", lambda s: s["elastic"]["p95_queueing_ms"]),
    ("waiting for KV %", lambda s: _percent(s["elastic"]["queueing_kv_share"])),
    ("KV use %", lambda s: _percent(s["elastic"]["kv_use"]["mean"])),
    ("KV > 95 % of time %", lambda s: _percent(s["elastic"]["kv_use"]["almost_full_share"])),
    ("output tokens/s", lambda s: s["output_throughput"]),
    ("preemptions", lambda s: s["elastic"]["preemptions"]),
    ("tokens in int4 %", lambda s: 100 * s["elastic"]["token_share_by_variant"].get("int4", 0.0)),
    ("actions", lambda s: float(len(s["elastic"]["actions"]))),
)
RATIO_COLUMNS = ["", "", "P95 TTFT better", "throughput", "SLO violations fewer"]


def report(measured: dict[str, Any], summaries: Summaries, conditions: Sequence[Any], machine: str, root: Path) -> None:
    """Write everything below `root`."""
    results = measured | {"runs": {name: [compact(s) for s in runs] for name, runs in summaries.items()}}
    results["ratios"] = {c.name: ratios(summaries, c) for c in conditions}
    (root / "benchmarks" / "results" / f"evaluation-{machine}.json").write_text(json.dumps(results, indent=1) + "\n")
    name = f"evaluation-{machine}" if measured["full"] else "evaluation"
    pictures = root / "docs" / name
    pictures.mkdir(parents=True, exist_ok=True)
    for condition in conditions:
        first = [Result(s, summaries[f"{condition.name}/{s}"][0]) for s in condition.systems]
        draw(first, pictures / f"{condition.name}.png")
        print(f"\n{condition.name}")
        table(*_rows(summaries, measured["quality"], condition))
    (root / "docs" / f"{name}.md").write_text(
        document(measured, summaries, conditions, results["ratios"], machine, name)
    )
    finish(
        "evaluation", measured["device"], {key: results[key] for key in ("calibration", "ratios", "quality", "took_s")}
    )


def compact(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary without arrays and without states."""
    plain = {k: v for k, v in summary.items() if not isinstance(v, list | dict)}
    elastic = {
        k: v for k, v in summary["elastic"].items() if k not in ("state_timeline", "weights", "tokens_by_weights")
    }
    return plain | {"elastic": elastic}


def ratios(summaries: Summaries, condition: Any) -> dict[str, dict[str, Any]]:
    """Each system against full precision, paired by repeat: the geometric mean, and the lowest and highest."""
    full = summaries[f"{condition.name}/full"]
    return {
        system: {
            "p95_ttft_better": _paired(full, summaries[f"{condition.name}/{system}"], lambda s: s["p95_ttft_ms"]),
            "throughput": _paired(summaries[f"{condition.name}/{system}"], full, lambda s: s["output_throughput"]),
            "slo_violations_fewer_percent": _fewer(full, summaries[f"{condition.name}/{system}"]),
        }
        for system in condition.systems
        if system != "full"
    }


def document(
    measured: dict[str, Any],
    summaries: Summaries,
    conditions: Sequence[Any],
    ratios_: dict[str, Any],
    machine: str,
    name: str,
) -> str:
    """docs/evaluation.md."""
    command = "make evaluate-full" if measured["full"] else "make evaluate"
    reading = Path(__file__).with_name("evaluation_reading.md")
    lines = [
        "# Evaluation",
        "",
        fill(
            "What a model under a controller does when requests come in bursts: full precision, static INT4, and "
            "Elastic in three modes, on the same budget and the same requests of Azure's traces. Each run is a fresh "
            "process, systems take turns, and figures are medians of the repeats. The conditions "
            "(`benchmarks/evaluation.toml`) were fixed before any result. The figures are in "
            f"`benchmarks/results/evaluation-{machine}.json`; [benchmarking.md](benchmarking.md) says what they mean.",
            120,
            break_on_hyphens=False,
        ),
        "",
        "```",
        f"{command} TRACES=folder     # writes this page",
        "```",
        "",
        *([reading.read_text().rstrip(), ""] if reading.is_file() else []),
        "## Beside full precision",
        "",
        "Paired by repeat: the geometric mean, the least and the most. Over 1 is better, over 0 % fewer.",
        "",
        *map(_markdown, (RATIO_COLUMNS, ["---"] * len(RATIO_COLUMNS))),
        *(_ratio_row(c.name, system, r) for c in conditions for system, r in ratios_[c.name].items()),
        "",
        "## Every figure",
        "",
        "| workload | token scale | TTFT SLO s |",
        "| --- | --- | --- |",
        *(f"| {w} | {c['token_scale']:g} | {c['slo_ttft_s']:.3f} |" for w, c in measured["calibration"].items()),
        "",
    ]
    for condition in conditions:
        header, rows = _rows(summaries, measured["quality"], condition)
        lines += [f"### {condition.name}", "", _markdown(header), _markdown(["---"] * len(header))]
        lines += [_markdown(row) for row in rows]
        lines += ["", f"![{condition.name}]({name}/{condition.name}.png)", ""]
    return "\n".join(lines)


def _rows(summaries: Summaries, quality: dict[str, Any], condition: Any) -> tuple[list[str], list[list[str]]]:
    rows = []
    for label, value in FIGURES:
        columns = [[value(s) for s in summaries[f"{condition.name}/{system}"]] for system in condition.systems]
        rows.append([label, *map(_median, columns)])
    for label, key in (("lost likelihood %", "lost_likelihood"), ("ROUGE-L", "rouge_l")):
        values = [quality[f"{condition.name}/{system}"]["run"][key] for system in condition.systems]
        rows.append([label, *(f"{v * (100 if label.endswith('%') else 1):.3g}" for v in values)])
    flagged = ["yes" if any(s["elastic"]["over_saturated"] for s in summaries[f"{condition.name}/{system}"]) else "no"
               for system in condition.systems]  # fmt: skip
    return ["", *condition.systems], [*rows, ["over-saturated", *flagged]]


def _median(values: Sequence[float | None]) -> str:
    numbers = [v for v in values if v is not None]
    if not numbers:
        return "-"
    median = statistics.median(numbers)
    return f"{median:,.0f}" if median >= 1000 else f"{median:.4g}"


def _paired(
    above: Sequence[dict[str, Any]], below: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]
) -> dict[str, float] | None:
    pairs = [(value(a), value(b)) for a, b in zip(above, below, strict=True)]
    ratios_ = [a / b for a, b in pairs if a and b]
    if not ratios_:
        return None
    mean = math.exp(statistics.fmean(math.log(r) for r in ratios_))
    return {"mean": mean, "low": min(ratios_), "high": max(ratios_)}


def _fewer(full: Sequence[dict[str, Any]], system: Sequence[dict[str, Any]]) -> float | None:
    """Return the percentage by which fewer requests missed the SLO, over all repeats; None where no request did."""
    missed = [math.fsum(1 - s["elastic"]["slo_attainment"] for s in runs) for runs in (full, system)]
    return 100 * (1 - missed[1] / missed[0]) if missed[0] > 0 else None


def _ratio_row(condition: str, system: str, ratio: dict[str, Any]) -> str:
    better, throughput, fewer = ratio["p95_ttft_better"], ratio["throughput"], ratio["slo_violations_fewer_percent"]
    cells = [
        f"{better['mean']:.2f}x [{better['low']:.2f}, {better['high']:.2f}]" if better else "-",
        f"{throughput['mean']:.3f}x [{throughput['low']:.3f}, {throughput['high']:.3f}]" if throughput else "-",
        f"{fewer:.1f} %" if fewer is not None else "-",
    ]
    return _markdown([condition, system, *cells])


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
