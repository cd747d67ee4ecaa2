"""Result files as one picture: what came, what memory and layers did, and what requests experienced."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic.bench.report.compare import Result
from elastic.errors import BackendUnavailable, ConfigError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which people with any colour vision can tell apart; lines differ in style too."""
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "x", "^", "s", "+", "v", "d")
FULL = frozenset({"float64", "float32", "float16", "bfloat16"})
"""What layers in full precision are called; all else is packed or absent."""
BINS = 72
NEEDED = ("ttfts", "itls", "start_times", "output_lens")
Style = dict[str, Any]


def require_matplotlib() -> None:
    """Raise `BackendUnavailable` where it is absent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'elastic-llm[plot]'")


def draw(results: Sequence[Result], path: Path) -> None:
    """Six panels in one PNG file. The files need the arrays that `--save-detailed` writes, else `ConfigError`."""
    require_matplotlib()
    for result in results:
        if any(name not in result.summary for name in NEEDED):
            raise ConfigError(f"{result.name} has no arrays to draw; run it with --save-detailed")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 2, figsize=(13, 11), layout="constrained")
    panels = (_arrivals, _kv, _layers, _ttft_over_time, _ttft_cdf, _tpot_cdf)
    for panel, place in zip(panels, axes.flat, strict=True):
        panel(place, results)
        place.grid(alpha=0.3)
    figure.legend(*_legend(axes.flat[1], results), loc="outside upper center", ncols=min(4, len(results)))
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def arrivals_per_second(result: Result) -> tuple[list[float], float]:
    """Requests per second in equal parts of the run, and how long a part is."""
    times = result.summary["start_times"]
    width = max(1.0, math.ceil((max(times, default=0.0) + 1e-9) / BINS))
    counts = [0.0] * (int(max(times, default=0.0) // width) + 1)
    for t in times:
        counts[int(t // width)] += 1 / width
    return counts, width


def ttfts(result: Result) -> list[tuple[float, float]]:
    """(Arrival, TTFT) in seconds of each request that got a token."""
    pairs = zip(result.summary["start_times"], result.summary["ttfts"], strict=True)
    return [(start, ttft) for start, ttft in pairs if ttft > 0]


def tpots(result: Result) -> list[float]:
    """Milliseconds for each token after the first, of requests with two or more."""
    pairs = zip(result.summary["itls"], result.summary["output_lens"], strict=True)
    return [1000 * math.fsum(gaps) / (tokens - 1) for gaps, tokens in pairs if tokens > 1 and gaps]


def cdf(sample: Sequence[float]) -> tuple[list[float], list[float]]:
    """Ascending values, and the share of the sample that is no larger."""
    ordered = sorted(sample)
    return ordered, [(i + 1) / len(ordered) for i in range(len(ordered))]


def swapped_layers(state: dict[str, Any]) -> int:
    """Decoder layers that are not in full precision."""
    return sum(count for variant, count in state["layers"].items() if variant not in FULL)


def _arrivals(axes: Any, results: Sequence[Result]) -> None:
    drawn: list[list[float]] = []
    for style, result in _styled(results):
        counts, width = arrivals_per_second(result)
        if counts not in drawn:
            axes.stairs(counts, [i * width for i in range(len(counts) + 1)], **style)
            drawn.append(counts)
    axes.set(
        xlabel="time (s)", ylabel="requests/s", title="Arrivals" + (", the same for all" if len(drawn) == 1 else "")
    )


def _kv(axes: Any, results: Sequence[Result]) -> None:
    for style, result in _styled(results):
        states = [s for s in result.elastic["state_timeline"] if s["kv_capacity_bytes"]]
        times = [s["t_s"] for s in states]
        axes.plot(times, [s["kv_used_bytes"] / 2**20 for s in states], **style)
        capacity = [s["kv_capacity_bytes"] / 2**20 for s in states]
        axes.plot(times, capacity, color=style["color"], linewidth=0.8, alpha=0.7)
    axes.set(xlabel="time (s)", ylabel="MiB", title="KV cache: used, and (thin) capacity", ylim=(0, None))


def _layers(axes: Any, results: Sequence[Result]) -> None:
    for style, result in _styled(results):
        states = result.elastic["state_timeline"]
        axes.step([s["t_s"] for s in states], [swapped_layers(s) for s in states], where="post", **style)
    axes.set(xlabel="time (s)", ylabel="layers", title="Layers not in full precision")
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))


def _ttft_over_time(axes: Any, results: Sequence[Result]) -> None:
    for i, (style, result) in enumerate(_styled(results)):
        points = ttfts(result)
        marks = {"color": style["color"], "linestyle": "", "marker": MARKERS[i % len(MARKERS)], "markersize": 3}
        axes.plot([t for t, _ in points], [v for _, v in points], **marks)
    _slo(axes.axhline, results, "ttft_s", 1)
    axes.set(xlabel="arrival (s)", ylabel="TTFT (s)", title="Time to first token, by arrival", yscale="log")
    _label_logarithms(axes.yaxis)


def _ttft_cdf(axes: Any, results: Sequence[Result]) -> None:
    for style, result in _styled(results):
        axes.step(*cdf([ttft for _, ttft in ttfts(result)]), where="post", **style)
    _slo(axes.axvline, results, "ttft_s", 1)
    axes.set(xlabel="TTFT (s)", ylabel="share of requests", title="TTFT", xscale="log", ylim=(0, 1))
    _label_logarithms(axes.xaxis)


def _tpot_cdf(axes: Any, results: Sequence[Result]) -> None:
    for style, result in _styled(results):
        axes.step(*cdf(tpots(result)), where="post", **style)
    _slo(axes.axvline, results, "tpot_s", 1000)
    axes.set(xlabel="TPOT (ms)", ylabel="share of requests", title="TPOT", xscale="log", ylim=(0, 1))
    _label_logarithms(axes.xaxis)


def _label_logarithms(axis: Any) -> None:
    """Plain numbers at 1, 2 and 5: a range is often shorter than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _slo(line: Callable[..., Any], results: Sequence[Result], key: str, factor: float) -> None:
    bounds = {result.elastic["slo"][key] for result in results if result.elastic.get("slo")} - {None}
    for bound in bounds:
        line(bound * factor, color="0.4", linestyle=":", linewidth=1)


def _styled(results: Sequence[Result]) -> list[tuple[Style, Result]]:
    return [
        ({"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)], "linewidth": 1.6}, result)
        for i, result in enumerate(results)
    ]


def _legend(axes: Any, results: Sequence[Result]) -> tuple[list[Any], list[str]]:
    lines = [axes.plot([], [], **style)[0] for style, _ in _styled(results)]
    return lines, [result.name for result in results]
