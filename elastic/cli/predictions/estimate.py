"""`elastic estimate`: configurations of a model on devices, with bytes and seconds, and why others do not fit."""

from __future__ import annotations

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from elastic.cli.inputs.checks import require_at_least
from elastic.cli.inputs.intent_options import intent_of, load_of, losses_of, names_of
from elastic.cli.views.panels import plain_console, print_whole, tabulated
from elastic.cluster.fleet.profiling.guest import measure_two_ranks
from elastic.errors import ConfigError
from elastic.estimation.device_list import parse_devices
from elastic.estimation.estimate import WEIGHTS
from elastic.estimation.estimate import estimate as estimate_all
from elastic.estimation.profile import CostProfile, measure_fingerprints
from elastic.planning.estimate.characterization import FIGURES, alone, ranges
from elastic.planning.estimate.configuration import forms_of
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate

_REASONS = 12
"""Lines of reasons that are shown."""
_PAPER = "by the paper's equations: one request at a time, no keys and values, an even part of the bytes for each rank"


def estimate(options: Namespace) -> int:
    """Print the configurations that fit, the ranks of the best one, and why others do not. Exit code 2: none fits.

    To characterize a model is to print what each choice alone does instead.
    """
    require_at_least(1, options.top, "--top")
    if options.characterize and options.json:
        raise ConfigError("--characterize is a table, and --json has all figures as they are; leave out one of them")
    load = load_of(options)
    weights = names_of(options.weights, "--weights") if options.weights is not None else WEIGHTS
    kv = names_of(options.kv, "--kv")
    profile = _profile(options, forms_of(weights, kv), load) if options.profile else None
    estimates = estimate_all(
        options.model,
        options.devices,
        load=load,
        weights=weights,
        kv=kv,
        intent=intent_of(options),
        kind=options.kind,
        profile=profile,
        planned=options.planned,
        losses=losses_of(options),
        method=options.method,
    )
    if options.json:
        explained = [] if profile is None else [[*about, share] for about, share in profile.r_squared.items()]
        document = {"basis": estimates[0].basis, "r_squared": explained}
        json.dump({**document, "configurations": [_document(each) for each in estimates]}, sys.stdout)
        print()
    else:
        _print(options, estimates, profile)
    return 0 if any(each.fits for each in estimates) else 2


def _print(options: Namespace, estimates: Sequence[Estimate], profile: CostProfile | None) -> None:
    links = profile is not None and profile.link is not None
    fitting = [each for each in estimates if each.fits]
    console = plain_console()
    if fitting and options.characterize:
        print_whole(_characterization(fitting))
    elif fitting:
        wanted = intent_of(options).objective.replace("_", " ")
        print_whole(_configurations(fitting[: options.top], wanted))
    best = estimates[0]
    if best.ranks and best.requests and not (fitting and options.characterize):
        print_whole(_ranks(best))
    counted = f"{len(fitting)} of {len(estimates)} configurations fit"
    console.print(f"{counted}; seconds: {basis_words(estimates[0].basis, links=links)}", soft_wrap=True)
    for (kind, form), share in ({} if profile is None else profile.r_squared).items():
        told = f"  {kind}, {form}: {share:.2%} of the variance of what was measured is in its fit (R squared)"
        console.print(told, soft_wrap=True, highlight=False)
    if options.method == "paper":
        console.print(_PAPER, soft_wrap=True)
    reasons = by_reason((each.configuration, each.why_not) for each in estimates if not each.fits)
    for reason, names in reasons[:_REASONS]:
        console.print(f"  {names}: {reason}", soft_wrap=True, highlight=False)


def _profile(options: Namespace, forms: Sequence[str], load: Load) -> CostProfile:
    """Measure fingerprints in some forms on the first of the devices, which is of this machine.

    Of several on a CPU what ranks there do to each other is measured, too, if they can have a core each.
    """
    first, *others = parse_devices(options.devices, options.kind)
    device = first.name.partition("#")[0]
    if not first.is_place:
        raise ConfigError(
            f"--profile measures on this machine: name its devices, such as cuda:0, not {first.kind.name}"
        )
    profile = measure_fingerprints(options.model, forms, device=device, context=load.tokens)
    if not others or device != "cpu" or len(os.sched_getaffinity(0)) < 2:
        return profile
    return profile.with_links(measure_two_ranks())


def _configurations(estimates: Sequence[Estimate], intent: str) -> Table:
    """Tabulate the best configurations."""
    figures = ("at a\ntime", "TTFT,\ns", "TPOT,\nms", "latency,\ns", "tokens\n/s", "GiB", "GiB s", "GPU s")
    table = tabulated(["configuration"], figures, title=f"the least {intent} first", collapse_padding=True)
    for each in estimates:
        table.add_row(
            str(each.configuration),
            str(each.requests),
            f"{each.ttft_s:.3g}",
            f"{1e3 * each.tpot_s:.3g}",
            f"{each.latency_s:.3g}",
            "" if math.isnan(each.tokens_s) else f"{each.tokens_s:.0f}",
            f"{each.memory_bytes / 2**30:.2f}",
            f"{each.cost:.2g}",
            f"{3600 * each.gpu_hours:.2g}",
        )
    return table


def _characterization(estimates: Sequence[Estimate]) -> Table:
    """Tabulate what each choice alone does, and how far apart all configurations are."""
    base, others = alone(estimates)
    table = Table(title=f"multiples of {base.configuration}", show_footer=True)
    names = [str(each.configuration) for each in others]
    columns = [[f"{figure(each) / figure(base):.2f}" for each in others] for figure in FIGURES.values()]
    spread = ranges(estimates)
    table.add_column("by one choice", footer="largest over smallest of all")
    for name in FIGURES:
        table.add_column(name, footer=f"{spread[name]:.1f}", justify="right")
    for row in zip(names, *columns, strict=True):
        table.add_row(*row)
    return table


def _document(each: Estimate) -> dict[str, Any]:
    """Return an estimate for programs: bytes, seconds; None where it has none."""
    seconds = {"ttft_s": each.ttft_s, "tpot_s": each.tpot_s, "latency_s": each.latency_s, "tokens_s": each.tokens_s}
    costs = {"rate": each.rate, "cost_gib_s": each.cost, "gpu_hours": each.gpu_hours}
    return {
        "configuration": asdict(each.configuration),
        "fits": each.fits,
        "why_not": each.why_not,
        "stages": [[layers.start, layers.stop] for layers in each.stages],
        "ranks": [asdict(rank) for rank in each.ranks],
        "requests": each.requests,
        "memory_bytes": each.memory_bytes,
        "quality_loss": each.quality_loss,
        **{name: value if math.isfinite(value) else None for name, value in {**seconds, **costs}.items()},
    }


def _ranks(best: Estimate) -> Table:
    """Tabulate what each rank of a configuration holds, in MiB, and the share that parameters are of its place."""
    names = ("device", "layers", "fixed", "weights", "staging", "batches", "keys,\nvalues", "place", "weights, %")
    table = Table(*names, title=f"{best.configuration}, MiB", collapse_padding=True)
    for number, rank in enumerate(best.ranks):
        layers = best.stages[number // best.configuration.tp]
        parts = (rank.fixed, rank.layers, rank.staging, rank.activations + rank.copied, rank.kv, rank.place_bytes)
        share = 100 * (rank.fixed + rank.layers) / rank.place_bytes
        table.add_row(
            rank.device, f"{layers[0]}-{layers[-1]}", *(f"{part / 2**20:,.1f}" for part in parts), f"{share:.1f}"
        )
    return table


def basis_words(basis: str, *, links: bool = False) -> str:
    """Say where the seconds of estimates are from; `links`: whether those between ranks were measured."""
    words = {
        "measured": f"fitted to fingerprints measured here; links are {'measured, too' if links else 'assumed'}",
        "data sheet": "predicted at the peak rates of a data sheet, no less than that; estimate --profile measures",
    }
    return words.get(basis, "assumed of one core; estimate --profile measures")


def by_reason(reasons: Iterable[tuple[object, str]]) -> list[tuple[str, str]]:
    """Return each reason once, with what it is of, such as configurations, as text."""
    groups: dict[str, list[str]] = {}
    for each, why in reasons:
        groups.setdefault(why, []).append(str(each))
    return [
        (why, ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
        for why, names in groups.items()
    ]
