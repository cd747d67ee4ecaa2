"""`elastic place`: which model would go to which devices, in which configuration, and why not in a better one."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from elastic.cli.inputs.intent_options import intent_of, load_of, losses_of, names_of, numbers_of
from elastic.cli.predictions.estimate import basis_words, by_reason
from elastic.cli.views.panels import plain_console, print_whole, tabulated
from elastic.estimation.estimate import WEIGHTS
from elastic.estimation.placement import ModelSpace, PlacedModels, numbered, place_models
from elastic.planning.deployment.placing import Deployment, Refusal
from elastic.planning.estimate.devices import shown_bytes

_REASONS = 3
"""Reasons, of better configurations, that are shown for each model."""


def place(options: Namespace) -> int:
    """Print what goes where, what is left of the devices, and why not otherwise. Exit code 2: a model has no place."""
    space = ModelSpace(
        load_of(options),
        intent_of(options),
        names_of(options.weights, "--weights") if options.weights is not None else WEIGHTS,
        names_of(options.kv, "--kv"),
        options.planned,
        losses_of(options),
    )
    placed = place_models(
        dict(zip(numbered([Path(path).resolve().name for path in options.models]), options.models, strict=True)),
        options.devices,
        space,
        policy=options.policy,
        theta=options.theta,
        loads=numbers_of(options.loads, "--loads", "cuda:0=0.4"),
        kind=options.kind,
    )
    if options.json:
        json.dump(_document(placed), sys.stdout)
        print()
    else:
        _print(placed)
    return 2 if any(isinstance(outcome, Refusal) for _, outcome in placed.models) else 0


def _print(placed: PlacedModels) -> None:
    console = plain_console()
    print_whole(_models(placed))
    print_whole(_devices(placed))
    console.print(f"seconds: {basis_words(placed.basis)}; of each model alone on its devices", soft_wrap=True)
    for name, outcome in placed.models:
        reasons = outcome.passed_over if isinstance(outcome, Deployment) else outcome.reasons
        what = "preferred" if isinstance(outcome, Deployment) else "no place"
        for why, configurations in by_reason(reasons)[:_REASONS]:
            console.print(f"  {name}, {what}: {configurations}: {why}", soft_wrap=True, highlight=False)


def _models(placed: PlacedModels) -> Table:
    figures = ("memory", "at a time", "TTFT, s", "TPOT, ms", "all, s")
    table = tabulated(["model", "configuration"], figures, title="placements")
    for name, outcome in placed.models:
        if isinstance(outcome, Refusal):
            table.add_row(name, "no place")
            continue
        each = outcome.estimate
        table.add_row(
            name,
            str(outcome.configuration),
            shown_bytes(outcome.nbytes),
            str(outcome.requests),
            f"{each.ttft_s:.3g}",
            f"{1e3 * each.tpot_s:.3g}",
            f"{each.latency_s:.3g}",
        )
    return table


def _devices(placed: PlacedModels) -> Table:
    """Tabulate what each device has: layers of models, bytes, and the share of time that it will be busy."""
    table = tabulated(["device"], ["free", "load"], ["model, layers, memory"], title="devices, afterwards")
    for state in placed.states:
        held = (
            f"{name} {stage.layers[0]}-{stage.layers[-1]} {shown_bytes(stage.nbytes)}"
            for name, outcome in placed.models
            if isinstance(outcome, Deployment)
            for stage in outcome.stages
            if state.name in stage.devices
        )
        table.add_row(state.name, shown_bytes(state.free_bytes), f"{state.load:.0%}", "\n".join(held))
    return table


def _document(placed: PlacedModels) -> dict[str, Any]:
    """Return the same for programs: bytes, seconds, shares of time."""
    return {
        "basis": placed.basis,
        "models": [{"name": name, **_outcome(outcome)} for name, outcome in placed.models],
        "devices": [asdict(state) for state in placed.states],
    }


def _outcome(outcome: Deployment | Refusal) -> dict[str, Any]:
    if isinstance(outcome, Refusal):
        return {"placed": False, "why_not": _reasons(outcome.reasons)}
    each = outcome.estimate
    return {
        "placed": True,
        "configuration": asdict(outcome.configuration),
        "stages": [
            {"layers": [s.layers.start, s.layers.stop], "devices": s.devices, "bytes": s.nbytes, "busy": busy}
            for s, busy in zip(outcome.stages, outcome.busy, strict=True)
        ],
        "requests": outcome.requests,
        "ttft_s": each.ttft_s,
        "tpot_s": each.tpot_s,
        "latency_s": each.latency_s,
        "cost_gib_s": each.cost,
        "gpu_hours": each.gpu_hours,
        "passed_over": _reasons(outcome.passed_over),
    }


def _reasons(reasons: Sequence[tuple[Any, str]]) -> list[dict[str, str]]:
    return [{"configuration": str(configuration), "why": why} for configuration, why in reasons]
