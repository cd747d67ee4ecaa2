"""A picture of result files: arrivals, memory and layers over time, and latencies."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from elastic.bench.report.compare import Result
from elastic.errors import BackendUnavailable, ConfigError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito, for any colour vision; lines differ in style too."""
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "x", "^", "s", "+", "v", "d")
FULL = frozenset({"float64", "float32", "float16", "bfloat16"})
"""Names of full precision; layers of all other names are packed or absent."""
BINS = 72
NEEDED = ("ttfts", "itls", "start_times", "output_lens")
Style = dict[str, Any]
Panel = Callable[[Any, Sequence[Result]], None]
"""A function that draws results on axes."""


def require_matplotlib() -> None:
    """Raise `BackendUnavailable` where matplotlib is absent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'elastic-llm[plot]'")


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw six panels into one PNG file.

    Raises `ConfigError` for results without the arrays that `--save-detailed` writes, and where the file cannot be.
    """
    require_matplotlib()
    for result in results:
        _require_drawable(result)
    ttft_cdf = partial(_latency_cdf, "TTFT", "s", lambda result: [ttft for _, ttft in ttfts(result)])
    tpot_cdf = partial(_latency_cdf, "TPOT", "ms", tpots)
    panels: list[Panel] = [_arrivals, _kv, _layers, _ttft_over_time, ttft_cdf, tpot_cdf]
    with png_figure(path, 3, 2, figsize=(13, 11)) as (figure, axes):
        for panel, panel_axes in zip(panels, axes.flat, strict=True):
            panel(panel_axes, results)
            panel_axes.grid(alpha=0.3)
        lines = [axes.flat[1].plot([], [], **style)[0] for style, _ in _styled(results)]
        names = [result.name for result in results]
        figure.legend(lines, names, loc="outside upper center", ncols=min(4, len(results)))


@contextmanager
def png_figure(path: Path, rows: int, columns: int, *, figsize: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """Make a figure with its axes, without a display; write it at the end. Raises `ConfigError` where it cannot be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=figsize, layout="constrained")
    try:
        yield figure, axes
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def arrivals_per_second(result: Result) -> tuple[list[float], float]:
    """Return requests per second in equal intervals of the run, and the length of an interval in seconds."""
    times = result.summary["start_times"]
    width = max(1.0, math.ceil((max(times, default=0.0) + 1e-9) / BINS))
    counts = [0.0] * (int(max(times, default=0.0) // width) + 1)
    for t in times:
        counts[int(t // width)] += 1 / width
    return counts, width


def ttfts(result: Result) -> list[tuple[float, float]]:
    """Return arrival and TTFT in seconds of each request that got a token."""
    pairs = zip(result.summary["start_times"], result.summary["ttfts"], strict=True)
    return [(start, ttft) for start, ttft in pairs if ttft > 0]


def tpots(result: Result) -> list[float]:
    """Return milliseconds for each token after the first, of requests with two or more."""
    pairs = zip(result.summary["itls"], result.summary["output_lens"], strict=True)
    return [1000 * math.fsum(gaps) / (tokens - 1) for gaps, tokens in pairs if tokens > 1 and gaps]


def cdf(sample: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return ascending values, and for each the share of the sample that is no larger."""
    ordered = sorted(sample)
    return ordered, [(i + 1) / len(ordered) for i in range(len(ordered))]


def kv_states(result: Result) -> list[tuple[float, float, float]]:
    """Return seconds, and MiB of keys and values that are used and that there is room for, where that is known."""
    states = [s for s in result.elastic["state_timeline"] if s["kv_capacity_bytes"]]
    return [(float(s["t_s"]), s["kv_used_bytes"] / 2**20, s["kv_capacity_bytes"] / 2**20) for s in states]


def layer_states(result: Result) -> list[tuple[float, int]]:
    """Return seconds, and the number of decoder layers that are not in full precision."""
    timeline = result.elastic["state_timeline"]
    counts = [sum(count for variant, count in s["layers"].items() if variant not in FULL) for s in timeline]
    return [(float(s["t_s"]), count) for s, count in zip(timeline, counts, strict=True)]


def slo_bound(result: Result, key: str) -> float | None:
    """Return a bound of a run by its key; None: it had none."""
    slo = result.elastic.get("slo")
    return float(slo[key]) if slo and slo[key] is not None else None


def _require_drawable(result: Result) -> None:
    """Raise `ConfigError` where a panel could not read a result."""
    if any(name not in result.summary for name in NEEDED):
        raise ConfigError(f"{result.name} has no arrays to draw; run it with --save-detailed")
    readers: list[Callable[[Result], object]] = [arrivals_per_second, ttfts, tpots, kv_states, layer_states]
    readers += [partial(slo_bound, key=key) for key in ("ttft_s", "tpot_s")]
    try:
        for read in readers:
            read(result)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{result.name}: what is drawn of it is not as --save-detailed writes it ({error!r}); run it anew with it"
        ) from error


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
        states = kv_states(result)
        times = [t for t, _, _ in states]
        axes.plot(times, [used for _, used, _ in states], **style)
        axes.plot(times, [capacity for _, _, capacity in states], color=style["color"], linewidth=0.8, alpha=0.7)
    axes.set(xlabel="time (s)", ylabel="MiB", title="KV cache: used, and (thin) capacity", ylim=(0, None))


def _layers(axes: Any, results: Sequence[Result]) -> None:
    for style, result in _styled(results):
        states = layer_states(result)
        axes.step([t for t, _ in states], [layers for _, layers in states], where="post", **style)
    axes.set(xlabel="time (s)", ylabel="layers", title="Layers not in full precision")
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))


def _ttft_over_time(axes: Any, results: Sequence[Result]) -> None:
    for i, (style, result) in enumerate(_styled(results)):
        points = ttfts(result)
        marks = {"color": style["color"], "linestyle": "", "marker": MARKERS[i % len(MARKERS)], "markersize": 3}
        axes.plot([t for t, _ in points], [v for _, v in points], **marks)
    _draw_slo(axes.axhline, results, "ttft_s", 1)
    axes.set(xlabel="arrival (s)", ylabel="TTFT (s)", title="Time to first token, by arrival", yscale="log")
    _label_logarithms(axes.yaxis)


def _latency_cdf(
    name: str, unit: str, sample: Callable[[Result], Sequence[float]], axes: Any, results: Sequence[Result]
) -> None:
    for style, result in _styled(results):
        axes.step(*cdf(sample(result)), where="post", **style)
    _draw_slo(axes.axvline, results, f"{name.lower()}_s", {"s": 1, "ms": 1000}[unit])
    axes.set(xlabel=f"{name} ({unit})", ylabel="share of requests", title=name, xscale="log", ylim=(0, 1))
    _label_logarithms(axes.xaxis)


def _label_logarithms(axis: Any) -> None:
    """Label 1, 2 and 5 with plain numbers: a range is often shorter than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_slo(line: Callable[..., Any], results: Sequence[Result], key: str, factor: float) -> None:
    """Draw a line at each bound of the runs, times a factor."""
    for bound in {bound for result in results if (bound := slo_bound(result, key)) is not None}:
        line(bound * factor, color="0.4", linestyle=":", linewidth=1)


def _styled(results: Sequence[Result]) -> list[tuple[Style, Result]]:
    """Return the results with the style of their lines."""
    return [
        ({"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)], "linewidth": 1.6}, result)
        for i, result in enumerate(results)
    ]
