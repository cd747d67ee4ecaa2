"""`elastic simulate`: a scenario in simulated time, as a table, a line of JSON, and a picture."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic.cli.inputs.checks import require_file_to_write, write_text
from elastic.cli.predictions.estimate import by_reason
from elastic.cli.views.panels import plain_console, tabulated
from elastic.sim.run import Run, SimulationSpeed
from elastic.sim.scenario import Scenario, read_scenario, shipped

_SHOWN_ACTIONS = 12


def simulate(options: Namespace) -> int:
    """Run a scenario; print its figures, and as the last line a JSON document without the timeline."""
    if options.scenario is None:
        for name in shipped():
            print(f"{name}: {read_scenario(name).title}")
        return 0
    for name in ("json", "plot"):
        require_file_to_write(getattr(options, name), f"--{name}")
    if options.plot is not None:
        from elastic.bench.report.plots import require_matplotlib
        from elastic.sim.plots import draw

        require_matplotlib()
    scenario = read_scenario(options.scenario, seed=options.seed)
    console = plain_console()
    run = Run(scenario)
    with console.status(Text(scenario.title or options.scenario)) as status:
        speed = run.play(lambda at_s: status.update(f"{at_s:,.0f} s of {scenario.duration_s:,.0f} s"))
    document = {**described(scenario), **run.report.document()}
    document["published"] = [figure.described(document) for figure in scenario.published]
    _show(console, scenario, document, speed)
    figures = {**asdict(speed), "events_per_s": speed.events_per_s}
    if options.json is not None:
        write_text(options.json, json.dumps({**document, "speed": figures}) + "\n", "--json")
    if options.plot is not None:
        draw(run.report, Path(options.plot), scenario.title)
    short = {key: value for key, value in document.items() if key not in ("timeline", "actions")}
    print(json.dumps({**short, "speed": figures}))
    return 0


def described(scenario: Scenario) -> dict[str, Any]:
    """Return what a scenario says of itself."""
    return {
        "scenario": scenario.title,
        "seed": scenario.seed,
        "duration_s": scenario.duration_s,
        "instances": scenario.instances,
        "seconds_from": scenario.basis,
        "predicts": scenario.predicts,
    }


def _show(console: Console, scenario: Scenario, document: Mapping[str, Any], speed: SimulationSpeed) -> None:
    table = tabulated(["seconds"], ["mean", "P50", "P95", "P99", "most"], title=scenario.title)
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("until the first step", "queued_s")):
        table.add_row(name, *(f"{document[key][which]:.4g}" for which in ("mean", "p50", "p95", "p99", "max")))
    console.print(table)
    if document["placements"]:
        _show_placements(console, document)
    requests, use = document["requests"], document["kv_use"]
    console.print(", ".join(f"{count:,} {name}" for name, count in requests.items() if count), highlight=False)
    console.print(
        f"{document['tokens_per_s']:,.1f} generated tokens/s; KV use {use['mean']:.1%}, at the most {use['max']:.1%}",
        highlight=False,
    )
    for action in document["actions"][:_SHOWN_ACTIONS]:
        console.print(f"  {action['at_s']:9.2f} s  {action['kind']}: {action['about']}", highlight=False)
    if len(document["actions"]) > _SHOWN_ACTIONS:
        counts = ", ".join(f"{count:,} x {kind}" for kind, count in document["action_counts"].items())
        console.print(f"  ... in all {counts}", highlight=False)
    if scenario.published:
        _show_published(console, document)
    if scenario.predicts:
        console.print(f"a prediction, not a measurement: {scenario.predicts}", highlight=False)
    console.print(
        f"seconds of steps: {scenario.basis}; {speed.events:,} events in {speed.wall_s:.1f} s, "
        f"{speed.events_per_s:,.0f} a second, for {speed.simulated_s:,.0f} s of {speed.steps:,} steps",
        highlight=False,
    )


def _show_published(console: Console, document: Mapping[str, Any]) -> None:
    """Print figures of papers, and beside them those of this run."""
    ours = "predicted" if document["predicts"] else "simulated"
    title = f"published, of other requests or machines, beside what is {ours} here"
    table = tabulated(["figure"], ["published", ours], ["source"], title=title)
    for each in document["published"]:
        figure = "" if each["here"] is None else f"{each['here']:.4g} ({each['ours']})"
        table.add_row(each["name"], each["value"], figure, each["source"])
    console.print(table)


def _show_placements(console: Console, document: Mapping[str, Any]) -> None:
    """Print where models are, how long their requests took, and what is in use of devices."""
    models = Table(box=None, padding=(0, 1), collapse_padding=True, title="models")
    for name in ("model", "configuration", "on"):
        models.add_column(name, no_wrap=True)
    for name in ("GiB", "ended", "TTFT P50", "P95, s", "TPOT P50", "P95, ms"):
        models.add_column(name, justify="right")
    for name, placed in document["placements"].items():
        if placed["placed"]:
            devices = "\n".join(dict.fromkeys(device for stage in placed["stages"] for device in stage["devices"]))
            models.add_row(name, placed["configuration"], devices, _gib(placed["bytes"]), *_latencies(document, name))
        else:
            models.add_row(name, "no place")
    console.print(models)
    use = tabulated(["device"], ["reserved, GiB", "of", "busy", "models"], title="devices")
    for name, device in document["devices"].items():
        sizes = _gib(device["reserved_bytes"]), _gib(device["memory_bytes"])
        use.add_row(name, *sizes, f"{device['busy']:.1%}", str(len(device["models"])))
    console.print(use)
    for name, placed in document["placements"].items():
        if not placed["placed"]:
            console.print(f"  {name} has no place: {placed['why_not']}", highlight=False)
    by_shapes = ((name, each["unserved"]) for name, each in document["placements"].items() if each["placed"])
    for why, names in by_reason(by_shapes):
        if why:
            console.print(f"  for their shapes alone, as the engine refuses them: {names}: {why}", highlight=False)


def _latencies(document: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return how many requests of a model were served, and how long they took."""
    figures = document["by_model"].get(name)
    if figures is None:
        return ("0",)
    ttft, tpot = figures["ttft_s"], figures["tpot_s"]
    seconds = ttft["p50"], ttft["p95"], 1e3 * tpot["p50"], 1e3 * tpot["p95"]
    return (f"{figures['requests']['completed']:,}", *(f"{each:.3g}" for each in seconds))


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f}"
