"""The requests of a scenario, from its `[[requests]]` tables."""

from __future__ import annotations

from pathlib import Path

from elastic.bench.traces.generator import (
    ArrivalProcess,
    Fixed,
    Gamma,
    LengthDistribution,
    LikeTrace,
    Lognormal,
    OnOff,
    Poisson,
    Ramp,
)
from elastic.bench.traces.readers import read_trace
from elastic.bench.traces.trace import Trace
from elastic.sim.tables import Table
from elastic.sim.workload import Bursts, Rates, RequestSource

ARRIVALS = ("poisson", "gamma", "on-off", "ramp", "rates", "bursts", "trace")
LENGTHS = ("fixed", "lognormal", "trace")


def read_source(table: Table, folder: Path) -> RequestSource:
    """Return one kind of requests. Raises `ConfigError` naming the key that is wrong."""
    kind = table.text("arrivals", among=ARRIVALS)
    drawn = table.text("lengths", "trace" if kind == "trace" else "lognormal", among=LENGTHS)
    if kind == "trace" and drawn != "trace":
        raise table.wrong("lengths", drawn, "trace, as are the arrivals: a trace has both; or left out")
    trace = _trace(table, folder) if "trace" in (kind, drawn) else None
    source = RequestSource(
        table.text("name", "requests"),
        None if kind == "trace" else _arrivals(table, kind),
        None if kind == "trace" else _lengths(table, drawn, trace),
        trace,
        table.number("ask", 1.0, least=1.0),
        table.optional("most_tokens", least=2),
        table.whole("shared_prefix", 0, least=0),
        table.text("model", ""),
    )
    table.done()
    return source


def _arrivals(table: Table, kind: str) -> ArrivalProcess:
    if kind == "poisson":
        return Poisson(table.number("rate"))
    if kind == "gamma":
        return Gamma(table.number("rate"), table.number("burstiness"))
    if kind == "on-off":
        return OnOff(*(table.number(key) for key in ("on_rate", "off_rate", "on_s", "off_s")))
    if kind == "ramp":
        return Ramp(*(table.number(key) for key in ("first_rate", "last_rate", "over_s")))
    if kind == "rates":
        return Rates(table.numbers("rates"), table.number("every_s"))
    windows = []
    for each in table.tables("bursts"):
        windows.append((each.number("from_s"), each.number("until_s"), each.number("rate")))
        each.done()
    return Bursts(table.number("rate"), tuple(windows))


def _lengths(table: Table, kind: str, trace: Trace | None) -> LengthDistribution:
    if kind == "fixed":
        return Fixed(table.whole("prompt_tokens"), table.whole("answer_tokens"))
    if kind == "trace":
        assert trace is not None
        return LikeTrace(trace)
    names = ("prompt_median", "prompt_sigma", "answer_median", "answer_sigma")
    return Lognormal(*(table.number(name) for name in names))


def _trace(table: Table, folder: Path) -> Trace:
    """Read a trace, as `elastic bench` does; without a window from its first request on."""
    trace = read_trace(folder / table.text("file"))
    if "window_s" in table:
        trace = trace.cut(*table.numbers("window_s", 2))
    trace = trace.from_first_arrival()
    scale = table.number("rate_scale", 1.0)
    if scale != 1:
        trace = trace.with_rate(scale, "thin" if scale < 1 else "stretch")
    return trace.with_tokens(table.number("token_scale", 1.0))
